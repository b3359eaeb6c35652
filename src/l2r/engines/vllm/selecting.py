"""Have vLLM choose and weigh experts by the rule of the checkpoint.

A class of vLLM's tells its MoE layers a rule, some of it as constants (OLMoE's weights are never
normalized), and what a processor has for a rule differs (on a CPU a bias counts in groups only).
So nothing is believed: the router that vLLM would build is tried on drawn logits. Where it does not
give the checkpoint's experts and weights, it is told otherwise, and at last to call our rule.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token.
"""

import dataclasses
import inspect
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from l2r.errors import InputError
from l2r.routers import Router
from l2r.routers.selection_rule import Selection

logger = logging.getLogger("vllm.plugins.l2r")

# Every way of choosing that is not softmax top-k, turned off.
_PLAIN: Mapping[str, Any] = {
    "use_grouped_topk": False,
    "num_expert_group": None,
    "topk_group": None,
    "custom_routing_function": None,
    "scoring_func": "softmax",
    "e_score_correction_bias": None,
}
_TOKENS = 64
# Of a weight, by its scale: both sides compute in float32, and families add up to 1e-6 to a sum.
_TOLERANCE = 1e-5


class Rule:
    """A selection in the form in which vLLM calls a family's own function of routing.

    bias [N]: what vLLM's block keeps for the family, None where the rule has none there. The
    weights are divided by ``factor``, by which vLLM multiplies the output of the experts.
    """

    def __init__(self, router: Router, rule: Selection, bias: Tensor | None, factor: float) -> None:
        self.router, self.rule, self.bias, self.factor = router, rule, bias, factor

    def __call__(
        self, hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        """Weights [T, K] in float32 and experts [T, K] of logits [T, N]."""
        del hidden_states, topk, renormalize  # the rule has its own
        weights, experts = self.rule(self.router, gating_output.float(), self.bias)
        return weights / self.factor, experts.to(torch.int32)


def tell(
    settings: Mapping[str, Any], router: Router, rule: Selection, layer: str
) -> dict[str, Any]:
    """Return settings of an MoE layer by which vLLM applies ``rule`` to logits of ``router``.

    ``settings`` are those that the family's class gives ``FusedMoEFactory``. A bias that belongs
    to the family is vLLM's tensor among them. Raises ValueError for a rule without its bias, and
    where no setting makes vLLM choose as the checkpoint.
    """
    bias = None
    if rule.family is not None and (rule.bias is not None or rule.block_bias):
        bias = settings.get("e_score_correction_bias")
        if bias is None:
            raise InputError(f"{layer} reads no selection bias in vLLM; the checkpoint has {rule}")
        rule = dataclasses.replace(rule, bias=None, block_bias=True)
    for choice in _choices(settings, router, rule, bias):
        if agrees(choice, router, rule):
            if choice.get("custom_routing_function") is not settings.get("custom_routing_function"):
                logger.info("%s chooses experts by the checkpoint's rule in torch, %s", layer, rule)
            return dict(choice)
    raise InputError(f"{layer} cannot be told to choose as the checkpoint: {rule}")


def _choices(
    settings: Mapping[str, Any], router: Router, rule: Selection, bias: Tensor | None
) -> Iterator[Mapping[str, Any]]:
    """Return settings that vLLM may take, from those of its class to the rule itself."""
    normalized = {"renormalize": rule.normalize}
    yield settings
    yield {**settings, **normalized}
    factor = _factor(settings)
    scaled = {} if factor != 1 else {"routed_scaling_factor": 1.0}
    if rule.fused:
        yield {**settings, **_PLAIN, **normalized, **scaled}
    ours = {"custom_routing_function": Rule(router, rule, bias, factor)}
    yield {**settings, **_PLAIN, **normalized, **scaled, **ours}


def _factor(settings: Mapping[str, Any]) -> float:
    """Return the factor by which vLLM multiplies the experts' output, besides the weights."""
    outside = settings.get("apply_routed_scale_to_output", False)
    return float(settings.get("routed_scaling_factor", 1.0)) if outside else 1.0


@torch.no_grad()
def agrees(settings: Mapping[str, Any], router: Router, rule: Selection) -> bool:
    """Say whether the router that vLLM builds from settings chooses and weighs as ``rule``.

    On drawn logits, and with a drawn bias wherever one is read.
    """
    device, draw = _device(), torch.Generator("cpu").manual_seed(0)
    experts, own = router.num_experts, settings.get("custom_routing_function")

    def drawn(*sizes: int) -> Tensor:
        values = torch.randn(*sizes, generator=draw, device="cpu", dtype=torch.float32)
        return values.to(device)

    logits, bias = 2 * drawn(_TOKENS, experts), drawn(experts).abs() / 4
    trial = dict(settings)
    if trial.get("e_score_correction_bias") is not None:
        trial["e_score_correction_bias"] = bias
    if isinstance(own, Rule) and own.bias is not None:
        trial["custom_routing_function"] = Rule(own.router, own.rule, bias, own.factor)
    with _drawn_bias(rule.held_bias(router), bias):
        wanted = _by_expert(*rule(router, logits, bias), experts)
        try:
            found = _by_expert(*_route(trial, logits), experts) * _factor(settings)
        except (AssertionError, NotImplementedError, ValueError):  # this processor lacks the rule
            return False
    same = bool(((found != 0) == (wanted != 0)).all())
    return same and bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())


@contextmanager
def _drawn_bias(held: Tensor | None, bias: Tensor) -> Iterator[None]:
    """Draw the router's own selection bias, 0 before weights are loaded, inside the block."""
    if held is None:
        yield
        return
    before = held.clone()
    held.copy_(bias)
    try:
        yield
    finally:
        held.copy_(before)


def _device() -> torch.device:
    """Return the device on which vLLM builds the model; its platform's if that is meta."""
    device = torch.get_default_device()
    if device.type != "meta":
        return device
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


def _by_expert(weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
    """Weights [T, N], zero where an expert was not chosen."""
    table = weights.new_zeros(len(weights), experts, dtype=torch.float32)
    return table.scatter(1, chosen.long(), weights.float())


def _route(settings: Mapping[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and experts [T, K] of the router that vLLM would build."""
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

    names = inspect.signature(create_fused_moe_router).parameters
    given = {name: value for name, value in settings.items() if name in names}
    if settings.get("apply_routed_scale_to_output"):
        given["routed_scaling_factor"] = 1.0
    router = create_fused_moe_router(**given, global_num_experts=settings["num_experts"])
    hidden = logits.new_zeros(len(logits), 8)  # most rules take its length alone
    weights, chosen = router.select_experts(hidden_states=hidden, router_logits=logits)
    return weights, chosen
