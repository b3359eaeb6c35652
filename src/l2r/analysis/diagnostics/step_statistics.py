"""Statistics of the routers during one training step, for the logs of any trainer.

    with capture(model) as captured:
        loss = model(**batch).loss
    numbers = router_statistics(captured).scalars()

A ``RouterWatch`` collects the same from routers of ours and of supported families, over the
micro-batches and ranks of a step, and costs nothing between steps.

Shape letters: T tokens, L layers, N experts, K experts chosen per token.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from l2r.analysis.diagnostics import streaming_sums as sums
from l2r.analysis.diagnostics.metrics import load_from_sums, margin_from_sums
from l2r.errors import InputError
from l2r.functional import mean_probs, router_z_loss, routing_probs, select_experts
from l2r.hf.routes import in_backward, unwrapped_model
from l2r.hf.swap import layer_index, running_sites
from l2r.routers import Captured, RouterOutput
from l2r.routers.observe import watched
from l2r.routers.temporary import removing

Routed = Sequence[Tensor]  # logits [T, N], weights [T, K], indices [T, K]

NUMBERS = (
    "load_entropy",
    "max_over_mean",
    "dead_experts",
    "mean_margin",
    "z_loss",
    "balance_loss",
)
_CELL = 8  # pixels of a picture's cell
_LOW, _FAIR, _HIGH = (33, 102, 172), (247, 247, 247), (178, 24, 43)  # of a load, as colors
_UNUSED = (0, 0, 0)


@dataclass(frozen=True)
class RouterStatistics:
    """Numbers of each routed layer, whose indices are ``layers``.

    An index is that of the block in the model; where two routers are in one block, or the source is
    an output or a list, which name no block, it counts routers from 0.
    load_entropy: of the experts' loads over log N (1 is perfect balance). max_over_mean: of the
    loads. dead_experts: without a token. mean_margin: between the two largest logits. z_loss and
    balance_loss: unweighted, Eq. 35 and Eq. 34, per layer. load: tokens [N] of every expert.
    """

    layers: tuple[int, ...]
    load_entropy: tuple[float, ...]
    max_over_mean: tuple[float, ...]
    dead_experts: tuple[float, ...]
    mean_margin: tuple[float, ...]
    z_loss: tuple[float, ...]
    balance_loss: tuple[float, ...]
    load: tuple[Tensor, ...]

    def scalars(self, prefix: str = "router") -> dict[str, float]:
        """Flat names for a logger: PREFIX/NAME, the mean over layers, and PREFIX/NAME/layer-L."""
        found = {}
        for name in NUMBERS:
            values = getattr(self, name)
            found[f"{prefix}/{name}"] = sum(values) / len(values)
            for layer, value in zip(self.layers, values, strict=True):
                found[f"{prefix}/{name}/layer-{layer}"] = value
        return found

    def picture(self) -> UInt8[Tensor, "3 H W"]:
        """Loads as colors, a row for each layer and a column for each expert, 8 pixels a cell.

        Black is no token, blue less than a fair load, white a fair one, red twice as much or more.
        """
        colors = torch.tensor([_LOW, _FAIR, _HIGH], dtype=torch.float32)
        rows = torch.zeros(len(self.load), max(map(len, self.load)), 3)
        for row, load in zip(rows, self.load, strict=True):
            ratio = (load / load.mean()).clamp(max=2).float()[:, None]
            shade = torch.where(
                ratio < 1, colors[0].lerp(colors[1], ratio), colors[1].lerp(colors[2], ratio - 1)
            )
            row[: len(load)] = torch.where(ratio == 0, torch.tensor(_UNUSED).float(), shade)
        pixels = rows.repeat_interleave(_CELL, 0).repeat_interleave(_CELL, 1)
        return pixels.permute(2, 0, 1).to(torch.uint8)


def router_statistics(
    source: Any, *, mask: Tensor | None = None, top_k: int | None = None
) -> RouterStatistics:
    """Statistics of one step, from what ``capture`` recorded or from a model's output.

    ``source`` is a ``Captured``; a list of (logits [T, N], weights [T, K], indices [T, K]), a
    layer each; or an output with ``router_logits``, which needs ``top_k``: the k largest logits
    are taken as chosen, which is exact in families without groups or a selection bias. ``mask``
    (any shape, T entries) is true for tokens that count.

    Raises ValueError for a source without routed tokens, and for ``router_logits`` without
    ``top_k``.
    """
    layers: dict[int, Sequence[Routed]]
    if isinstance(source, Captured):
        called = {name: list(calls) for name, calls in source.outputs.items() if calls}
        numbers = _numbered(called)
        layers = {numbers[name]: calls for name, calls in called.items()}
    else:
        layers = {n: [output] for n, output in enumerate(_outputs(source, top_k))}
    total: dict[int, sums.Sums] = {}
    for layer, every in layers.items():
        for call in every:
            sums.add(total.setdefault(layer, {}), _sums(call, mask))
    return _from_sums(total)


class RouterWatch:
    """Sums over what the routers of a model return between ``start`` and ``read``.

    Padding in a 2-D ``attention_mask`` that the model is called with does not count. A layer that
    activation checkpointing runs again counts once. A compiled model is not watched.
    Raises ValueError for a model without a supported router.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped_model(model)
        self._sites = running_sites(inner)
        self._layers = _numbered(site.path for site in self._sites)
        # transformers' outermost model is called with the attention mask, whatever stands around.
        whole = (part for part in inner.modules() if hasattr(part, "get_input_embeddings"))
        self._called = next(whole, inner)
        self._watching: ExitStack | None = None
        self._sums: dict[int, sums.Sums] = {}
        self._mask: Tensor | None = None

    def start(self) -> None:
        """Watch the forward passes from here on."""
        self.stop()
        hook = self._called.register_forward_pre_hook(self._see_mask, with_kwargs=True)
        self._watching = ExitStack()
        self._watching.enter_context(removing({hook: self._called}))
        routers = {site.path: site.router for site in self._sites}
        self._watching.enter_context(watched(routers, self._see))

    def stop(self) -> None:
        """Watch no more, and forget what was seen."""
        if self._watching is not None:
            self._watching.close()
        self._watching, self._sums, self._mask = None, {}, None

    def read(self) -> RouterStatistics | None:
        """Statistics over all ranks, which call this together; None where no router was called."""
        total = sums.all_reduce(self._sums)
        self.stop()
        return _from_sums(total) if total else None

    @property
    def is_open(self) -> bool:
        """Whether it watches."""
        return self._watching is not None

    def _see_mask(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None

    def _see(self, x: Tensor, output: RouterOutput, path: str) -> None:
        if not (in_backward() or torch.compiler.is_compiling()):
            part = _sums(output, self._mask)
            sums.add(self._sums.setdefault(self._layers[path], {}), part)


def _numbered(paths: Iterable[str]) -> dict[str, int]:
    """Indices of the blocks of routers; their own order where two of them have one index."""
    layers = {path: layer_index(path) for path in paths}
    alone = len(set(layers.values())) == len(layers)
    return layers if alone else {path: n for n, path in enumerate(layers)}


def _outputs(source: Any, top_k: int | None) -> Sequence[Routed]:
    logits = getattr(source, "router_logits", None)
    if logits is None:
        if isinstance(source, Sequence) and source:
            return list(source)
        raise InputError(
            "source must be what capture recorded, a list of (logits, weights, indices) or an "
            f"output with router_logits; got {type(source).__name__}"
        )
    if top_k is None:
        raise InputError("top_k is needed with router_logits, which do not say it; got None")
    found = []
    for layer in (layer for layer in logits if layer is not None):
        flat = layer.reshape(-1, layer.shape[-1])
        found.append((flat, *select_experts(routing_probs(flat), top_k, ranking=flat)))
    return found


@torch.no_grad()
def _sums(output: Routed, mask: Tensor | None) -> sums.Sums:
    """Sums over the tokens of one call that count."""
    logits, weights, indices = output
    if mask is not None and mask.numel() == len(logits):
        keep = mask.reshape(-1).bool().to(logits.device)
        logits, weights, indices = logits[keep], weights[keep], indices[keep]
    tokens = len(logits)
    return {
        **sums.margin_sums(logits, 0.0),
        **sums.usage_sums(indices, weights, logits.shape[1]),
        "probs": mean_probs(logits).double() * tokens,
        "z": router_z_loss(logits).double() * tokens,
    }


def _from_sums(total: Mapping[int, sums.Sums]) -> RouterStatistics:
    """Numbers per layer. Raises ValueError where no token was routed."""
    if not total:
        raise InputError("source must hold routed tokens; it has no layer")
    found: dict[str, list[float]] = {name: [] for name in NUMBERS}
    loads = []
    for part in ({k: v.cpu() for k, v in part.items()} for part in total.values()):
        load, margin = load_from_sums(part), margin_from_sums(part)
        tokens, experts = part["tokens"], len(part["topk"])
        found["load_entropy"].append(load["entropy"])
        found["max_over_mean"].append(load["max_over_mean"])
        found["dead_experts"].append(load["dead_experts"])
        found["mean_margin"].append(margin["mean_margin"])
        found["z_loss"].append(float(part["z"] / tokens))
        balance = experts * (part["probs"] / tokens * (part["topk"] / tokens)).sum()
        found["balance_loss"].append(float(balance))
        loads.append(part["topk"])
    numbers = {name: tuple(values) for name, values in found.items()}
    return RouterStatistics(layers=tuple(total), **numbers, load=tuple(loads))
