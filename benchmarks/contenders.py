"""Routers that compete: plain, compiled and fused forms, and the linear router of transformers.

Every contender is checked against float64 plain code first; a wrong one gets no speed.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from l2r.kernels.dispatch import implementation
from l2r.routers import build_router, make_config
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.timing import Step

Call = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

# label -> (router, options); H is the number of anchors per expert
ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "xmoe": ("xmoe", {}),
    "l2r_cosine H16": ("l2r_cosine", {"heads": 16}),
    "l2r_sips H1": ("l2r_sips", {"heads": 1}),
    "l2r_sips H16": ("l2r_sips", {"heads": 16}),
}
STOCK = "linear, transformers"  # the router that a swap replaces


@dataclass
class Contender:
    """A router under a name such as ``l2r_sips H16, fused``; ``tolerance`` bounds its error."""

    name: str
    router: Any
    form: str
    tolerance: float = 1e-3

    @cached_property
    def call(self) -> Call:
        """The forward pass as a function of x, compiled once."""
        if self.form == "fused":
            return self.router

        def plain(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            with implementation("plain"):
                return self.router(x)

        return torch.compile(plain) if self.form == "compiled" else plain

    def forget(self) -> None:
        """Compile again on the next call: another shape would count as a recompilation."""
        self.__dict__.pop("call", None)


def contenders(
    settings: BenchSettings,
    *,
    hidden: int,
    experts: int,
    top_k: int,
    compiled: bool = False,
    routers: Mapping[str, tuple[str, dict[str, Any]]] = ROUTERS,
    swapped: bool = False,
) -> list[Contender]:
    """Every router in its plain, fused and maybe compiled form, with the same seeds.

    ``swapped`` adds the router of transformers' OLMoE and ours in its place; in half precision
    the former, whose product is in the dtype of x, is always there.
    """
    from l2r.hf.models import one_layer
    from l2r.hf.swap import replace_routers

    device, dtype = settings.device, settings.dtype
    sizes = {"hidden_size": hidden, "num_experts": experts, "top_k": top_k}
    entries = []
    for label, (kind, options) in routers.items():
        torch.manual_seed(0)
        router: Any = build_router(kind, **sizes, **options).to(device)
        forms = ["plain", "fused"]
        if compiled and label in ("linear", "l2r_sips H16"):  # seconds to compile, each
            forms.append("compiled")
        entries += [Contender(f"{label}, {form}", router, form) for form in forms]
    half = dtype != torch.float32
    if half or swapped:
        torch.manual_seed(0)
        stock = one_layer(**sizes).model.layers[0].mlp.gate.to(device, dtype)
        entries.append(Contender(STOCK, stock, "fused", tolerance=5e-2 if half else 1e-3))
    if swapped:
        model = replace_routers(one_layer(**sizes), make_config("l2r_sips", heads=16))
        router = model.model.layers[0].mlp.gate.to(device)
        entries.append(Contender("l2r_sips H16, swapped", router, "fused"))
    return entries


def is_correct(contender: Contender, x: Tensor) -> bool:
    """Logits and parameter gradients of the first tokens against float64 plain code."""
    logits, _, _, *parameters = errors(contender, x[:128])
    return all(error <= contender.tolerance for error in (logits, *parameters))  # not so for NaN


def errors(contender: Contender, x: Tensor) -> list[float]:
    """Of logits, weights and the gradients of x and every parameter: the largest difference from
    float64 plain code, as a share of the largest exact number.
    """
    exact = Contender("", copy.deepcopy(contender.router).double(), "plain")
    results = []
    for entry, here in ((contender, x), (exact, x.double())):
        leaves = [here.detach().clone().requires_grad_(), *entry.router.parameters()]
        logits, weights, _ = entry.call(leaves[0])
        loss = logits.double().sin().sum() + weights.double().square().sum()
        results.append([logits, weights, *torch.autograd.grad(loss, leaves)])
    return [
        ((ours.double() - true).abs().max() / true.abs().max().clamp_min(1e-3)).item()
        for ours, true in zip(*results, strict=True)
    ]


def forward_step(call: Callable[[Tensor], Any], inputs: list[Tensor]) -> Step:
    """Forward without gradients, rotating the inputs."""

    def step(number: int) -> object:
        with torch.no_grad():
            return call(inputs[number % len(inputs)])

    return step


def training_step(
    call: Callable[[Tensor], tuple[Tensor, ...]],
    parameters: Iterable[Tensor],
    inputs: list[Tensor],
) -> Step:
    """Forward and backward to x and the parameters, with fixed upstream gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    to = list(parameters)

    def results(x: Tensor) -> list[Tensor]:
        return [result for result in call(x) if result.requires_grad]  # all but indices

    upstream = [torch.randn_like(result) / result.numel() for result in results(leaves[0])]

    def step(number: int) -> object:
        leaf = leaves[number % len(leaves)]
        return torch.autograd.grad(results(leaf), [leaf, *to], upstream, allow_unused=True)

    return step
