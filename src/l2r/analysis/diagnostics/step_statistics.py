"""Statistics of the routers during one training step, for the logs of any trainer.

    with capture(model) as captured:
        loss = model(**batch).loss
    numbers = router_statistics(captured).scalars()

A ``RouterWatch`` collects the same over the micro-batches and ranks of a step, and costs nothing
between steps.

Shape letters: T tokens, L layers, N experts, K experts chosen per token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor, nn

from l2r.analysis.diagnostics import streaming_sums as sums
from l2r.analysis.diagnostics.metrics import load_from_sums, margin_from_sums
from l2r.errors import InputError
from l2r.functional import mean_probs, router_z_loss
from l2r.routers import Captured, RouterOutput
from l2r.routers.capture import RouterSite, observed, sites_of
from l2r.routers.model_calls import ModelCall
from l2r.routers.observe import block_bias, evaluating, layer_index, unwrapped_model
from l2r.routers.selection_rule import Selection

# Tokens [T] of a call that count, T of them in all; None for those that its arguments tell.
Trained = Callable[[ModelCall, int], Tensor | None]
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
        """Draw loads as colors: a row for each layer, a column for each expert, 8 pixels a cell.

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
    source: Any,
    *,
    mask: Tensor | Sequence[Tensor] | None = None,
    model: nn.Module | None = None,
    top_k: int | None = None,
) -> RouterStatistics:
    """Statistics of one step, from what ``capture`` recorded or from a model's output.

    ``source`` is a ``Captured``; a list of (logits [T, N], weights [T, K], indices [T, K]), a
    layer each; or an output with ``router_logits``, which needs the ``model`` that made it: its
    rule chooses the experts, and its blocks give the layers their numbers. ``mask`` (any shape, T
    entries) is true for tokens that count; of a ``Captured`` these are, without one, the tokens
    that the step trains on: no padding, and with a label where the model was called with labels.
    Of a ``Captured`` it may be [rows, columns] of the last columns alone, such as completions, and
    is a list of one for each call where there are several.
    ``top_k``, which once stood for ``model``, is not read: k logits do not tell the experts.

    Raises ValueError for a source without routed tokens, for ``router_logits`` without ``model``,
    for those of a model whose experts its logits do not tell, and for a mask of other tokens.
    """
    total: dict[int, sums.Sums] = {}
    if isinstance(source, Captured):
        called = {name: list(calls) for name, calls in source.outputs.items() if calls}
        masks = None if mask is None else source.by_call("mask", mask)
        for name, layer in _numbered(called).items():
            for output, call in zip(called[name], source.calls[name], strict=True):
                tokens = len(output.logits)
                if masks is None:
                    counted = call.trained(tokens)
                else:
                    counted = call.aligned("mask", masks[id(call)], tokens)
                sums.add(total.setdefault(layer, {}), _sums(output, counted))
        return _from_sums(total)
    if not isinstance(mask, Tensor | None):
        raise InputError(
            f"mask must be a tensor where source is a {type(source).__name__}; "
            f"got {type(mask).__name__}"
        )
    for layer, routed in _outputs(source, model).items():
        sums.add(total.setdefault(layer, {}), _sums(routed, mask))
    return _from_sums(total)


class RouterWatch:
    """Sums over what the routers of a model return between ``start`` and ``read``.

    Tokens that the step trains on count: no padding in a 2-D ``attention_mask`` that the model is
    called with, and where it is called with ``labels`` those that have one. Calls without
    gradients, such as those of generation, count only where ``start`` was called without. A layer
    that activation checkpointing runs again counts once. A compiled model is passed compiled.
    Raises ValueError for a model without a supported router.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._sites = sites_of(model)
        self._layers = _numbered(site.path for site in self._sites)
        self._watching: ExitStack | None = None
        self._sums: dict[int, sums.Sums] = {}
        self._trains = True
        self._trained: Trained | None = None

    def start(self, model: nn.Module | None = None, trained: Trained | None = None) -> None:
        """Watch the forward passes from here on, of a ``model`` that wraps the first one too.

        ``trained`` gives the tokens that count, where the model's arguments do not tell them.
        """
        self.stop()
        self._trained = trained
        self._trains = torch.is_grad_enabled()
        self._watching = ExitStack()
        watched = self._model if model is None else model
        self._watching.enter_context(observed(watched, self._see, sites=self._sites))

    def stop(self) -> None:
        """Watch no more, and forget what was seen."""
        if self._watching is not None:
            self._watching.close()
        self._watching, self._sums = None, {}

    def read(self) -> RouterStatistics | None:
        """Statistics over all ranks, which call this together; None where no token counted."""
        total = sums.all_reduce(self._sums)
        self.stop()
        counted = total and all(part["tokens"] > 0 for part in total.values())
        return _from_sums(total) if counted else None

    @property
    def is_open(self) -> bool:
        """Tell whether it watches."""
        return self._watching is not None

    def _see(self, site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        if call.gradients or not self._trains:
            tokens = len(output.logits)
            mask = None if self._trained is None else self._trained(call, tokens)
            part = _sums(output, call.trained(tokens) if mask is None else mask)
            sums.add(self._sums.setdefault(self._layers[site.path], {}), part)


def _numbered(paths: Iterable[str]) -> dict[str, int]:
    """Return indices of the blocks of routers; their own order where two of them have one index."""
    layers = {path: layer_index(path) for path in paths}
    alone = len(set(layers.values())) == len(layers)
    return layers if alone else {path: n for n, path in enumerate(layers)}


def _outputs(source: Any, model: nn.Module | None) -> Mapping[int, Routed]:
    logits = getattr(source, "router_logits", None)
    if logits is None:
        if isinstance(source, Sequence) and source:
            return dict(enumerate(source))
        raise InputError(
            "source must be what capture recorded, a list of (logits, weights, indices) or an "
            f"output with router_logits; got {type(source).__name__}"
        )
    if model is None:
        raise InputError(
            "router_logits do not say which experts were chosen; pass the model too "
            "(router_statistics(output, model=model)), or what l2r.capture recorded"
        )
    inner = unwrapped_model(model)
    sites = [site for site in sites_of(inner) if not site.selection.by_token]
    given = [layer for layer in logits if layer is not None]
    if len(given) != len(sites) or (inner.training and any(_samples(site) for site in sites)):
        raise InputError(
            f"router_logits of {len(given)} layers do not tell the experts of the model's "
            f"{len(sites)} routers; use l2r.capture"
        )
    layers, found = _numbered(site.path for site in sites), {}
    for site, layer in zip(sites, given, strict=True):
        flat = layer.reshape(-1, layer.shape[-1])
        bias = block_bias(inner, site.path) if site.selection.block_bias else ()
        with evaluating(site.router):
            found[layers[site.path]] = (flat, *site.selection(site.router, flat, *bias))
    return found


def _samples(site: RouterSite) -> bool:
    """Tell whether a router draws its experts in training."""
    return type(site.selection).__call__ is not Selection.__call__


@torch.no_grad()
def _sums(output: Routed, mask: Tensor | None) -> sums.Sums:
    """Return sums over the tokens of one call that count."""
    logits, weights, indices = (part.detach() for part in output)
    if mask is not None:
        if mask.numel() != len(logits):
            raise InputError(
                f"mask must have an entry for each of the {len(logits)} tokens; got "
                f"{list(mask.shape)}"
            )
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
