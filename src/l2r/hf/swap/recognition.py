"""Routers of families that are in no table, known by what they return.

A router is what follows transformers' contract: hidden states in, logits [T, N], weights [T, K] and
indices [T, K] out. Its rule is the one of the table that gives its weights and experts from its
logits: in copies with random weights, biases and settings, since defaults hide differences, and
with its own weights on the model's token embeddings.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token, V token ids.
"""

import inspect
import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from l2r.hf.swap.families import RECOGNIZED, TABLE, Family
from l2r.hf.swap.rules import Unmatched
from l2r.routers import RouterOutput
from l2r.routers.observe import more_inputs, routed
from l2r.routers.offload import materialized
from l2r.routers.selection_rule import Selection

_TOKENS = 64  # of a draw
_ALL, _REAL = 4096, 2048  # tokens in all, at least, and token embeddings among them
_NEAREST_DRAWS = 24  # draws that tell which rule is the nearest
_SHARES = (0.3, 0.7)  # of the settings, which a draw changes at once
_SPREADS = (0.3, 1.0)  # standard deviations of random logits
_SHIFT = 15.0  # some tokens' logits are all lower by up to this, where sigmoids are tiny
_ROUNDINGS = 16  # of a gate, a product and a quotient, with room to spare
_WORDS = ("softmax", "sigmoid", "sqrtsoftplus", "greedy", "group_limited_greedy", "noaux_tc")
_COUNTS = ("top_k", "num_experts_per_tok", "topk", "k", "num_selected_experts", "moe_topk")


@dataclass(frozen=True)
class _Contract:
    """Calling convention of a router, and the shapes of what it returns.

    weight: path of its [N, D] matrix. top_k: path of its K. flat: whether it takes [T, D], not
    [1, T, D]. takes_bias: whether its block passes it a selection bias.
    """

    weight: str
    top_k: str
    experts: int
    hidden: int
    flat: bool
    takes_bias: bool


@dataclass(frozen=True)
class _Draw:
    """Random tensors, and settings that differ from its own, for a copy of a router.

    real: its own weights, and token embeddings [T, D] in place of random inputs. read: takes what
    is read from the configuration meanwhile.
    """

    seed: int
    changed: Mapping[str, Any] = field(default_factory=dict)
    bias: bool = True
    training: bool = False
    real: Tensor | None = None
    read: dict[str, Any] | None = None


@dataclass(frozen=True)
class _Case:
    """A copy of a router after a draw, the bias it was passed, and what it returned."""

    router: Any
    bias: Tensor | None
    output: RouterOutput
    seed: int  # of what it drew when it was called, as routers do in training


@dataclass(frozen=True)
class _Gap:
    """Distance of a rule from a router on the tokens of a draw.

    other: share of the tokens with other experts. error: largest relative difference of weights,
    inf where the rule cannot read the settings. ratio: what all weights are multiplied by.
    """

    other: float
    error: float
    bound: float
    ratio: float | None = None

    @property
    def closed(self) -> bool:
        """Say whether there is none, but for rounding and ties."""
        return self.other == 0 and self.error <= self.bound


@dataclass(frozen=True)
class Match:
    """The rule of a router: of which family of the table, on how many tokens, how exactly."""

    like: Family | None
    tokens: int
    error: float
    differs: str = ""

    def __str__(self) -> str:
        if self.like is None:
            return f"not in our table; observed only: {self.differs}"
        return f"not in our table; behaves as {self.like.model_type} on {self.tokens:,} tokens"


def recognize(
    router: nn.Module,
    kind: str,
    block: nn.Module,
    embeddings: Tensor | None,
    alike: dict[Any, Family | None],
) -> Family | None:
    """Family of a router that is in no table; None for a module that breaks the contract.

    ``kind`` is the type of its model, ``block`` the module that calls it, ``embeddings`` [V, D]
    the input embeddings of the model, or None. ``alike`` holds what was found in other layers of
    the model, by the class and the settings of their routers.
    """
    if router not in RECOGNIZED:
        key = type(router), settings_of(router)
        if key not in alike:
            with torch.device("cpu"), torch.no_grad(), torch.random.fork_rng(devices=[]):
                alike[key] = _family(router, kind, block, embeddings)
        RECOGNIZED[router] = alike[key]
    return RECOGNIZED[router]


