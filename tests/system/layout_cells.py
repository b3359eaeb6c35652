"""Cells of quantized folders: a layout and a command, compared with transformers as in cells.py."""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.hf.layout_codes import from_nf4, nf4_scales
from tests.hf.layouts import LAYOUTS, TEXT, folder_of, tokenizer
from tests.system.cells import COMMANDS, LENGTH, NEAR, ROWS, Folder, RefusedError
from tests.system.forward import Call, forward

# Of cells.py, those that open a folder; swaps, exports and saves have tests of their own.
OPENING = (
    "check", "diagnose_data", "diagnose_text", "mismatch_bf16", "mismatch_int8", "mismatch_folder",
    "eval_text", "serve", "generate", "record", "replay", "statistics", "fit_routers",
)  # fmt: skip


class LayoutFolder(Folder):
    """A quantized folder in the place of those that cells.py makes."""

    kind = "stock"
    near = NEAR

    def __init__(self, layout: str, text: Any, root: Path) -> None:
        self.family, self.layout, self.text = LAYOUTS[layout].family, layout, text
        self.dtype, self.torch_dtype = "bf16", torch.bfloat16
        self.path, self.root = folder_of(layout), root

    @cached_property
    def read(self) -> tuple[torch.Tensor, list[Call]]:
        """Logits and calls of all routers on the rows of the text."""
        logits, calls = forward(self.family, self.model, self.text.rows)
        if self.layout == "nf4_gate":
            calls = [call._replace(router=Unpacked(call.router)) for call in calls]
        return logits, calls


class Unpacked(nn.Module):
    """A router of HunYuan in nf4, whose one parameter is its matrix [N, D], unpacked by hand."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        state = router.wg.weight.quant_state
        scales = nf4_scales(
            state.absmax, state.state2.code, state.state2.absmax, state.state2.blocksize,
            float(state.offset),
        )  # fmt: skip
        whole = from_nf4(router.wg.weight.data, state.code, scales, state.blocksize)
        self.matrix = nn.Parameter(whole.view(state.shape).bfloat16(), requires_grad=False)
        self.forward = router.forward


def make_text(folder: Path) -> Any:
    """A text in a file and in rows of tokens, and a sentence of it."""
    words = TEXT.split()
    generator = torch.Generator().manual_seed(0)
    order = torch.randint(len(words), (600,), generator=generator).tolist()
    file = folder / "words.txt"
    file.write_text(" ".join(words[n] for n in order))
    rows = torch.tensor(tokenizer()(file.read_text())["input_ids"])
    return SimpleNamespace(
        tokenizer=tokenizer(), file=file, sentence=TEXT.strip(),
        rows=rows[: ROWS * LENGTH].view(ROWS, LENGTH),
    )  # fmt: skip


def outcome(folder: LayoutFolder, command: str) -> str:
    """Empty where a command's numbers are right, else the line that refuses it."""
    try:
        COMMANDS[command](folder)  # type: ignore[arg-type]
    except (RefusedError, ValueError) as error:
        return str(error)
    return ""
