"""Look at the routers of any model, ours or Hugging Face's, without changing them.

Shape letters: T tokens, D hidden size, N experts, K experts chosen per token.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers.base import Router, RouterOutput
from l2r.routers.temporary import removing

# PEFT puts a router that it adapts, or trains a copy of, inside a module in its place.
_COPIES = re.compile(r"\.(original_module|base_layer|modules_to_save\.[^.]+)$")
Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]  # what it returns replaces the output
Reducer = Callable[[Tensor, RouterOutput, str], None]  # a router's input, its output, its name
# Parts of a model that see images or make sound: their routers are not the text model's.
BLOCK_BIASES = ("e_score_correction_bias", "expert_bias")  # of blocks that pass them to routers
_OTHER_PARTS = ("vision", "visual", "audio", "talker")  # words in their names


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Routers by module name, in the order of the model: ours, and Hugging Face's.

    A Hugging Face router is a sibling of ``experts`` in its block, as ``gate`` or ``router``; those
    of a vision tower or a talker are ``other_routers``. Raises ValueError when there is none.
    """
    routers: dict[str, nn.Module] = {
        name: module for name, module in model.named_modules() if isinstance(module, Router)
    }
    for name, router in _beside_experts(model):
        if reads_text(name):
            routers.setdefault(name, router)
    if not routers:
        raise InputError(f"{type(model).__name__} has no MoE router that l2r can read")
    every = model.named_modules(remove_duplicate=False)  # blocks may share a router
    order = {name: position for position, (name, _) in enumerate(every)}
    return dict(sorted(routers.items(), key=lambda item: order[item[0]]))


def other_routers(model: nn.Module) -> list[str]:
    """Names of Hugging Face routers in parts of a model that read no text."""
    return [name for name, _ in _beside_experts(model) if not reads_text(name)]


def reads_text(path: str) -> bool:
    """Tell whether a module at a path is of a text model, not of a vision tower or a talker."""
    return not any(word in path for word in _OTHER_PARTS)


def layer_index(path: str) -> int:
    """Index of the layer that a module path names, 0 where it names none."""
    numbers = re.findall(r"\.(\d+)\.", f".{path}.")
    return int(numbers[0]) if numbers else 0


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel and torch.compile's wrapper."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module) and next(model.children()) is inner:
            return unwrapped_model(inner)
    return model


def _beside_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), nn.Module):
            for attribute in ("gate", "router"):
                router = getattr(module, attribute, None)
                if isinstance(router, nn.Module):
                    yield f"{name}.{attribute}" if name else attribute, router


def block_of(model: nn.Module, path: str) -> nn.Module:
    """Find the block that calls the router at ``path``, adapters and copies of PEFT left out."""
    return model.get_submodule(_COPIES.sub("", path).rpartition(".")[0])


def block_bias(model: nn.Module, path: str) -> tuple[Tensor, ...]:
    """Find the selection bias [N] that a block passes to its router at ``path``, if it does."""
    block = block_of(model, path)
    for name in BLOCK_BIASES:
        bias = getattr(block, name, None)
        if isinstance(bias, Tensor):
            return (bias,)
    return ()


def more_inputs(router: nn.Module) -> list[str]:
    """Names of what a router must be given besides the hidden states."""
    _, *others = inspect.signature(router.forward).parameters.values()
    return [p.name for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


@contextmanager
def watched(routers: Mapping[str, nn.Module], *reducers: Reducer) -> Iterator[None]:
    """Pass every call of the routers, inside the block, to each reducer in turn.

    A reducer gets the input [..., D], the ``RouterOutput`` and the name of the router. There is
    one forward hook per router, however many reducers there are. Activation checkpointing runs
    forward hooks again during backward: close the block before it.
    Raises ValueError for an output that is not (logits, weights, indices).
    """

    def hook_for(name: str) -> Hook:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            ours = isinstance(output, RouterOutput)
            result = output if ours else RouterOutput(*routed(module, output))
            for reduce in reducers:
                reduce(args[0], result, name)

        return hook

    with hooked({router: hook_for(name) for name, router in routers.items()}):
        yield


@contextmanager
def hooked(hooks: Mapping[nn.Module, Hook]) -> Iterator[None]:
    """Call a forward hook of each module inside the block; keyword arguments follow the others."""

    def with_keywords(hook: Hook) -> Callable[..., Any]:
        return lambda module, args, named, output: hook(module, (*args, *named.values()), output)

    handles = {
        module.register_forward_hook(with_keywords(hook), with_kwargs=True): module
        for module, hook in hooks.items()
    }
    with removing(handles):
        yield


def routed(module: nn.Module, output: Any) -> tuple[Float[Tensor, "T N"], Tensor, Tensor]:
    """Check the contract of a router: logits [T, N], weights [T, K], indices [T, K]."""
    shapes = [tuple(part.shape) for part in output if isinstance(part, Tensor)]
    fits = len(shapes) == 3 and all(len(shape) == 2 for shape in shapes)
    if not fits or shapes[1] != shapes[2] or output[2].is_floating_point():
        raise InputError(
            f"{type(module).__name__} must return logits [T, N], weights [T, K] and indices "
            f"[T, K]; got {shapes}"
        )
    logits, weights, indices = output
    return logits, weights, indices


def chosen_too(first: Int[Tensor, "T K"], second: Int[Tensor, "T K"]) -> Bool[Tensor, "T K"]:
    """Tell whether each of a token's experts in ``first`` is among those in ``second``."""
    return (first[:, :, None] == second[:, None, :]).any(dim=-1)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block; each submodule's own mode afterwards."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