def settings_of(router: Any) -> tuple[tuple[str, Any], ...]:
    """Names and values of a router's own numbers, flags and words; no layer's number."""
    return tuple(
        (name, value)
        for name, value in vars(router).items()
        if isinstance(value, int | float | str | None)
        and not name.startswith("_")
        and name != "training"
        and "layer" not in name
    )


def _family(
    router: nn.Module, kind: str, block: nn.Module, embeddings: Tensor | None
) -> Family | None:
    unable = type(router).forward is nn.Module.forward
    contract = None if unable else _contract(router, block)
    if contract is None:
        return None
    match = match_rule(router, contract, embeddings)
    rule = _with_configuration(match.like.rule) if match.like else _refusing(str(match))
    return Family(
        kind, type(router).__name__, rule, contract.weight, top_k=contract.top_k, note=str(match)
    )


def _refusing(reason: str) -> Callable[[Any], Selection]:
    return lambda old: Unmatched(reason=reason)


def match_rule(router: nn.Module, contract: _Contract, embeddings: Tensor | None = None) -> Match:
    """Return the first rule of the table that matches a router, or what the nearest one lacks."""
    draws = list(_draws(router, contract, embeddings))
    tokens = sum(len(case.output.indices) for _, case in draws)
    rules = {family.rule: family for family in reversed(TABLE)}  # the first of each rule
    families = sorted(rules.values(), key=TABLE.index)
    for family in families:
        error = _worst_error(family, draws)
        if error is not None:
            return Match(family, tokens, error)
    logits = draws[0][1].output.logits
    if (logits >= 0).all() and torch.allclose(logits.sum(dim=1), torch.ones(len(logits))):
        return Match(None, tokens, math.inf, "its first output is probabilities, not logits")
    nearest = min(families, key=lambda family: _distance(family, draws[:_NEAREST_DRAWS]))
    rule = _with_configuration(nearest.rule)
    failed = [draw for draw, case in draws if not _gap(rule, case).closed]
    return Match(None, tokens, math.inf, _difference(router, contract, nearest, failed))


def _worst_error(family: Family, draws: Sequence[tuple[_Draw, _Case]]) -> float | None:
    """Largest relative difference of weights; None where the rule of a family is another."""
    rule, worst = _with_configuration(family.rule), 0.0
    for _, case in draws:
        gap = _gap(rule, case)
        if not gap.closed:
            return None
        worst = max(worst, gap.error)
    return worst


def _distance(family: Family, draws: Sequence[tuple[_Draw, _Case]]) -> tuple[bool, int, int, float]:
    """Measure how far the rule of a family is from a router.

    Whether it differs with the router's own settings; how few settings it reads; draws that
    differ, and by how much.
    """
    read: set[str] = set()
    gaps = [_gap(_with_configuration(family.rule, read), case) for _, case in draws]
    pairs = list(zip(draws, gaps, strict=True))
    own = any(not gap.closed for (draw, _), gap in pairs if not draw.changed)
    size = sum(gap.other + min(gap.error, 1.0) for gap in gaps)
    return own, -len(read), sum(not gap.closed for gap in gaps), size


def _contract(router: nn.Module, block: nn.Module) -> _Contract | None:
    """Find how a router is called; None if no call gives logits, weights and indices."""
    named = inspect.signature(router.forward).parameters
    needed = more_inputs(router) if named else []
    optional = [name for name in named if "bias" in name]
    takes_bias = bool(needed or (optional and _has_bias(block, optional)))
    if len(needed) > 1:
        return None
    for name, matrix in router.named_parameters():
        if matrix.dim() != 2 or not matrix.is_floating_point():
            continue
        experts, hidden = matrix.shape
        for flat in (True, False):
            way = _Contract(name, "", experts, hidden, flat, takes_bias)
            case = _play(router, way, _Draw(seed=0))
            if case is None or case.output.logits.shape != (_TOKENS, experts):
                continue
            path = _path_of_count(router, case.output.indices.shape[1])
            return replace(way, top_k=path) if path else None
    return None


