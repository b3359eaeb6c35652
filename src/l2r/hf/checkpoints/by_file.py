"""Swaps and exports that copy one file of weights at a time: nothing but routers in memory."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from l2r.hf.checkpoints.folders import checkpoint_folder
from l2r.hf.checkpoints.pretrained import load_pretrained, save_model
from l2r.hf.models.weight_files import check_finite, files_of_weights
from l2r.hf.swap.sites import recognition_note, router_sites
from l2r.runs.atomic import write_json
from l2r.runs.reading import read_bytes

Report = Callable[[int, int, str], None]


class CheckpointOnDisk:
    """A checkpoint whose weights stay in their files; swap routers of ``model`` or none, then save.

    ``model`` is whole, on torch's meta device, which holds shapes alone; its routers' tensors are
    in memory, without the values of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model = load_pretrained(folder, dtype="auto", device_map="meta", offload_folder=folder)
        self._names = _names_by_file(folder)
        self._paths = [site.path for site in router_sites(self.model)]
        for path in self._paths:
            self.model.get_submodule(path).to_empty(device="cpu")
        self._old = self._router_tensors()

    @classmethod
    def open(
        cls, folder: str | Path, report: Callable[[str], object] = lambda line: None
    ) -> "CheckpointOnDisk | None":
        """The checkpoint in a folder or run, None where it must be read whole.

        That is one without safetensors, quantized, or with routers under names of an older form.
        ``report`` takes a line on routers that are in no table.
        Raises ValueError as ``load_pretrained``, and as ``router_sites`` for an unknown family.
        """
        folder = checkpoint_folder(folder)
        quantized = b'"quantization_config"' in read_bytes(folder / "config.json")
        weights = (folder / name for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        if quantized or not any(file.is_file() for file in weights):
            return None
        checkpoint = cls(folder)
        stored = {name for names in checkpoint._names.values() for name in names}
        if not checkpoint._stored_names(checkpoint._old) <= stored:
            return None
        if note := recognition_note(checkpoint.model):
            report(note)
        return checkpoint

    def save(
        self,
        out: Path,
        *,
        tokenizer: Any = None,
        sections: Sequence[str] = (),
        report: Report = lambda done, total, file: None,
    ) -> None:
        """Write ``model`` as ``save_model`` does. Raises ValueError as it and ``write``."""
        more: dict[str, Any] = {"tokenizer": tokenizer, "sections": sections}
        more["write"] = partial(self.write, report=report)
        save_model(self.model, out, source=self._folder, unchanged=True, **more)

    def write(
        self, model: Any, out: Path, *, report: Report = lambda done, total, file: None
    ) -> None:
        """Write ``model``, its config and the tensors of the files, unchanged, into a folder.

        New routers go into the last file. ``report`` is given the number of files written, their
        number, and the next one's name. Raises ValueError for weights that are not finite.
        """
        new = self._router_tensors()
        # What the family's selection reads, its bias, has moved to the new router as it was.
        gone = [name for name, old in self._old.items() if new.get(name) is not old]
        drawn = {name: new[name] for name in new if self._old.get(name) is not new[name]}
        dropped = self._stored_names({name: self._old[name] for name in gone})
        written = {name: tensor.detach() for name, tensor in drawn.items()}
        PreTrainedModel.save_pretrained(model, out, state_dict=written)  # files keep all else
        routers = _read(out / SAFE_WEIGHTS_NAME) if drawn else {}
        places: dict[str, str] = {}
        size = 0
        for number, (file, names) in enumerate(self._names.items()):
            report(number, len(self._names), file)
            tensors = _read(self._folder / file, [name for name in names if name not in dropped])
            check_finite(tensors.items())
            tensors |= routers if file == list(self._names)[-1] else {}
            if tensors:
                save_file(tensors, out / file, metadata={"format": "pt"})
            places |= dict.fromkeys(tensors, file)
            size += sum(tensor.nbytes for tensor in tensors.values())
        report(len(self._names), len(self._names), "")
        if SAFE_WEIGHTS_NAME not in self._names:
            (out / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)
            metadata = {"total_parameters": model.num_parameters(), "total_size": size}
            index = {"metadata": metadata, "weight_map": dict(sorted(places.items()))}
            write_json(out / SAFE_WEIGHTS_INDEX_NAME, index)

    def _router_tensors(self) -> dict[str, Tensor]:
        """Tensors of the routers, the very objects, by their names in the model."""
        routers = {path: self.model.get_submodule(path) for path in self._paths}
        return {
            f"{path}.{name}": tensor
            for path, router in routers.items()
            for name, tensor in router.state_dict(keep_vars=True).items()
        }

    def _stored_names(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Names that tensors of the model have in its files."""
        return set(revert_weight_conversion(self.model, dict(tensors)))


def _names_by_file(folder: Path) -> dict[str, list[str]]:
    """Names of the tensors in every file of weights that transformers reads."""
    return {file.name: list(_read(file)) for file in files_of_weights(folder)}


def _read(file: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a file, all or some. They are mapped: what is not used is not read."""
    with safe_open(file, "pt") as stream:
        chosen = stream.keys() if names is None else names
        return {name: stream.get_tensor(name) for name in chosen}
