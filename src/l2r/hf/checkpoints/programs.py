"""A language model as one program that needs neither this package nor transformers.

``torch-export`` writes ``model.pt2`` (torch.export.load), ``onnx`` writes ``model.onnx``. Experts
run as transformers' batched_mm and routers as plain code, which are torch's own operations alone.
"""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from l2r.errors import InputError, blames_input
from l2r.files.atomic import new_folder
from l2r.hf.models import computing_experts
from l2r.hf.models.card import Loading, python_block, write_card
from l2r.kernels import dispatch

PROGRAM_TOLERANCE = 1e-4  # of the largest logit
_SHAPES = ((2, 7), (1, 1), (3, 50))  # rows and tokens that are compared; the first is traced
_SEED = 0


class ProgramAgreement(NamedTuple):
    """Largest difference of a logit between program and model, and the largest logit."""

    difference: float
    largest: float


class _Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


@torch.no_grad()
def export_program(
    model: Any,
    out: Path,
    *,
    form: str,
    tokenizer: Any = None,
    tolerance: float = PROGRAM_TOLERANCE,
    sections: Sequence[str] = (),
) -> ProgramAgreement:
    """Write ``model`` as input_ids [B, S] -> logits [B, S, V], any B and S, into a new folder.

    The written file is loaded again and compared with the model on several shapes. Raises
    ValueError for an unknown form, a model that cannot be exported, and a difference above
    ``tolerance`` times the largest logit (or 1); nothing is left then.
    """
    if form not in PROGRAM_FORMS:
        raise InputError(f"format must be one of {', '.join(PROGRAM_FORMS)}; got {form!r}")
    if form == "onnx":  # missing packages are named before anything is traced
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    samples = _samples(model)
    expected = [_Logits(model)(ids) for ids in samples]
    with new_folder(out) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what torch itself calls
        try:
            run = PROGRAM_FORMS[form](_trace(model, samples[0]), folder)
            outputs = [run(ids) for ids in samples]
        except Exception as error:  # each exporter raises other kinds of errors
            if not blames_input(error):
                raise
            first = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"{form} export of {type(model).__name__} failed: {first}") from error
        apart = [a - b for a, b in zip(outputs, expected, strict=True)]
        agreement = ProgramAgreement(_largest(apart), _largest(expected))
        if not agreement.difference <= tolerance * max(1.0, agreement.largest):
            raise InputError(
                f"logits of the {form} program must be within tolerance={tolerance:g} of the "
                f"largest, {agreement.largest:.3g}; they differ by {agreement.difference:.3g}"
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_card(folder, model, sections, _LOADING[form])
    return agreement


def _largest(tensors: list[Tensor]) -> float:
    """Largest magnitude; NaN where there is one, which Python's max would lose."""
    return float(torch.cat([tensor.flatten() for tensor in tensors]).abs().max())


def _samples(model: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _SHAPES[-1][1]
    shapes = [(rows, min(tokens, longest)) for rows, tokens in _SHAPES]
    return [torch.randint(config.vocab_size, s, generator=generator) for s in shapes]


def _trace(model: Any, ids: Tensor) -> torch.export.ExportedProgram:
    free = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=1)}
    with dispatch.implementation("plain"), computing_experts(model, "batched_mm"):
        return torch.export.export(
            _Logits(model),
            (ids,),
            dynamic_shapes={"input_ids": free},
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,  # for torch 2.10
        )


RunProgram = Callable[[Tensor], Tensor]


def _torch_export(program: torch.export.ExportedProgram, folder: Path) -> RunProgram:
    torch.export.save(program, folder / "model.pt2")
    loaded: RunProgram = torch.export.load(folder / "model.pt2").module()
    return loaded


def _onnx(program: torch.export.ExportedProgram, folder: Path) -> RunProgram:
    import onnxruntime

    path = folder / "model.onnx"
    torch.onnx.export(
        program,
        (),
        path,
        input_names=["input_ids"],
        output_names=["logits"],
        dynamic_shapes={"input_ids": {0: "batch", 1: "length"}},
        dynamo=True,
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda ids: torch.from_numpy(session.run(["logits"], {"input_ids": ids.numpy()})[0])


def _stable_sort(
    values: Any, *, stable: bool = True, dim: int = -1, descending: bool = False
) -> Any:
    """Return a sort in ONNX's operations; its TopK takes the lowest index first among equals."""
    from onnxscript import opset18 as op

    size = op.Shape(values, start=dim, end=None if dim == -1 else dim + 1)
    return op.TopK(values, size, axis=dim, largest=int(descending), sorted=1)


def _loading(library: str, code: str) -> Loading:
    block = python_block(code)
    return Loading(
        library, f"One program, input_ids [B, S] to logits [B, S, V], in fp32:\n\n{block}"
    )


_LOADING = {
    "onnx": _loading(
        "onnx", 'import onnxruntime\n\nprogram = onnxruntime.InferenceSession("FOLDER/model.onnx")'
    ),
    "torch-export": _loading(
        "pytorch", 'import torch\n\nprogram = torch.export.load("FOLDER/model.pt2").module()'
    ),
}
PROGRAM_FORMS: dict[str, Callable[[torch.export.ExportedProgram, Path], RunProgram]] = {
    "onnx": _onnx,
    "torch-export": _torch_export,
}
