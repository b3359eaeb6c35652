"""Random routing problems, their float64 reference by autograd, and the error between two."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from l2r.kernels import plain

# Largest error relative to the largest entry. fp32: sums of up to D terms in another order, and
# tf32x3 products (three tf32 products, 2e-6). bf16, fp16: one rounding of q, the logits and the
# gradients each (2**-9 and 2**-11), of which a handful add up.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-2, torch.float16: 1e-2}


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
        return {
            "scoring": self.scoring,
            "top_k": self.top_k,
            "normalize": self.normalize,
            "temperature": self.temperature,
            "gamma": 1.3,
            "beta": 0.8,
            "p": 3.0,
        }

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


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest wanted entry (or 1e-3); NaN counts as inf."""
    if wanted.numel() == 0:
        return 0.0
    gap = (found.detach().double().cpu() - wanted.detach()).abs().max()
    ratio = gap / wanted.detach().abs().max().clamp_min(1e-3)
    return float("inf") if bool(torch.isnan(ratio)) else ratio.item()


def mixed_loss(routed: plain.Routed, reference: plain.Routed) -> tuple[Tensor, Tensor]:
    """One scalar of every differentiable output, with the choices of ``routed`` in both.

    Weights are compared at the experts that the code under test chose, since ties permute.
    """
    generator = torch.Generator().manual_seed(1)

    def weights_like(value: Tensor) -> Tensor:
        return torch.randn(value.shape, generator=generator, dtype=torch.float64)

    tokens = max(1, routed.logits.shape[0])
    a, b = weights_like(reference.logits), weights_like(reference.weights)
    c = weights_like(reference.sums[0])
    totals = []
    for found, weights in ((routed, routed.weights), (reference, _at(reference, routed))):
        device = found.logits.device
        total = (found.logits.double() * a.to(device)).sum() / found.logits.shape[1]
        total = total + (weights.double() * b.to(device)).sum()
        total = total + found.z_loss().double()
        totals.append(total + (found.sums[0].double() * c.to(device)).sum() / tokens)
    return totals[0], totals[1]


def _at(reference: plain.Routed, routed: plain.Routed) -> Tensor:
    """Reference weights at the experts chosen by ``routed``."""
    probs = torch.softmax(reference.logits, 1).gather(1, routed.indices.cpu())
    top_sum = probs.sum(1, keepdim=True)
    raw = torch.softmax(reference.logits, 1).topk(routed.indices.shape[1], 1).values
    normalized = reference.weights.shape[0] > 0 and not torch.allclose(reference.weights, raw)
    return probs / top_sum if normalized else probs
