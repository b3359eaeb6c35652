"""Our routers as the gates of a model of vLLM's: built, placed and loaded.

Shape letters: T tokens, D hidden size, N experts.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from l2r.engines.vllm.selecting import tell
from l2r.errors import InputError
from l2r.hf.swap import family_selection
from l2r.routers import Router, RouterConfig, build_router

_NAMES = ("gate", "router")  # what blocks call their gate, in vLLM and in checkpoints
# A selection bias [N] of a family, on the gate or on the block around it.
_BIASES = ("e_score_correction_bias", "expert_bias")
# Fields that vLLM's class has as constants: it computes a model with another value otherwise.
_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "OlmoeForCausalLM": {
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "clip_qkv": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    "PhiMoEForCausalLM": {"attention_bias": True, "lm_head_bias": True},
}


class LogitsGate(nn.Module):
    """Hidden states [T, D] to logits [T, N] in float32, in the form of the gate that it replaces.

    pair: with None behind them, as vLLM's linear layers return a bias. Every rank of tensor
    parallelism has the whole router.
    """

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router.float().requires_grad_(False).eval()
        self.pair = True
        self.out_dtype = torch.float32  # some blocks ask their gate

    def forward(self, hidden_states: Tensor) -> Any:
        logits = self.router.logits(hidden_states)
        return (logits, None) if self.pair else logits


class Gates:
    """The gates of a model, by its configuration: the family's, with ``l2r_swap`` or ``router``.

    ``stock`` is the name of vLLM's class. Raises ValueError for a field that vLLM's class has as
    a constant of another value, and for a configuration without routers of ours.
    """

    def __init__(self, config: Any, stock: str) -> None:
        for name, value in _CONSTANTS.get(stock, {}).items():
            if (actual := getattr(config, name, value)) != value:
                raise InputError(f"{name} must be {value} in vLLM's {stock}; got {name}={actual}")
        self._config = config
        # Router and "family" or "router", whose selection counts, by layer.
        self._entries: dict[int, tuple[Mapping[str, Any], str]] = {}
        own = getattr(config, "router", None)  # of our own OLMoE, which has no other selection
        if isinstance(own, Mapping):
            self._entries = dict.fromkeys(range(config.num_hidden_layers), (own, "router"))
        for swap in getattr(config, "l2r_swap", None) or []:
            for layer in swap["layers"]:
                # "family" keeps the rule that is there, which a swap before may have replaced.
                _, before = self._entries.get(layer, (None, swap["selection"]))
                rule = "router" if "router" in (before, swap["selection"]) else "family"
                self._entries[layer] = (swap["router"], rule)
        if not self._entries:
            raise InputError("config.json must have l2r_swap or router to be served as ours")
        self._gates: dict[str, LogitsGate] = {}  # by the name of the MoE layer
        self._targets: dict[tuple[int, str], Tensor] = {}  # by layer and name in the router
        self.loads_in_parts = False  # as trainers pass new weights on, after the checkpoint's

    @contextmanager
    def in_new_layers(self) -> Iterator[None]:
        """Have vLLM build the MoE layers of a model with our gates inside the block."""
        from vllm.model_executor.layers import fused_moe

        usual = fused_moe.FusedMoEFactory

        def ours(*args: Any, **settings: Any) -> Any:
            named = inspect.signature(usual).bind_partial(*args, **settings).arguments
            return usual(**self._told(named))

        # Models have the function by its name in their own module.
        modules = [m for name, m in list(sys.modules.items()) if name.startswith("vllm.")]
        holders = [m for m in modules if vars(m).get("FusedMoEFactory") is usual]
        for module in holders:
            module.FusedMoEFactory = ours  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for module in holders:
                module.FusedMoEFactory = usual  # type: ignore[attr-defined]

    def _told(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of an MoE layer with our gate, the checkpoint's rule, float32 logits.

        Those of a layer whose router was not swapped stay. Raises ValueError where vLLM fuses the
        gate with that of a shared expert, and as ``tell``.
        """
        name = settings["prefix"]
        layer = _layer(name)
        if layer not in self._entries:
            return dict(settings)
        if settings.get("shared_expert_gate") is not None:
            raise InputError(f"vLLM fuses the gates of {name}; turn fused shared experts off")
        config, selection = self._entries[layer]
        router = build_router(
            RouterConfig.from_dict(config),
            hidden_size=self._config.hidden_size,
            num_experts=settings["num_experts"],
            top_k=settings["top_k"],
        )
        if selection == "family":
            router.selection = family_selection(self._config)
        self._gates[name] = LogitsGate(router)
        told = tell(settings, router, router.selection, name)
        if told.get("gate") is not None:
            told["gate"] = self._gates[name]
        return {**told, "router_logits_dtype": torch.float32}

    def place(self, model: nn.Module) -> None:
        """Put the gates into the blocks of a model that was built ``in_new_layers``.

        Raises ValueError for a swapped layer of the model without an MoE layer of vLLM's, or
        without a gate, and for one that reads the gate's weight itself.
        """
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.platforms import current_platform

        for path, runner in list(model.named_modules()):
            gate = self._gates.get(runner.layer_name) if isinstance(runner, MoERunner) else None
            if gate is None:
                continue
            block = model.get_submodule(path.rpartition(".")[0])
            place = [n for n in _NAMES if isinstance(getattr(block, n, None), LinearBase)]
            if not place:
                raise InputError(f"{type(block).__name__} has no gate named gate or router")
            if place[0] == "router" and current_platform.is_rocm():
                raise InputError(f"{type(block).__name__} reads router.weight itself on ROCm")
            layer = _layer(runner.layer_name)
            _replace(block, place[0], gate)
            for key, value in gate.router.state_dict(keep_vars=True).items():
                self._targets[layer, key] = value
        built = {layer for layer, _ in self._targets}
        if len(built) != len(self._gates) or not built:
            raise InputError(f"vLLM's model must have an MoE layer a swapped router; got {built}")

    @torch.no_grad()
    def load(
        self,
        model: nn.Module,
        weights: Iterable[tuple[str, Tensor]],
        rest: Callable[[Iterable[tuple[str, Tensor]]], set[str] | None],
    ) -> set[str] | None:
        """Load our tensors, and all others by the family's ``rest``; returns vLLM's names of both.

        Raises ValueError for a tensor of a router that is missing, in the first load of a
        checkpoint, or has another shape.
        """
        inside = sorted({key for _, key in self._targets}, key=len, reverse=True)
        ours = re.compile(
            rf"\.(\d+)\.(?:.+\.)?(?:{'|'.join(_NAMES)})\.({'|'.join(map(re.escape, inside))})$"
        )
        seen: set[tuple[int, str]] = set()

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                found = ours.search(name)
                place = (int(found[1]), found[2]) if found else (-1, "")
                if place[0] not in self._entries:
                    yield name, value
                elif place in self._targets:  # else of a layer that another rank has
                    target = self._targets[place]
                    if target.shape != value.shape:
                        sizes = f"{list(target.shape)}; got {list(value.shape)}"
                        raise InputError(f"{name} must have shape {sizes}")
                    target.copy_(value)
                    seen.add(place)

        loaded = rest(others())
        missing = sorted(self._targets.keys() - seen)
        if missing and not self.loads_in_parts:
            raise InputError(f"the checkpoint lacks tensors of routers: {missing[:3]}")
        self.loads_in_parts = True
        if loaded is None:
            return None
        mine = {id(value) for value in self._targets.values()}
        return set(loaded) | {
            name
            for name, value in model.named_parameters()
            if id(value) in mine or self._is_unread(name)
        }

    def _is_unread(self, name: str) -> bool:
        """Say whether a parameter is a selection bias in a layer that chooses without it."""
        unread = self._entries.get(_layer(name), ({}, ""))[1] == "router"
        return unread and name.rpartition(".")[2] in _BIASES


def _layer(name: str) -> int:
    """Index of the layer in a name such as ``model.layers.3.mlp.experts``, -1 in one without."""
    found = re.search(r"\.(\d+)\.", f".{name}.")
    return int(found[1]) if found else -1


def _replace(block: nn.Module, place: str, gate: LogitsGate) -> None:
    """Put a gate into a block, with what the family keeps on its own: a selection bias."""
    old = getattr(block, place)
    gate.pair = getattr(old, "return_bias", True)
    for name in _BIASES:
        if hasattr(old, name):  # the very tensor that the MoE layer reads, or None
            setattr(gate, name, getattr(old, name))
    setattr(block, place, gate)
