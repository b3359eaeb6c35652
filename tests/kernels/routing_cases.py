"""Random routing problems, their float64 reference by autograd, and the error between two."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from l2r.functional import load_balancing_loss, router_z_loss
from l2r.functional.scoring import ScoreConstants
from l2r.kernels import dispatch, plain
from l2r.kernels.dispatch import implementation
from l2r.routers import RouterOutput

# Largest error relative to the largest entry. fp32: sums of up to D terms in another order, and
# tf32x3 products (three tf32 products, 2e-6). bf16, fp16: one rounding of q, the logits and the
# gradients each (2**-9 and 2**-11), of which a handful add up.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def device_of(form: str) -> str:
    """Device on which a form of the code is tried: Triton's kernels on a GPU where there is one."""
    return "cuda" if form == "triton" and torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """Sizes and options of one problem."""

    tokens: int
    hidden: int
    experts: int
    heads: int
    rank: int
    top_k: int
    scoring: str = "sips"
    gain: bool = True
    normalize: bool = False
    temperature: float = 1.0
    x_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    seed: int = 0
    scale: float = 1.0  # of the anchors: large ones leave the range of a bare exp

    def inputs(self, device: str) -> dict[str, Tensor | None]:
        """Random x, projection, gain and anchors, of the case's dtypes."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        gain = 1 + 0.3 * normal(self.hidden) if self.gain else None
        return {
            "x": normal(self.tokens, self.hidden).to(device, self.x_dtype),
            "projection": (normal(self.rank, self.hidden) / self.hidden**0.5).to(
                device, self.dtype
            ),
            "gain": None if gain is None else gain.to(device, self.dtype),
            "anchors": (self.scale * normal(self.experts, self.heads, self.rank)).to(
                device, self.dtype
            ),
        }

    def options(self) -> dict[str, object]:
        """Keyword arguments of ``route``."""
        return {"score": self.score(), "top_k": self.top_k, "normalize": self.normalize}

    def score(self) -> ScoreConstants:
        """Constants that are not the defaults."""
        return ScoreConstants(self.scoring, gamma=1.3, beta=0.8, p=3.0, scale=1 / self.temperature)

    def tolerance(self, query: Tensor) -> float:
        """A query near zero has no direction: its rounding is divided by |q|."""
        worst = 1.0
        if self.scoring != "dot" and query.numel():
            worst = 1 + 1 / query.norm(dim=1).min().clamp_min(1e-3).item()
        return TOLERANCE[self.dtype] * worst


DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
]


@st.composite
def cases(draw: st.DrawFn, max_tokens: int = 20) -> Case:
    """Any small case, odd sizes included."""
    experts = draw(st.integers(1, 40))
    x_dtype, dtype = draw(st.sampled_from(DTYPES))
    return Case(
        tokens=draw(st.integers(0, max_tokens)),
        hidden=draw(st.integers(1, 80)),
        experts=experts,
        heads=draw(st.integers(1, 6)),
        rank=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 16, 20])),
        top_k=draw(st.integers(1, min(experts, 5))),
        scoring=draw(st.sampled_from(["dot", "cosine", "sips"])),
        gain=draw(st.booleans()),
        normalize=draw(st.booleans()),
        temperature=draw(st.sampled_from([1.0, 0.3])),
        x_dtype=x_dtype,
        dtype=dtype,
        seed=draw(st.integers(0, 10**6)),
    )


def double(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Float64 leaves with the same values."""
    return {
        name: None if value is None else value.detach().double().cpu().requires_grad_()
        for name, value in inputs.items()
    }


