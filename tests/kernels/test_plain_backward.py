"""Gradients of gradients against float64, and batched ones: no term may be left out."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from routing_cases import Case, double, leaves
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from l2r.kernels import dispatch, plain
from l2r.kernels.dispatch import implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = pytest.param("triton", marks=pytest.mark.slow("Triton's interpreter"))
BACKENDS = [TRITON] if DEVICE == "cuda" else [TRITON, "cpu"]
CASE = Case(7, 12, 5, 2, 3, 2)
Given = dict[str, Tensor | None]


def whole(module, given: Given, **options) -> Tensor:
    x, *parts = given.values()
    logits, weights, _ = module.route(x, tuple(parts), CASE.score(), top_k=2, **options)
    return logits.double().sin().sum() + weights.double().square().sum()


def normalized(module, given: Given) -> Tensor:
    return whole(module, given, normalize=True)


def followed(module, given: Given) -> Tensor:
    """Given routes for two tokens of three, the last expert first."""
    routes = torch.tensor([[4, 0], [-1, -1], [1, 2]] * 3, device=given["x"].device)[:7]
    return whole(module, given, routes=routes)


def without_selection(module, given: Given) -> Tensor:
    x, *parts = given.values()
    return module.route_logits(x, tuple(parts), CASE.score()).double().sin().sum()


def selection(module, given: Given) -> Tensor:
    """Select in a call of its own, from logits of which another function is in the loss too."""
    x, *parts = given.values()
    logits = module.route_logits(x, tuple(parts), CASE.score())
    weights, _ = module.softmax_top_k(logits, 2)
    return weights.double().square().sum() + logits.double().sin().sum()


def penalty_gradients(loss: Callable[..., Tensor], module, given: Given) -> list[Tensor]:
    """Gradients of the squared gradients, as a penalty on them would have."""
    inputs = [tensor for tensor in given.values() if tensor is not None]
    first = torch.autograd.grad(loss(module, given), inputs, create_graph=True)
    penalty = torch.stack([grad.double().square().sum() for grad in first]).sum()
    return list(torch.autograd.grad(penalty, inputs))


@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("loss", [whole, normalized, followed, without_selection, selection])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_gradient_penalty_has_the_gradients_of_float64(
    name: str, loss: Callable[..., Tensor], mode: Callable[[], AbstractContextManager[object]]
) -> None:
    inputs = CASE.inputs(DEVICE)
    wanted = penalty_gradients(loss, plain, double(inputs))
    with implementation(name), mode():
        found = penalty_gradients(loss, dispatch, leaves(inputs))
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            ours.double().cpu(), exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max())
        )


def test_many_logits_of_a_linear_router_too() -> None:
    logits = torch.randn(300, 64, dtype=torch.float64)

    def second(module, logits: Tensor) -> Tensor:
        weights, _ = module.softmax_top_k(logits, 4)
        (first,) = torch.autograd.grad(weights.double().square().sum(), logits, create_graph=True)
        return torch.autograd.grad(first.double().square().sum(), logits)[0]

    wanted = second(plain, logits.clone().requires_grad_())
    found = second(dispatch, logits.float().requires_grad_())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.parametrize("mode", [nullcontext, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("name", BACKENDS)
def test_many_gradients_at_once_are_those_of_one_after_another(
    name: str, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    """As in ``torch.autograd.functional.jacobian(vectorize=True)``, and by ``torch.vmap``."""
    given = leaves(CASE.inputs(DEVICE))
    x, *parts = given.values()
    with implementation(name), mode():
        _, weights, _ = dispatch.route(x, tuple(parts), CASE.score(), top_k=2)
        rows = torch.eye(weights.numel(), device=DEVICE).view(-1, *weights.shape)

        def gradient(row: Tensor) -> Tensor:
            return torch.autograd.grad(weights, x, row, retain_graph=True)[0]

        wanted = torch.stack([gradient(row) for row in rows])
        at_once = torch.autograd.grad(weights, x, rows, retain_graph=True, is_grads_batched=True)
        for found in (at_once[0], torch.vmap(gradient)(rows)):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
