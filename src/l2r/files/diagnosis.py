"""A diagnosis: what the routers of one checkpoint do, as numbers per layer and arrays for figures.

Two files, written by compare and sweep into run folders and by diagnose into folders of
its own; docs/diagnostics.md defines the numbers:

diagnosis.json         schema, info, layers, mean; null for a number that is not finite
diagnosis.safetensors  arrays named ``<layer>.<array>``, listed below

Shape letters: N experts, K experts chosen per token, H anchors per expert, R rank, W rows and
S tokens of a row in the log, M sampled tokens, D hidden size, G grid points a side, C certified.

top1, topk, importance [N]      use of each expert per token
usage_by_domain [domains, N]    assignments
experts [W, S, K]               experts of each token of the log, the heaviest first; -1: no token
coactivation [N, N]             P(E_j given E_i)
vocabulary_input, vocabulary_next, vocabulary_predicted [N]
                                mean share of the words whose main expert it is; NaN: none
frequency [5, 4]                by bin: tokens, mean occurrences, load entropy, margin / spread
sample_x [M, D], sample_query [M, R]
                                router inputs and queries (no query where q is x)
sample_first, sample_domain [M] first expert, domain
anchors [N, H, R], anchor_wins [N, H]
                                of L2R routers
plane_axis [G], plane_first [G, G]
                                rank 2: first expert at (q2, q1)
certified_top1, certified_topk, found_top1, found_topk [C]
                                radii of the first C sampled tokens
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from l2r.errors import InputError
from l2r.files.atomic import write_bytes, write_json
from l2r.files.reading import parse_json, read_bytes, refuse_endless
from l2r.stats.agreement import Agreement, agreement

SCHEMA = 1
USAGE = ("top1", "topk", "importance")
_NUMBERS, _ARRAYS = "diagnosis.json", "diagnosis.safetensors"

Array = Shaped[np.ndarray, "..."]


@dataclasses.dataclass
class Diagnosis:
    """layers: numbers of each layer, with ``name``. arrays: ``<layer>.<name>`` -> array.

    info: domains, tokens, settings, ``model`` (numbers of the model as a whole), and what the
    caller adds (the checkpoint's name).
    """

    info: dict[str, Any]
    layers: list[dict[str, Any]]
    arrays: dict[str, Array]

    def mean(self) -> dict[str, float]:
        """Mean over layers of every number that all layers have."""
        first = self.layers[0]
        names = [n for n in first if isinstance(first[n], float)]
        shared = [n for n in names if all(isinstance(row.get(n), float) for row in self.layers)]
        return {n: sum(row[n] for row in self.layers) / len(self.layers) for n in shared}

    def numbers(self) -> dict[str, Any]:
        """Means over layers, and the numbers of the model as a whole that it has."""
        whole = self.info.get("model", {})
        return {**self.mean(), **{n: value for n, value in whole.items() if value is not None}}

    def few_layers(self) -> list[int]:
        """Return the first, the middle and the last layer, for figures of single layers."""
        return sorted({0, len(self.layers) // 2, len(self.layers) - 1})

    def label(self, layer: int) -> str:
        """Return a layer's number as the model counts blocks; its position if two have the same.

        An encoder and a decoder count their blocks separately, for example.
        """
        blocks = [block_number(str(row.get("name", ""))) for row in self.layers]
        unique = layer < len(blocks) == len({*blocks} - {None})
        return str(blocks[layer]) if unique else str(layer)

    def array(self, layer: int, name: str) -> Array:
        """One array of a layer."""
        return self.arrays[f"{layer}.{name}"]

    def by_layer(self, name: str) -> list[Array]:
        """Return an array of every layer, such as the use of each expert [N] (``USAGE``)."""
        return [self.array(layer, name) for layer in range(len(self.layers))]

    def save(self, folder: Path) -> None:
        """Write both files; the numbers last, so that they never stand there alone."""
        write_bytes(folder / _ARRAYS, save(self.arrays))
        text = {"schema": SCHEMA, "info": self.info, "layers": self.layers, "mean": self.mean()}
        write_json(folder / _NUMBERS, text)


def block_number(module: str) -> str | None:
    """``8`` of ``vit.layers.8.mlp.router``; None for a module without a number."""
    return next((part for part in module.split(".") if part.isdigit()), None)


def is_diagnosed(folder: Path) -> bool:
    """Tell whether the folder holds a diagnosis."""
    return (folder / _NUMBERS).is_file()


def read_diagnosis(folder: Path) -> Diagnosis:
    """Read a diagnosis. Raises ValueError where there is none, and for another schema."""
    if not is_diagnosed(folder):
        raise InputError(f"{folder} holds no diagnosis; l2r diagnose writes one")
    try:
        text = parse_json(read_bytes(folder / _NUMBERS), strict=False)
        if text["schema"] != SCHEMA:
            raise InputError(f"schema must be {SCHEMA}; got {text['schema']}")
        refuse_endless(folder / _ARRAYS)
        layers, arrays = text["layers"], load_file(folder / _ARRAYS)
        needed = {f"{layer}.{kind}" for layer in range(len(layers)) for kind in USAGE}
        if not needed or not needed <= arrays.keys():
            raise InputError("it has no layers, or layers without their use of experts")
        shapes = {arrays[name].shape for name in needed}
        if len(shapes) > 1 or any(len(shape) != 1 or shape == (0,) for shape in shapes):
            raise InputError("the use of experts must be one number for each, in every layer")
        diagnosis = Diagnosis(dict(text["info"]), [dict(row) for row in layers], arrays)
        diagnosis.numbers()
        return diagnosis
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, SafetensorError) as error:
        raise InputError(f"the diagnosis in {folder} cannot be read: {error!r}") from error


def agree(first: Diagnosis, second: Diagnosis) -> list[Agreement]:
    """Agreement of two checkpoints by layer; empty unless they read the same tokens."""
    if not same_tokens(first, second):
        return []
    pairs = zip(first.by_layer("experts"), second.by_layer("experts"), strict=True)
    return [found for pair in pairs if (found := agreement(*pair)) is not None]


def same_tokens(first: Diagnosis, second: Diagnosis) -> bool:
    """Tell whether both noted their choices on the same data, in as many layers."""
    data = first.info.get("data")
    return (
        data is not None
        and data == second.info.get("data")
        and len(first.layers) == len(second.layers)
    )