def leaves(inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The inputs as leaves that want gradients."""
    return {
        name: None if value is None else value.detach().clone().requires_grad_()
        for name, value in inputs.items()
    }


def error(found: Tensor, wanted: Tensor, *, least: float = 1e-3) -> float:
    """Largest difference, relative to the largest wanted entry (or least); NaN counts as inf."""
    if wanted.numel() == 0:
        return 0.0
    wanted = wanted.detach().cpu()
    gap = (found.detach().double().cpu() - wanted).abs().max()
    ratio = gap / wanted.abs().max().clamp_min(least)
    return float("inf") if bool(torch.isnan(ratio)) else ratio.item()


def route(inputs: dict[str, Tensor | None], module: Any = dispatch, **options: Any) -> RouterOutput:
    """``module.route`` of inputs in the order of ``Case.inputs``."""
    x, *parts = inputs.values()
    return RouterOutput(*module.route(x, tuple(parts), **options))


def mixed_loss(case: Case, routed: RouterOutput, reference: RouterOutput) -> tuple[Tensor, Tensor]:
    """One scalar of every differentiable output, with the choices of ``routed`` in both.

    Weights are compared at the experts that the code under test chose, since ties permute. The
    auxiliary losses are in it, whose gradients reach all logits.
    """
    generator = torch.Generator().manual_seed(1)

    def weights_like(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)

    a, b = weights_like(reference.logits), weights_like(reference.weights)
    totals = []
    for found, weights in ((routed, routed.weights), (reference, _at(case, reference, routed))):
        device = found.logits.device
        total = (found.logits.double() * a.to(device)).sum() / found.logits.shape[1]
        total = total + (weights.double() * b.to(device)).sum()
        if found.logits.shape[0]:
            indices = routed.indices.to(device)
            balance = load_balancing_loss(found.logits.double(), indices)
            total = total + router_z_loss(found.logits.double()) + balance
        totals.append(total)
    return totals[0], totals[1]


def _at(case: Case, reference: RouterOutput, routed: RouterOutput) -> Tensor:
    """Reference weights at the experts chosen by ``routed``."""
    probs = torch.softmax(reference.logits, 1).gather(1, routed.indices.cpu())
    return probs / probs.sum(1, keepdim=True) if case.normalize else probs


def check_route(name: str, device: str, case: Case) -> None:
    """Outputs and all gradients of a whole router against float64."""
    inputs = case.inputs(device)
    ours, exact = leaves(inputs), double(inputs)
    with implementation(name):
        routed = route(ours, **case.options())
    reference = route(exact, plain, **case.options())
    query = plain.routing_query(exact["x"], exact["projection"], exact["gain"])
    tolerance = case.tolerance(query)
    assert error(routed.logits, reference.logits) <= tolerance
    assert all(len(set(row)) == case.top_k for row in routed.indices.tolist())
    probs = torch.softmax(reference.logits, 1)
    best = probs.topk(case.top_k, 1).values  # compared by score, since ties permute
    assert error(probs.gather(1, routed.indices.cpu()), best) <= 4 * tolerance
    assert error(routed.weights, reference.weights) <= 4 * tolerance
    loss, wanted = mixed_loss(case, routed, reference)
    loss.backward()
    wanted.backward()
    check_gradients(ours, exact, tolerance)


def check_logits(name: str, device: str, case: Case) -> None:
    """Logits without a selection, and all gradients, against float64."""
    inputs = case.inputs(device)
    ours, exact = leaves(inputs), double(inputs)
    results = []
    for values, module in ((ours, dispatch), (exact, plain)):
        x, *weights = values.values()
        with implementation(name):
            results.append(module.route_logits(x, tuple(weights), case.score()))
    query = plain.routing_query(exact["x"], exact["projection"], exact["gain"])
    tolerance = case.tolerance(query)
    assert error(*results) <= tolerance
    for logits in results:
        scale = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        (logits.double() * scale.to(logits.device)).sum().backward()
    check_gradients(ours, exact, tolerance)


def check_gradients(
    ours: dict[str, Tensor | None], exact: dict[str, Tensor | None], tolerance: float
) -> None:
    """Gradients of all leaves, in the leaves' dtypes.

    Rounding is relative to the terms of a sum, and the gradient of a direction cancels some of
    them (in rank 1 all), so that gradients under a tenth of the upstream ones count as that.
    """
    for name, leaf in ours.items():
        if leaf is None:
            continue
        rounding = 0.01 if leaf.dtype != torch.float32 else 0.0  # the gradient's own dtype
        assert leaf.grad.dtype == leaf.dtype
        found = error(leaf.grad, exact[name].grad, least=0.1)
        assert found <= 4 * tolerance + rounding, (name, found, tolerance)
