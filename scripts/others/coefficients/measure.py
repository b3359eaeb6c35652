"""Ask a framework's balance loss what it adds, and compare it with its equation and with ours."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.others.coefficients.batch import (
    COEFFICIENT,
    LAYERS,
    TOP_K,
    Added,
    Balance,
    as_weights,
    balanced_logits,
    batch_logits,
    inputs,
    padding_mask,
)
from scripts.others.coefficients.ours import ours, trained
from scripts.others.coefficients.references import Reference, gradient

PARTS = Path(__file__).resolve().parents[3] / "results" / "engines" / "coefficients"
# What ours must be multiplied by, of L layers and k.
FACTORS: Mapping[str, Callable[[int, int], float]] = {
    "1": lambda layers, top_k: 1,
    "L": lambda layers, top_k: layers,
    "1 / k": lambda layers, top_k: 1 / top_k,
    "L / k": lambda layers, top_k: layers / top_k,
}
# Sums of some hundred float32 numbers agree to 1e-6 of the largest (tests/engines/engines.py);
# here one enters a second: the f and P of an expert, then a token's softmax.
ROOM = 1e-5


@dataclass(frozen=True)
class Loss:
    """A framework's loss.

    balance: its own code. reference: its equation, the mean over layers. sums_layers: whether the
    code takes their sum. factor: what the balance of ``here`` is multiplied by, a key of FACTORS.
    router: the kind of ours with the same scores. top_k, other_top_k: those that are tried.
    packed: the same with all rows in one, told apart as the code can. micro_batches: the gradient
    of a step that has every row as a micro-batch; None where that is the user's own sum.
    """

    name: str
    balance: Balance
    reference: Reference
    factor: str
    here: Mapping[str, Any] = field(default_factory=dict)
    router: str = "linear"
    sums_layers: bool = False
    top_k: int = TOP_K
    other_top_k: int = 2
    packed: Callable[[Tensor, Tensor, int], Added] | None = None
    micro_batches: Callable[[Tensor, Tensor, int], Tensor] | None = None


@dataclass(frozen=True)
class Row:
    """What was measured of a loss, with a coefficient of 0.01 on the batch.

    value, norm: of what is added, and of its gradient of logits. ratio, cosine: of this gradient
    to that of ours by default. factor, residual: of the gradient to that of ``here``, and the
    largest difference after it, over the largest entry. effect: the same of router weights.
    at_balance: the value over 0.01 of one layer in balance.
    """

    name: str
    value: float
    norm: float
    ratio: float
    cosine: float
    here: dict[str, Any]
    formula: str
    factor: float
    residual: float
    effect: float
    layers: str
    at_balance: float
    padding: str
    packed: str
    micro_batches: str


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max())


def projection(found: Tensor, onto: Tensor) -> float:
    """The number that ``onto`` is best multiplied by to be ``found``."""
    return float((found * onto).sum() / onto.square().sum())


def measure(loss: Loss) -> Row:
    """Row of a loss; AssertionError where it is not its equation, or not ours times the factor."""
    logits, top_k = batch_logits(), loss.top_k
    x, weights = as_weights(logits)
    added = loss.balance(x, weights, top_k, None)
    check_equation(loss, logits, top_k, added)
    here = ours(x, weights, top_k, router=loss.router, **loss.here).gradient
    default = ours(x, weights, top_k).gradient
    factor = FACTORS[loss.factor](LAYERS, top_k)
    row = Row(
        name=loss.name,
        value=added.value,
        norm=float(added.gradient.norm()),
        ratio=projection(added.gradient, default),
        cosine=float(torch.cosine_similarity(added.gradient.flatten(), default.flatten(), dim=0)),
        here=dict(loss.here),
        formula=loss.factor,
        factor=projection(added.gradient, here),
        residual=difference(added.gradient, factor * here),
        effect=effect(loss),
        layers=_layers(loss, x, weights, added.value),
        at_balance=at_balance(loss),
        padding=_padding(loss, x, weights),
        packed=_packed(loss, x, weights, added.value),
        micro_batches=_micro_batches(loss, x, weights, added.gradient),
    )
    assert abs(row.factor / factor - 1) < ROOM, row
    assert row.residual < ROOM and row.effect < ROOM, row
    if loss.other_top_k != top_k:  # the same equation and factor for another k and number of layers
        fewer, other = logits[:2], loss.other_top_k
        x, weights = as_weights(fewer)
        added = loss.balance(x, weights, other, None)
        check_equation(loss, fewer, other, added)
        here = ours(x, weights, other, router=loss.router, **loss.here).gradient
        assert difference(added.gradient, FACTORS[loss.factor](2, other) * here) < ROOM, loss.name
    return row


def check_equation(loss: Loss, logits: Tensor, top_k: int, added: Added) -> None:
    """AssertionError where value or gradient are not those of the equation in float64."""
    times = COEFFICIENT * (len(logits) if loss.sums_layers else 1)
    value = times * float(loss.reference(logits.double(), top_k, None))
    assert abs(added.value / value - 1) < ROOM, (loss.name, added.value, value)
    exact = times * gradient(loss.reference, logits, top_k, None)
    expected = as_weights(exact)[1]
    assert difference(added.gradient, expected) < ROOM, loss.name


def effect(loss: Loss) -> float:
    """Difference of the gradients of router weights: ours in Trainer, the coefficient converted."""
    x, weights = inputs()
    theirs = loss.balance(x, weights, loss.top_k, None).gradient
    converted = COEFFICIENT * FACTORS[loss.factor](LAYERS, loss.top_k)
    own = trained(x, weights, loss.top_k, balance=converted, router=loss.router, **loss.here)
    return difference(own, theirs)


def at_balance(loss: Loss) -> float:
    """The loss itself of one layer whose experts all get as many tokens."""
    x, weights = as_weights(balanced_logits(loss.top_k))
    return loss.balance(x, weights, loss.top_k, None).value / COEFFICIENT


def _layers(loss: Loss, x: Tensor, weights: Tensor, value: float) -> str:
    each = [loss.balance(x, weight[None], loss.top_k, None).value for weight in weights]
    if abs(value / sum(each) - 1) < ROOM:
        return "sum"
    return "mean" if abs(value * len(each) / sum(each) - 1) < ROOM else "pooled"


def _padding(loss: Loss, x: Tensor, weights: Tensor) -> str:
    mask = padding_mask()
    found = loss.balance(x, weights, loss.top_k, mask).gradient
    if found[..., ~mask.flatten()].abs().max() > 0:
        whole = loss.balance(x, weights, loss.top_k, None).gradient
        times = projection(found, whole)
        if difference(found, times * whole) > ROOM:
            return "counts in part"
        return "counts" if abs(times - 1) < ROOM else f"counts, loss x {times:.2f}"
    own = ours(x, weights, loss.top_k, mask, router=loss.router, **loss.here).gradient
    factor = FACTORS[loss.factor](LAYERS, loss.top_k)
    return "left out" if difference(found, factor * own) < ROOM else "left out, rows unlike ours"


def _packed(loss: Loss, x: Tensor, weights: Tensor, value: float) -> str:
    if loss.packed is not None:
        found = loss.packed(x, weights, loss.top_k).value
        told = "documents told apart"
    else:
        found = loss.balance(x.reshape(1, -1, x.shape[-1]), weights, loss.top_k, None).value
        told = "no matter"
    return told if abs(found / value - 1) < ROOM else "a row is one sequence"


def _micro_batches(loss: Loss, x: Tensor, weights: Tensor, whole: Tensor) -> str:
    if loss.micro_batches is None:
        return "your sum"
    found = loss.micro_batches(x, weights, loss.top_k)
    rows = [loss.balance(row[None], weights, loss.top_k, None).gradient for row in x]
    mean = torch.stack(rows).mean(0)
    for word, expected in (
        ("mean", mean), ("sum", mean * len(rows)), ("as one batch", whole),
    ):  # fmt: skip
        if difference(found, expected) < ROOM:
            return word
    return "f so far"


def write(name: str, version: str, rows: list[Row], *, bias: float | None = None) -> None:
    """Keep what was measured of a framework for the page.

    bias: the difference of a selection bias after a step, where the coefficient is its speed.
    """
    PARTS.mkdir(parents=True, exist_ok=True)
    content = {"version": version, "bias": bias, "rows": [asdict(row) for row in rows]}
    text = json.dumps(content, indent=1) + "\n"
    (PARTS / f"{name}.json").write_text(text, encoding="utf-8")


def read(name: str) -> tuple[str, float | None, list[Row]]:
    """Version, bias and rows of a framework, as ``write`` kept them."""
    content = json.loads((PARTS / f"{name}.json").read_text(encoding="utf-8"))
    return content["version"], content["bias"], [Row(**row) for row in content["rows"]]
