"""An OLMoE of ours on Hugging Face, filled from an engine's tensors or read into them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from l2r.errors import InputError
from l2r.routers import Router, RouterConfig
from l2r.routers.base import SELECTION_BIAS

Pair = tuple[Tensor, Tensor]  # one value in a Hugging Face model and in an engine, equal shapes


class OlmoeTensors:
    """A state dict from which every tensor is taken once; raises ValueError where one is odd."""

    def __init__(self, owner: str, state: dict[str, Any]) -> None:
        self.owner = owner
        self.left = {
            name: value
            for name, value in state.items()
            if isinstance(value, Tensor) and not name.endswith("_extra_state")
        }

    def take(self, name: str) -> Tensor:
        """Return a tensor by name."""
        if name not in self.left:
            raise InputError(f"{self.owner} must hold {name} to be an OLMoE; it does not")
        return self.left.pop(name)

    def drop(self, name: str) -> None:
        """Leave out a tensor that is another one under a second name, if it is there."""
        self.left.pop(name, None)

    def all_taken(self) -> None:
        """Refuse a tensor that nothing took."""
        if self.left:
            names = ", ".join(sorted(self.left)[:3])
            raise InputError(f"{self.owner} holds what an OLMoE has no place for: {names}")


def olmoe(router: RouterConfig, *, post_norm: bool = False, **settings: Any) -> Any:
    """L2rOlmoeForCausalLM, or FlexOlmo with our routers where the norms follow the sublayers.

    ``settings`` are fields of the Hugging Face configuration; weights are yet to be filled.
    """
    from transformers import FlexOlmoForCausalLM

    from l2r.hf.models import L2rOlmoeForCausalLM
    from l2r.hf.swap import replace_routers

    if not post_norm:
        return L2rOlmoeForCausalLM(olmoe_config(**settings, router=router.to_dict()))
    model = FlexOlmoForCausalLM(olmoe_config(post_norm=True, **settings))
    return replace_routers(model, router, selection="router")


def olmoe_config(*, post_norm: bool = False, **settings: Any) -> Any:
    """Hugging Face configuration of ``olmoe``, without a router unless ``settings`` have one."""
    from transformers import FlexOlmoConfig

    from l2r.hf.models import L2rOlmoeConfig

    ids: dict[str, Any] = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    kind: Any = FlexOlmoConfig if post_norm else L2rOlmoeConfig
    return kind(**ids | settings)


@torch.no_grad()
def copy_all(
    model: Any,
    state: dict[str, Any],
    pairs: Callable[[OlmoeTensors, OlmoeTensors], Iterator[Pair]],
    *,
    to_engine: bool = False,
) -> None:
    """Copy every value of a Hugging Face model from an engine's whole ``state``, or into it.

    Raises ValueError, before anything is copied, where the two are not the same architecture or
    a value is not finite.
    """
    from l2r.hf.models import check_finite

    ours, theirs = (
        OlmoeTensors("the Hugging Face model", model.state_dict()),
        OlmoeTensors("the engine", state),
    )
    check_finite((ours if to_engine else theirs).left.items())
    try:
        matched = list(pairs(ours, theirs))
        ours.all_taken()
        theirs.all_taken()
    except RuntimeError as error:  # a view that does not fit
        raise InputError(f"both models must have the same sizes: {error}") from error
    for here, there in matched:
        if here.shape != there.shape:
            sizes = f"got {list(here.shape)} and {list(there.shape)}"
            raise InputError(f"both models must have the same sizes; {sizes}")
    for here, there in matched:
        target, source = (there, here) if to_engine else (here, there)
        target.copy_(source)


def router_pairs(
    router: Router,
    prefix: str,
    ours: OlmoeTensors,
    theirs: OlmoeTensors,
    names: Mapping[str, str],
    bias: str | None,
) -> Iterator[Pair]:
    """Yield the tensors of one router; ``names`` and ``bias``, of a selection bias: the engine's.

    A model without a bias gives an engine's zeros.
    """
    for here, _ in router.named_parameters():
        value = ours.take(prefix + here)
        yield value, theirs.take(names[here]).view(value.shape)
    place = prefix + (router.selection.bias or SELECTION_BIAS)
    if bias is not None:
        there = theirs.take(bias)
        yield (ours.take(place) if place in ours.left else torch.zeros_like(there)), there
    elif place in ours.left and ours.take(place).any():
        raise InputError("the model has a selection bias, and the engine's routers have none")
