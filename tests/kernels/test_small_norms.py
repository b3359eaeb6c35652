"""Constants that act where vectors are short or logits few: eps, their gradients, the guard's."""

import pytest
import torch
from routing_cases import Case, device_of, double, error, leaves, route

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import cpu, guard, plain
from l2r.kernels.contract import Options, Tensors
from l2r.kernels.dispatch import implementation
from tests.tiers import few

EPS = 0.7  # queries and anchors of unit size: half of them below it


@pytest.mark.parametrize("form", few(["compiled", "blocks", "triton"], ["blocks"], "compilers"))
@pytest.mark.parametrize("scoring", ["cosine", "sips"])
@pytest.mark.parametrize("heads", [1, 3])
def test_vectors_shorter_than_eps_have_the_gradient_of_a_constant_divisor(
    monkeypatch, form, scoring, heads
):
    if form == "blocks":
        monkeypatch.setattr(cpu, "library", lambda: None)
    inputs = Case(12, 10, 6, heads, 3, 2, gain=False).inputs(device_of(form))
    inputs["x"] *= torch.linspace(0.05, 1.5, 12)[:, None].to(inputs["x"])
    inputs["anchors"] *= torch.linspace(0.05, 1.5, 6)[:, None, None].to(inputs["x"])
    score = ScoreConstants(scoring, gamma=1.3, beta=0.8, p=3.0, eps=EPS)
    exact = double(inputs)
    query = plain.routing_query(exact["x"], exact["projection"])
    for vectors in (query, exact["anchors"]):
        short = (vectors.norm(dim=-1) < EPS).double().mean()
        assert 0.2 < short < 0.9
    ours, results = leaves(inputs), []
    with implementation("triton" if form == "triton" else "cpu"):
        results.append(route(ours, score=score, top_k=2))
    results.append(route(exact, plain, score=score, top_k=2))
    slopes = torch.linspace(-1, 1, 72, dtype=torch.float64).view(12, 6)
    for output in results:
        (output.logits.double().cpu() * slopes).sum().backward()
    assert error(results[0].logits, results[1].logits) <= 1e-5
    for name in ("x", "projection", "anchors"):
        assert error(ours[name].grad, exact[name].grad) <= 1e-4, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", ["logits", "weights", "gradient of anchors"])
def test_the_guard_takes_an_error_under_its_limit_and_none_above(dtype, part):
    """The limit is sqrt(eps) of the dtype, relative to the largest number."""
    inputs = Case(3, 12, 7, 2, 2, 3, dtype=dtype, x_dtype=dtype).inputs("cpu")
    x, weight, gain, anchors = (tensor.float() for tensor in inputs.values())
    given, limit = Tensors(x, weight, gain, anchors), torch.finfo(dtype).eps ** 0.5

    class Scaled:
        """Right kernels, of which one result is off by a part of the largest."""

        def __init__(self, off: float) -> None:
            self.off = off

        def forward(self, given: Tensors, options: Options) -> Tensors:
            done = cpu.forward(given, options)
            if part == "gradient of anchors":
                return done
            return done._replace(**{part: self.moved(getattr(done, part))})

        def backward(self, tensors: Tensors, up: Tensors, options: Options) -> Tensors:
            grads = cpu.backward(tensors, up, options)
            if part != "gradient of anchors":
                return grads
            return grads._replace(anchors=self.moved(grads.anchors))

        def moved(self, tensor: torch.Tensor) -> torch.Tensor:
            changed = tensor.clone().flatten()
            changed[changed.abs().argmax()] *= 1 + self.off
            return changed.view_as(tensor)

    if dtype is not torch.float32:
        given = Tensors(*[tensor.to(dtype) for tensor in given[:4]])
    options = Options(ScoreConstants("sips"), top_k=3)
    under, above = (guard.compare(Scaled(share * limit), given, options) for share in (0.6, 1.6))
    assert under.reason == "" and 0.3 < under.error < 1
    assert above.reason.startswith("differs from plain code by") and above.error > 1