def _has_bias(block: nn.Module, names: Sequence[str]) -> bool:
    return any(isinstance(getattr(block, name, None), Tensor) for name in names)


def _path_of_count(router: Any, top_k: int) -> str | None:
    """Path of the setting that says how many experts are chosen."""
    for holder, prefix in ((router, ""), (getattr(router, "config", None), "config.")):
        for name in _COUNTS:
            if getattr(holder, name, None) == top_k:
                return prefix + name
    return None


def _draws(
    router: nn.Module, contract: _Contract, embeddings: Tensor | None
) -> Iterator[tuple[_Draw, _Case]]:
    """Draws for which the router works: of its own settings, of others, and its own weights."""
    own = {**dict(settings_of(router)), **_read_from_config(router, contract)}
    free = {name: value for name, value in own.items() if _is_free(name, value, contract)}
    chance = random.Random(0)  # no secret
    wanted = [_Draw(0), _Draw(1), _Draw(2, bias=False), _Draw(3, training=True)]
    for name, value in free.items():
        wanted += [_Draw(len(wanted), changed={name: _other(value, contract, chance)})]
    rows = _embedding_rows(embeddings, contract) if _has_values(router) else None
    if rows is not None:
        wanted.append(_Draw(len(wanted), real=rows))
    real = 0 if rows is None else len(rows)
    # Half of the draws, or more, change several settings at once.
    enough = max(-(-(_ALL - real) // _TOKENS), 2 * len(wanted))
    played = 0
    for number in range(10 * enough):
        if number < len(wanted):
            draw = wanted[number]
        elif played < enough:
            changed = {name: _other(value, contract, chance) for name, value in free.items()}
            share = chance.choice(_SHARES)
            kept = {name: v for name, v in changed.items() if chance.random() < share}
            draw = _Draw(number, changed=kept)
        else:
            return
        case = _play(router, contract, draw)
        if case is not None:
            yield draw, case
            played += draw.real is None


def _is_free(name: str, value: Any, contract: _Contract) -> bool:
    """Say whether a setting may change: no size, and no switch of a bias that is passed."""
    if type(value) is int and value in (contract.experts, contract.hidden):
        return False
    return not (contract.takes_bias and type(value) is bool and "bias" in name)


def _other(value: Any, contract: _Contract, chance: random.Random) -> Any:
    """Another value of a setting, which need not be an allowed one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return chance.choice(_WORDS)
    if isinstance(value, float):
        return float(f"{(value or 1.0) * chance.choice((0.4, 0.6, 1.6, 2.5)):.6g}")
    counts = {1, 2, 3, 4, contract.experts // 2, contract.experts // 4} - {0, value}
    return chance.choice(sorted(counts))


def _embedding_rows(embeddings: Tensor | None, contract: _Contract) -> Tensor | None:
    """Return token embeddings [T, D] of unit mean square, as norms give them; or None."""
    if embeddings is None or embeddings.is_meta or not embeddings.is_floating_point():
        return None
    if isinstance(embeddings, DTensor):  # a part of them is here
        return None
    if len(embeddings) < _TOKENS or embeddings.shape[1:] != (contract.hidden,):
        return None
    count = min(_REAL, len(embeddings) // _TOKENS * _TOKENS)
    rows = embeddings[:: len(embeddings) // count][:count].detach().cpu().float()
    return rows / rows.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-12)


def _read_from_config(router: Any, contract: _Contract) -> dict[str, Any]:
    """Find the settings that a router reads from its configuration when called, by path."""
    config = getattr(router, "config", None)
    if config is None:
        return {}
    read: dict[str, Any] = {}
    _play(router, contract, _Draw(0, read=read))
    own = (int, float, str, type(None))
    return {f"config.{name}": value for name, value in read.items() if isinstance(value, own)}


def _has_values(router: nn.Module) -> bool:
    """Say whether the tensors of a router are here, whole."""
    tensors = materialized(router).state_dict().values()
    return not any(tensor.is_meta or isinstance(tensor, DTensor) for tensor in tensors)


def _whole(tensor: Tensor) -> Tensor:
    value = tensor.detach().cpu()
    return value.float() if value.is_floating_point() else value


def _play(router: nn.Module, contract: _Contract, draw: _Draw) -> _Case | None:
    """Call a copy of a router; None where it breaks the contract or gives no numbers."""
    generator = torch.Generator().manual_seed(draw.seed)
    spread = _SPREADS[draw.seed % len(_SPREADS)]
    if draw.real is None:
        bare = _bare_copy(router, lambda tensor: _drawn(tensor, contract, draw, generator))
        x = torch.randn(_TOKENS, contract.hidden, generator=generator, dtype=torch.float32)
        x *= spread
        x[::2, 0] = -torch.rand(len(x[::2]), generator=generator, dtype=torch.float32) * _SHIFT
    else:
        whole = materialized(router)
        bare = _bare_copy(whole, _whole)
        x = draw.real
    bare.train(draw.training)
    ours = {name: value for name, value in draw.changed.items() if "." not in name}
    theirs = {n.partition(".")[2]: v for n, v in draw.changed.items() if n not in ours}
    bare.__dict__.update(ours)
    if hasattr(bare, "config"):
        read = {} if draw.read is None else draw.read
        bare.__dict__["config"] = _Configuration(bare.config, theirs, read)
    bias = None
    if contract.takes_bias:
        bias = torch.randn(contract.experts, generator=generator, dtype=torch.float32) * 0.1
        bias = bias if draw.bias else torch.zeros_like(bias)
    torch.manual_seed(draw.seed)
    try:
        inputs = x.clone() if contract.flat else x.clone().unsqueeze(0)
        output = bare(inputs) if bias is None else bare(inputs, bias)
        logits, weights, indices = routed(bare, tuple(output))
    except Exception:  # of code that nobody here has read
        return None
    if not (logits.isfinite().all() and weights.isfinite().all()):
        return None
    bare.__dict__["top_k"] = indices.shape[1]
    return _Case(bare, bias, RouterOutput(logits.float(), weights.float(), indices), draw.seed)


def _drawn(tensor: Tensor, contract: _Contract, draw: _Draw, generator: torch.Generator) -> Tensor:
    """Random values for a tensor of a router: its matrix, whose first input shifts all logits
    alike, and vectors such as biases. Integers stay.
    """
    if not tensor.is_floating_point():
        return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().cpu()
    value = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    if tensor.shape == (contract.experts, contract.hidden):
        value /= contract.hidden**0.5
        value[:, 0] = 1.0
        return value
    return 0.1 * value if draw.bias else torch.zeros_like(value)


def _bare_copy(module: nn.Module, values: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy with other tensors, without hooks and replaced forwards; the rest is shared."""
    bare: Any = object.__new__(type(module))
    others = ("forward", "__reduce_ex__", "_hf_hook", "_old_forward")
    own = {name: value for name, value in vars(module).items() if name not in others}
    bare.__dict__.update(own)
    for name in own:
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            bare.__dict__[name] = OrderedDict()
    bare.__dict__["_parameters"] = {
        name: None if p is None else nn.Parameter(values(p), requires_grad=False)
        for name, p in module._parameters.items()
    }
    bare.__dict__["_buffers"] = {
        name: None if b is None else values(b) for name, b in module._buffers.items()
    }
    bare.__dict__["_modules"] = {
        name: None if m is None else _bare_copy(m, values) for name, m in module._modules.items()
    }
    return bare


class _Configuration:
    """A configuration of which some fields have other values; notes what is read."""

    def __init__(self, base: Any, values: Mapping[str, Any], read: dict[str, Any]) -> None:
        self.__dict__.update(base=base, values=values, read=read)

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        value = own["values"][name] if name in own["values"] else getattr(own["base"], name)
        own["read"][name] = value
        return value


class _WithConfiguration:
    """A router whose settings may stand in its configuration instead; notes what is read."""

    def __init__(self, router: Any, read: set[str]) -> None:
        self._router, self._read = router, read

    def __getattr__(self, name: str) -> Any:
        router = self._router
        here = hasattr(router, name) or not hasattr(router, "config")
        value = getattr(router if here else router.config, name)
        self._read.add(name)
        return value


def _with_configuration(
    rule: Callable[[Any], Selection], read: set[str] | None = None
) -> Callable[[Any], Selection]:
    noted = set() if read is None else read
    return lambda old: rule(_WithConfiguration(old, noted))


def _gap(rule: Callable[[Any], Selection], case: _Case) -> _Gap:
    """Measure how far a rule is from what a router returned."""
    logits, weights, indices = case.output
    count = logits.shape[1]
    # Both sides sum at most N terms and round some more; twice that is between them.
    bound = 2 * (count + _ROUNDINGS) * torch.finfo(torch.float32).eps / 2
    try:
        selection = rule(case.router)
        torch.manual_seed(case.seed)
        given, chosen = selection(case.router, logits, case.bias)
        same = (chosen.sort(dim=1).values == indices.sort(dim=1).values).all(dim=1)
        tied = same if bool(same.all()) else same | _ties(selection, case, chosen, bound)
    except Exception:  # a rule reads what the router may not have
        return _Gap(1.0, math.inf, bound)
    other = float((~tied).float().mean())
    theirs, ours = (
        torch.zeros(len(logits), count).scatter(1, at, value.float())[same]
        for at, value in ((indices, weights), (chosen, given))
    )
    if not len(ours):
        return _Gap(other, 0.0, bound)
    scale = torch.maximum(theirs.abs(), ours.abs())
    error = float(((theirs - ours).abs() / scale.clamp_min(1e-30)).max())
    ratio = None
    if error > bound:
        ratios = (theirs / ours)[scale > 0]
        middle = float(ratios.median())
        if bool(((ratios / middle - 1).abs() <= bound).all()):
            ratio = middle
    return _Gap(other, error, bound, ratio)


def _ties(selection: Selection, case: _Case, chosen: Tensor, bound: float) -> Tensor:
    """Tokens whose two choices score alike, [T]."""
    logits, indices = case.output.logits, case.output.indices
    if type(selection) is not Selection:
        return torch.zeros(len(logits), dtype=torch.bool)
    every = torch.arange(logits.shape[1]).expand(len(logits), -1)
    gates = replace(selection, normalize=False, norm_eps=0.0, scale=1.0)
    standings = [selection.standing(case.router, logits, case.bias)]
    if selection.by_score:
        standings.append(gates.weigh(case.router, logits, every))
    alike = torch.zeros(len(logits), dtype=torch.bool)
    for standing in standings:
        one, other = (standing.gather(1, at).sort(dim=1).values for at in (chosen, indices))
        alike |= torch.isclose(one, other, rtol=bound, atol=0.0).all(dim=1)
    return alike


def _difference(
    router: nn.Module, contract: _Contract, family: Family, failed: Sequence[_Draw]
) -> str:
    """Say what differs between a router and the rule of a family, and with which settings only."""
    rule = _with_configuration(family.rule)

    def gap_of(draw: _Draw) -> _Gap | None:
        case = _play(router, contract, draw)
        gap = None if case is None else _gap(rule, case)
        return None if gap is None or gap.closed else gap

    draw = min(failed, key=lambda one: (len(one.changed), one.bias))
    for name in list(draw.changed):
        less = replace(draw, changed={n: v for n, v in draw.changed.items() if n != name})
        draw = less if gap_of(less) else draw
    without = replace(draw, bias=False)
    needs_bias = draw.real is None and gap_of(without) is None
    draw = draw if needs_bias else without
    gap = gap_of(draw)
    if gap is None:  # it draws from streams of its own
        return f"it differs from {family.model_type} in some calls only"
    given = [f"{name}={value!r}" for name, value in draw.changed.items()]
    given += ["a selection bias"] if needs_bias else []
    given += ["training"] if draw.training else []
    where = f"with {' and '.join(given)} " if given else ""
    like = family.model_type
    if gap.other:
        return f"{where}experts differ from {like}'s in {gap.other:.1%} of tokens"
    if gap.ratio is None:
        return f"{where}weights differ from {like}'s by up to {gap.error:.2g} of their size"
    why = ""
    case = _play(router, contract, draw)
    selection = rule(case.router) if case else Selection()
    if selection.normalize and abs(gap.ratio * selection.scale - 1) <= gap.bound:
        why = ": a scale before normalizing"
    return f"{where}weights are {gap.ratio:.4g} times those of {like}{why}"
