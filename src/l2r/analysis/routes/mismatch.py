"""Two runs of the same tokens: which experts differ, which decisions could not, and what it costs.

A decision, a token in a layer, is certified when its certified radius, which leaves room for the
router's own rounding, exceeds the measured change of the router's input. Where the routers differ
in parameters or in their dtype none is certified.

Shape letters: L layers, T tokens of a batch, D hidden size, K experts chosen per token, B rows, S
tokens a row, V words.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.analysis.certificates.attack import decision_gap
from l2r.analysis.certificates.certify import holds_within
from l2r.errors import InputError
from l2r.files.mismatch import NO_STATEMENT
from l2r.hf.routes import Routes, fingerprint_of, record, replay
from l2r.hf.swap import running_sites
from l2r.routers import RouterOutput
from l2r.routers.observe import evaluating, watched


class RoutingRun(NamedTuple):
    """One run. routes: experts of its sequences. inputs [T, D] and gaps [T] of every router:
    smallest logit of the chosen experts minus largest of the others. logits [B, S, V]."""

    routes: Routes
    inputs: list[Float[Tensor, "T D"]]
    gaps: list[Float[Tensor, " T"]]
    logits: Float[Tensor, "B S V"]


@torch.no_grad()
def read_routing(
    model: nn.Module, ids: Int[Tensor, "B S"], routes: Routes | None = None
) -> RoutingRun:
    """Run rows of tokens without padding, with the experts of ``routes`` where they are given."""
    sites = running_sites(model)
    inputs: list[Tensor] = []
    gaps: list[Tensor] = []

    def keep(x: Tensor, output: RouterOutput, name: str) -> None:
        logits, _, indices = output
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, indices, True)
        inputs.append(x.detach().reshape(len(logits), -1))
        gaps.append(decision_gap(logits.double(), inside).float())

    with evaluating(model), ExitStack() as stack:
        stack.enter_context(watched({site.path: site.router for site in sites}, keep))
        if routes is not None:
            stack.enter_context(replay(model, routes))
        recorder = stack.enter_context(record(model))
        output: Any = model(input_ids=ids, use_cache=False)
    return RoutingRun(recorder.routes(), inputs, gaps, output.logits.float())


class Comparison:
    """Compare a model with another, or with recorded routes, token by token; see ``arrays``.

    A swapped model is of the type of its stock model, so that the two can be compared.
    Raises ValueError where the two do not have the same layers, experts, k, model type and number
    of token embeddings, and for token ids that the model does not have.
    """

    def __init__(self, model: nn.Module, other: nn.Module | None = None) -> None:
        self.fingerprint = fingerprint_of(model)
        self._model, self._other = model, other
        self._routers = [site.router for site in running_sites(model)]
        self._alike = [False] * len(self._routers)
        self._vocabulary = _vocabulary(model)
        if other is not None:
            fingerprint_of(other).check(self.fingerprint)
            if _vocabulary(other) != self._vocabulary:
                raise InputError(
                    f"both models must have the same tokens; one has {self._vocabulary:,}, the "
                    f"other {_vocabulary(other):,}"
                )
            pairs = zip(self._routers, running_sites(other), strict=True)
            self.remarks = [_difference(router, site.router) for router, site in pairs]
            self._alike = [not remark for remark in self.remarks]
        else:
            unknown = "the other side's inputs of the router are not known"
            self.remarks = [unknown] * len(self._routers)
        self.lengths: list[int] = []  # of the sequences read
        self._parts: dict[str, list[np.ndarray]] = {}

    def with_model(self, ids: Int[Tensor, "B S"]) -> None:
        """Compare rows of tokens with the other model, with its own experts and with replayed."""
        assert self._other is not None
        self._check_tokens(ids)
        first, second = read_routing(self._model, ids), read_routing(self._other, ids)
        again = read_routing(self._other, ids, first.routes)
        self._keep(first, second.routes, ids)
        moved, certified = self.changes(first, second)
        own, replayed = _log_probs(second.logits, ids), _log_probs(again.logits, ids)
        before = _log_probs(first.logits, ids)
        self._add(
            moved=moved,
            certified=certified,
            own=own - before,
            replayed=replayed - before,
            kl_own=_divergence(first.logits, second.logits),
            kl_replayed=_divergence(first.logits, again.logits),
        )

    def with_routes(
        self,
        ids: Int[Tensor, "B S"],
        routes: Routes,
        log_probs: Float[Tensor, "B S"] | None = None,
    ) -> None:
        """Compare rows of tokens with recorded routes.

        log_probs: of each row's next token as the other side gave them, NaN where it gave none.
        Without them what is compared is this model with the routes and with its own experts.
        """
        self._check_tokens(ids)
        first = read_routing(self._model, ids)
        self._keep(first, routes, ids)
        again = read_routing(self._model, ids, routes)
        before, after = _log_probs(first.logits, ids), _log_probs(again.logits, ids)
        layers, unknown = len(self._routers), torch.full((ids.numel(),), torch.nan)
        if log_probs is None:
            costs = {"own": after - before, "replayed": unknown}
            divergence = _divergence(first.logits, again.logits)
        else:
            other = log_probs.flatten().cpu()
            costs, divergence = {"own": other - before, "replayed": other - after}, unknown
        self._add(
            moved=unknown.expand(layers, -1),
            certified=torch.full((layers, ids.numel()), NO_STATEMENT),
            kl_own=divergence,
            kl_replayed=unknown,
            **costs,
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of ``runs.mismatch.Mismatch`` by name, over all tokens.

        Raises ValueError before the first batch.
        """
        if not self._parts:
            raise InputError("tokens to compare must be at least one row; got none")
        by_layer = ("experts", "other_experts", "gap", "moved", "certified")
        return {
            name: np.concatenate(parts, axis=1 if name in by_layer else 0)
            for name, parts in self._parts.items()
        }

    def changes(
        self, first: RoutingRun, second: RoutingRun
    ) -> tuple[Float[Tensor, "L T"], Int[Tensor, "L T"]]:
        """Relative change of every router's input, and 1 for a certified decision, 0 for one
        that is not, NO_STATEMENT where nothing can be said."""
        pairs = enumerate(zip(first.inputs, second.inputs, strict=True))
        moved, certified = zip(*(self._change(layer, *pair) for layer, pair in pairs), strict=True)
        return torch.stack(moved), torch.stack(certified)

    def _change(self, layer: int, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Relative change [T] of a router's input, and 1, 0 or NO_STATEMENT of each decision."""
        wide = x.double()
        distance = torch.linalg.vector_norm(wide - other.to(wide.device).double(), dim=1)
        norm = torch.linalg.vector_norm(wide, dim=1)
        certified = torch.full((len(x),), NO_STATEMENT)
        if self._alike[layer]:
            try:
                holds = holds_within(self._routers[layer], x, distance)
                certified = holds.to(certified.dtype).cpu()
            except InputError as error:
                self._alike[layer] = False
                self.remarks[layer] = str(error)
        return (distance / norm.clamp_min(1e-30)).float().cpu(), certified

    def _keep(self, first: RoutingRun, other: Routes, ids: Tensor) -> None:
        other.fingerprint.check(self.fingerprint)
        wanted = [ids.shape[1]] * ids.shape[0]
        if other.lengths.tolist() != wanted:
            raise InputError(
                "routes must be of the tokens that are read; their sequences have "
                f"{other.lengths.tolist()!s:.60} tokens and the rows {wanted!s:.60}"
            )
        self.lengths += wanted
        self._add(
            tokens=ids.flatten(),
            experts=_by_layer(first.routes),
            other_experts=_by_layer(other),
            gap=torch.stack([gap.cpu() for gap in first.gaps]),
        )

    def _check_tokens(self, ids: Int[Tensor, "B S"]) -> None:
        wrong = ((ids < 0) | (ids >= self._vocabulary)).any(dim=1).nonzero()
        if len(wrong):
            row = ids[wrong[0, 0]]
            raise InputError(
                f"tokens must be from 0 to {self._vocabulary - 1}, which the model has; sequence "
                f"{len(self.lengths) + int(wrong[0, 0])} has {int(row.min())} to {int(row.max())}"
            )

    def _add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self._parts.setdefault(name, []).append(value.detach().cpu().numpy())


def compare_models(
    model: nn.Module,
    other: nn.Module,
    batches: Iterable[Int[Tensor, "B S"]],
    report: Callable[[int], object] = lambda rows_done: None,
) -> Comparison:
    """Compare two models over batches of rows; ``report`` takes the rows that are done."""
    comparison, done = Comparison(model, other), 0
    for ids in batches:
        comparison.with_model(ids)
        done += len(ids)
        report(done)
    return comparison


def compare_routes(
    model: nn.Module,
    routes: Routes,
    rows: Sequence[Int[Tensor, " S"]],
    log_probs: Sequence[Float[Tensor, " S"]] | None = None,
    report: Callable[[int], object] = lambda rows_done: None,
) -> Comparison:
    """Compare a model with routes of sequences of any length, one at a time.

    Raises ValueError where routes and rows are not as many.
    """
    if len(routes) != len(rows):
        raise InputError(
            f"routes must be of the tokens that are read; they have {len(routes)} sequences and "
            f"there are {len(rows)} rows"
        )
    comparison = Comparison(model)
    for number, (row, part) in enumerate(zip(rows, routes, strict=True)):
        measured = None if log_probs is None else log_probs[number][None]
        comparison.with_routes(row[None], part, measured)
        report(number + 1)
    return comparison


def _vocabulary(model: nn.Module) -> int:
    size: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    return size


def _difference(one: nn.Module, other: nn.Module) -> str:
    """Say why no radius of one router holds for the other; empty if they are equal."""
    kinds = type(one).__name__, type(other).__name__
    if kinds[0] != kinds[1]:
        return f"a certificate is of one router, and these are {kinds[0]} and {kinds[1]}"
    pairs = dict(one.state_dict()), dict(other.state_dict())
    equal = pairs[0].keys() == pairs[1].keys() and all(
        value.dtype == pairs[1][name].dtype  # torch.equal compares values alone
        and torch.equal(value, pairs[1][name].to(value.device))
        for name, value in pairs[0].items()
    )
    return "" if equal else "the two routers have other parameters"


def _by_layer(routes: Routes) -> Int[Tensor, "L T K"]:
    """Experts of every token, -1 where it has no route."""
    padded, mask = routes.padded()
    return padded[mask].transpose(0, 1).to(torch.int32)


def _log_probs(logits: Float[Tensor, "B S V"], ids: Int[Tensor, "B S"]) -> Float[Tensor, " T"]:
    """Log-probability of the next token, NaN at the end of each row."""
    values = torch.full(ids.shape, torch.nan)
    next_ids = ids[:, 1:, None].to(logits.device)
    values[:, :-1] = logits[:, :-1].log_softmax(dim=-1).gather(-1, next_ids)[..., 0].cpu()
    return values.flatten()


def _divergence(
    logits: Float[Tensor, "B S V"], other: Float[Tensor, "B S V"]
) -> Float[Tensor, " T"]:
    """KL(reference, other) of the next token's distribution, in nats.

    A word that the reference gives no probability adds none; one that the other gives none, where
    the reference gives some, makes it infinite.
    """
    first = logits.double().log_softmax(dim=-1)
    second = other.to(logits.device).double().log_softmax(dim=-1)
    parts = torch.where(first.isneginf(), 0.0, first.exp() * (first - second))
    return parts.sum(dim=-1).flatten().float().cpu()
