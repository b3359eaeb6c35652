"""A checkpoint written again with other routers, and everything else of it byte for byte.

Tensors go from file to file under their names and in their dtypes, codes and scales of quantizers
among them, and so do those that transformers leaves aside. The configuration keeps every field that
does not describe routers. Both are compared with the source before a folder is there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME

from l2r.errors import InputError
from l2r.files.atomic import copy_file, write_json, write_text
from l2r.files.reading import read_json
from l2r.hf.checkpoints.folders import checkpoint_folder, kept_files
from l2r.hf.checkpoints.pretrained import cannot_load, load_pretrained, meta_model, save_model
from l2r.hf.models.layouts import check_layout, check_version, layout_of
from l2r.hf.models.opening import NeedsPackageAndCode, preparing_code, without_notes
from l2r.hf.models.stored_bytes import compare, described, stored_tensors, write_tensors
from l2r.hf.models.stored_tensors import file_tensors, place_names
from l2r.hf.models.weight_files import files_of_weights, named, refuse
from l2r.hf.swap.sites import recognition_note, router_sites

ReportFile = Callable[[int, int, str], None]
_OF_ROUTERS = (
    "model_type",
    "architectures",
    "l2r_swap",
    "router",
    "swapped_from",
)  # of config.json
_SAFE = ".safetensors"
_WHOLE = ("F32", "BF16", "F16")  # dtypes of weights that are no codes


class Copied(NamedTuple):
    """Tensors of a copy: compared with the source's and the same, new, and left out."""

    kept: int
    new: int
    dropped: int

    def __str__(self) -> str:
        """Return a line for a person."""
        return (
            f"{self.kept:,} tensors are those of the source, compared byte by byte; "
            f"{self.dropped:,} of old routers are gone, {self.new:,} of new ones are there"
        )


class CheckpointCopy:
    """A folder and a model of it, to be written again after routers of ``model`` were replaced.

    Make one before the swap. Nothing but new routers is read from the model.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        kept_files(folder)  # refuses links before anything is computed
        self.model, self._folder = model, folder
        self._paths = [site.path for site in router_sites(model)]
        self._old = self._router_tensors()
        self._files = _tensors_by_file(folder)
        self.copied: Copied | None = None

    @classmethod
    def on_meta(
        cls,
        folder: str | Path,
        report: Callable[[str], object] = lambda line: None,
        *,
        trust_remote_code: bool = False,
    ) -> "CheckpointCopy":
        """Open a folder or run with the model on torch's meta device, which holds shapes alone.

        Tensors of routers are in memory, without their values; of quantized weights the names alone
        are read. ``report`` takes a line on routers that are in no table, and one on quantized
        weights. Raises ValueError as ``load_pretrained``, and as ``router_sites`` for an unknown
        family.
        """
        folder = checkpoint_folder(folder)
        code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if (layout := layout_of(folder)) is not None:
            report(f"{layout.name} weights, copied as they are")
            try:
                model = _packed_model(folder, **code)
            except Exception as error:  # of any kind, as in load_pretrained
                raise cannot_load("a language model", folder, error) from error
        else:
            options: dict[str, Any] = {"device_map": "meta", "offload_folder": folder}
            model = load_pretrained(folder, dtype="auto", **options, **code)
        if note := recognition_note(model):
            report(note)
        for site in router_sites(model):
            site.router.to_empty(device="cpu")
        return cls(model, folder)

    def save(
        self,
        out: Path,
        *,
        tokenizer: Any = None,
        sections: Sequence[str] = (),
        report: ReportFile = lambda done, total, file: None,
    ) -> None:
        """Write the copy, its card, and every other file of the source that stays true.

        Raises ValueError as ``save_model`` and ``write``.
        """
        more: dict[str, Any] = {"tokenizer": tokenizer, "sections": sections}
        more["write"] = partial(self.write, report=report)
        save_model(self.model, out, source=self._folder, **more)

    def write(
        self, model: Any, out: Path, *, report: ReportFile = lambda done, total, file: None
    ) -> None:
        """Write the configuration of ``model``, its new routers and the source's other tensors.

        New tensors go into the file that has those of the layer's old router. ``report`` is given
        the number of files written, their number, and the next one's name. Sets ``copied``.
        Raises ValueError for weights that are not finite, and where the copy is none.
        """
        write_text(out / "config.json", _json(_config(model, self._folder)))
        dropped, drawn = self._changes()
        files = self._files
        homes = {name: file for file, tensors in files.items() for name in tensors}
        places: dict[str, str] = {}
        for number, (file, tensors) in enumerate(files.items()):
            report(number, len(files), file)
            written, source = _written_name(file), self._folder / file
            kept = {name: tensor for name, tensor in tensors.items() if name not in dropped}
            here = {n: t for n, (t, old) in drawn.items() if homes[old] == file}
            if len(kept) == len(tensors) and not here and written == file:
                copy_file(source, out / file)
            elif kept or here:
                metadata = stored_tensors(source)[1] if written == file else {"format": "pt"}
                write_tensors(out / written, kept | here, metadata)
            places |= dict.fromkeys([*kept, *here], written)
        report(len(files), len(files), "")
        if list(map(_written_name, files)) != [SAFE_WEIGHTS_NAME]:
            index = self._index(places, {n: t for n, (t, _) in drawn.items()}, dropped)
            write_json(out / SAFE_WEIGHTS_INDEX_NAME, index)
        self._compare(out, dropped)
        self.copied = Copied(len(homes) - len(dropped), len(drawn), len(dropped))

    def _router_tensors(self) -> dict[str, Tensor]:
        """Tensors of the routers, the very objects, by their names in the model."""
        routers = {path: self.model.get_submodule(path) for path in self._paths}
        return {
            f"{path}.{name}": tensor
            for path, router in routers.items()
            for name, tensor in router.state_dict(keep_vars=True).items()
        }

    def _changes(self) -> tuple[set[str], dict[str, tuple[Tensor, str]]]:
        """Names of stored tensors that go, and new ones by name, each with an old one of its layer.

        What the family's selection reads, its bias, has moved to the new router as it was.
        """
        new = self._router_tensors()
        moved = {name for name, old in self._old.items() if new.get(name) is old}
        replaced = [
            path
            for path in self._paths
            if any(n.startswith(f"{path}.") and n not in moved for n in {*self._old, *new})
        ]
        stored = [name for tensors in self._files.values() for name in tensors]
        dropped: dict[str, dict[str, str]] = {path: {} for path in replaced}  # places by name
        for name, place in place_names(self.model, stored).items():
            path = next((p for p in replaced if place.startswith(f"{p}.")), None)
            if path is not None and place not in moved:
                dropped[path][name] = place
        lacking = [path for path, places in dropped.items() if not places]
        if lacking:
            raise InputError(f"weights are missing (of {named(lacking)})")
        drawn = {
            place: path
            for path in replaced
            for place in new
            if place.startswith(f"{path}.") and place not in moved
        }
        near = {place: _near_names(place, path, dropped[path]) for place, path in drawn.items()}
        found = place_names(self.model, {name for names in near.values() for name in names})
        written = {}
        for place, path in drawn.items():
            good = [name for name in near[place] if found[name] == place]
            if not good:
                raise ValueError(f"no name in files leads to {place}")
            written[good[0]] = (new[place].detach(), next(iter(dropped[path])))
        return {name for places in dropped.values() for name in places}, written

    def _index(
        self, places: Mapping[str, str], drawn: Mapping[str, Tensor], dropped: set[str]
    ) -> dict[str, Any]:
        names = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
        old = next((self._folder / n for n in names if (self._folder / n).is_file()), None)
        found = read_json(old, strict=False).get("metadata") if old else None
        metadata = dict(found) if isinstance(found, dict) else {}
        stored = {n: t for tensors in self._files.values() for n, t in tensors.items()}
        sizes = [described(t)[2] for n, t in {**stored, **drawn}.items() if n in places]
        metadata["total_size"] = sum(sizes)
        if isinstance(metadata.get("total_parameters"), int):
            gone = sum(_numbers(stored[name]) for name in dropped)
            metadata["total_parameters"] += sum(t.numel() for t in drawn.values()) - gone
        return {"metadata": metadata, "weight_map": dict(sorted(places.items()))}

    def _compare(self, out: Path, dropped: set[str]) -> None:
        """Raise ValueError unless the copy has every tensor and every field that stays."""
        new = {n: t for tensors in _tensors_by_file(out).values() for n, t in tensors.items()}
        wrong: dict[str, list[str]] = {"changed": [], "not finite": []}
        for tensors in self._files.values():
            for name, tensor in tensors.items():
                if name not in dropped:
                    fault = compare(tensor, new[name]) if name in new else "changed"
                    wrong.get(fault, []).append(name)
        refuse({"not finite": wrong["not finite"]})
        configs = (read_json(f / "config.json", strict=False) for f in (self._folder, out))
        before, after = map(_others, configs)
        # as text: NaN is no other than NaN
        fields = [n for n in {**before, **after} if _json(before.get(n)) != _json(after.get(n))]
        if wrong["changed"] or fields:
            raise ValueError(
                f"the copy would differ from {self._folder} besides the routers: "
                f"{named(sorted([*wrong['changed'], *fields]))}"
            )


def _packed_model(folder: Path, **code: Any) -> Any:
    """Build the model of a quantized folder on meta; its modules and whole tensors are in files.

    Raises ValueError for a layout that nothing opens, and for what is missing or misshapen.
    """
    stored = {n: t for tensors in _tensors_by_file(folder).values() for n, t in tensors.items()}
    check_layout(folder, None, stored)
    check_version(name for name in stored if ".experts." in name)
    model = meta_model(folder, **code)
    own, places = model.state_dict(), place_names(model, stored)
    there = {place.rpartition(".")[0] for place in places.values()}
    there |= {".".join(path.split(".")[:n]) for path in there for n in range(path.count(".") + 1)}
    tied = {*(getattr(model, "all_tied_weights_keys", None) or {})}
    shapes = []
    for name in [n for n, place in places.items() if n == place and n in own]:
        kind, shape, _ = described(stored[name])
        if kind in _WHOLE and shape != tuple(own[name].shape):
            built = list(own[name].shape)
            shapes.append(f"{name} is {list(shape)} in the files and {built} in the model")
    missing = [n for n in own if n not in tied and n.rpartition(".")[0] not in there]
    refuse({"missing": missing, "of another shape": shapes})
    return model


def _near_names(place: str, path: str, others: Mapping[str, str]) -> list[str]:
    """Names for a tensor of the router at ``path``, those most like its old ones in files first.

    ``others`` are the places of these by their names. A family may rename some steps of a path.
    """
    steps, own = path.split("."), place.removeprefix(f"{path}.")
    names = []
    for name, other in others.items():
        head = name.split(".")[: -other.removeprefix(f"{path}.").count(".") - 1]
        for dropped in range(len(head) + 1):
            for added in range(len(steps) + 1):
                tail = steps[len(steps) - added :]
                names.append(".".join([*head[: len(head) - dropped], *tail, own]))
    return [*dict.fromkeys(names), place]


def _tensors_by_file(folder: Path) -> dict[str, dict[str, Any]]:
    """Tensors in every file of weights that transformers reads; pickled ones are mapped."""
    return {
        file.name: stored_tensors(file)[0] if file.suffix == _SAFE else file_tensors(file)
        for file in files_of_weights(folder)
    }


def _written_name(file: str) -> str:
    """Name of the file for the tensors of another: safetensors, which run no code when opened."""
    name = Path(file)
    return file if name.suffix == _SAFE else name.stem.removeprefix("pytorch_") + _SAFE


def _config(model: Any, folder: Path) -> dict[str, Any]:
    """Return the source's config.json, but for the fields on routers and on who opens it."""
    source = without_notes(read_json(folder / "config.json", strict=False))
    config, values = model.config, dict(source)
    own = {"architectures": [type(model).__name__], **_given(config.to_dict())}
    for field in _OF_ROUTERS:
        values.pop(field, None)
        values |= {field: own[field]} if field in own else {}
    if not isinstance(config, NeedsPackageAndCode):  # of code that knows nothing of the swap
        values.pop("auto_map", None)
        values |= {"auto_map": config.auto_map} if getattr(config, "auto_map", None) else {}
    noted: dict[str, Any] = config.with_notes(values)
    return noted


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _others(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a config.json that do not describe routers."""
    plain = without_notes(config)
    plain["auto_map"] = preparing_code(plain.get("auto_map"))
    return {name: value for name, value in plain.items() if name not in _OF_ROUTERS}


def _json(values: Any) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def _numbers(tensor: Any) -> int:
    number = 1
    for size in tensor.shape:
        number *= size
    return number
