"""Our routers in Megatron-core's MoE layers.

    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=64, qk_layernorm=True)
    plug(spec, {"kind": "l2r_sips", "rank": 2, "heads": 16})
    model = GPTModel(config, spec, vocab_size=50304, max_sequence_length=4096)

``olmoe_layer`` in place of ``plug`` also makes the attention OLMoE's: Megatron normalizes each
head of queries and keys, OLMoE all heads together.

We decide the logits and the router's initial weights. Megatron decides everything after the
logits: score function, top-k, groups, expert bias, aux and z losses and their logs, dropping,
replay; and dispatch, recompute and parallelism. OLMoE's rule is ``moe_router_pre_softmax=True``;
``moe_router_dtype="fp32"`` keeps our logits in fp32 where activations are bf16, and our parameters,
``mlp.router.l2r.*``, which Float16Module would round to bf16. They follow from the seed that
torch's generator got and the number of the layer, on any device. Megatron
decays matrices and stacks of them, so anchors too. Under tensor parallel with Megatron's own FSDP
routers are found by the name ``.router.weight``, which ours do not have: not run, do not combine.

Settings that ``checkpoint.to_hugging_face`` would refuse are warned of when the first router of a
model is built.
"""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from l2r.engines.engine import engine_router, own_stream, require
from l2r.engines.megatron.settings import fields_without_export
from l2r.errors import InputError
from l2r.hf.models import routers_keep_dtype
from l2r.routers import Router
from l2r.routers.norms import sum_over_ranks

require("megatron-core")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint  # noqa: E402

_STRIDE = 0x9E3779B97F4A7C15  # seeds of neighbours differ in many bits
_WARNED: WeakValueDictionary[int, Any] = WeakValueDictionary()  # configurations, by their id


class L2RTopKRouter(TopKRouter):
    """Megatron's router with logits of ours: input [S, B, D] to [S, B, N].

    ``router`` is the dictionary form of a RouterConfig. Raises ValueError with add_bias_linear,
    whose bias our logits have no place for, and with Megatron's layers for inference alone, whose
    router returns something else.
    """

    def __init__(
        self, config: Any, pg_collection: Any = None, *, router: Mapping[str, Any], **options: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection, **options)
        if config.add_bias_linear:
            raise InputError("add_bias_linear must be False with our routers; got True")
        if config.transformer_impl == "inference_optimized":
            raise InputError(
                "transformer_impl must be local or transformer_engine with our routers; "
                "got inference_optimized"
            )
        del self.weight
        sizes = {"hidden_size": config.hidden_size, "num_experts": config.num_moe_experts}
        self._build = partial(engine_router, router, top_k=config.moe_router_topk, **sizes)
        self._seed = torch.initial_seed()  # whatever was drawn since
        with own_stream(self._seed):
            self.l2r = self._build()
        if not self._keeps_dtype:
            self.l2r.to(config.params_dtype)
        self.reset_parameters()
        _warn(config, self.l2r)

    def set_layer_number(self, layer_number: int) -> None:
        """Take the number of the layer, which Megatron says once it has built the router."""
        drawn = self.layer_number
        super().set_layer_number(layer_number)
        if drawn is None:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the router, as often as Megatron asks: for models without storage a second time."""
        if "l2r" not in self._modules:
            super().reset_parameters()
            return
        place = 2 * (self.layer_number or 0) + bool(getattr(self, "is_mtp_layer", False))
        with own_stream((self._seed + place * _STRIDE) % 2**63), torch.device("cpu"):
            drawn = self._build().state_dict()
        if not next(self.l2r.parameters()).is_meta:
            self.l2r.load_state_dict(drawn)
        for parameter in self.l2r.parameters():  # gradients are summed over ranks of a sequence
            parameter.sequence_parallel = self.config.sequence_parallel  # type: ignore[attr-defined]

    @property
    def _keeps_dtype(self) -> bool:
        return self.config.moe_router_dtype is not None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "L2RTopKRouter":
        if not self._keeps_dtype:
            return super()._apply(fn, recurse)
        with routers_keep_dtype(self):
            return super()._apply(fn, recurse)

    def gating(self, input: Tensor) -> Tensor:
        """Logits, in the dtype that ``moe_router_dtype`` asks for; that of the input by default."""
        if input.is_cuda and next(self.l2r.parameters()).is_cpu:
            self.l2r.to(input.device)  # as the stock router, which is made on the CPU too
        wanted = {"fp32": torch.float32, "fp64": torch.float64}
        dtype = wanted.get(self.config.moe_router_dtype, input.dtype)
        logits: Tensor = self.l2r.logits(input.to(torch.promote_types(dtype, input.dtype)))
        return logits.to(dtype).view(*input.shape[:-1], self.config.num_moe_experts)


def _warn(config: Any, router: Router) -> None:
    """Say once a model what has no export, on the first rank."""
    if _WARNED.get(id(config)) is config:
        return
    _WARNED[id(config)] = config
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for line in fields_without_export(config, router):
            warnings.warn(line, stacklevel=3)


def moe_submodules(layer: Any) -> Any:
    """Submodules of a layer spec's MoE, or None without one; ``router`` is a builder."""
    mlp = layer.submodules.mlp
    # A spec before 0.18, a partial of the layer from then on.
    submodules = getattr(mlp, "keywords", vars(mlp)).get("submodules")
    return submodules if hasattr(submodules, "router") else None


def plug(spec: Any, router: Mapping[str, Any]) -> int:
    """Put routers of ours into every MoE layer of a spec, in place; returns how many.

    ``spec`` is of a layer, a block or HybridModel's stack. Megatron's ``hybrid_stack_spec`` is one
    object for the whole process: models that are built from it later get the same routers.
    ``router`` is the dictionary form of a RouterConfig. Raises ValueError where there is no MoE
    layer.
    """
    count = 0
    for layer in _layer_specs(spec, "moe_layer"):
        submodules = moe_submodules(layer)
        if submodules is not None:
            submodules.router = partial(L2RTopKRouter, router=dict(router))
            count += 1
    if not count:
        raise InputError("the spec has no MoE layer to put a router into; set num_experts")
    return count


def _layer_specs(spec: Any, hybrid: str) -> list[Any]:
    """Specs of the layers of a block, the one of a kind in a hybrid stack, or the spec itself."""
    inside = getattr(spec, "submodules", None)
    if hasattr(inside, "moe_layer"):
        return [getattr(inside, hybrid)]
    return getattr(spec, "layer_specs", None) or [spec]


class HeadsNorm(MegatronModule):
    """RMSNorm over all heads of a token together, x [S, B, H, C]; ranks hold different heads."""

    def __init__(self, hidden_size: int, config: Any, eps: float, *, keys: bool) -> None:
        super().__init__(config)
        self.eps, heads = eps, config.num_query_groups if keys else config.num_attention_heads
        self.width = heads * hidden_size
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.weight = nn.Parameter(torch.ones(self.width // self.ranks, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x with mean square 1 over its last two dimensions, times the gain."""
        flat = x.flatten(-2).float()
        squares = flat.square().sum(-1, keepdim=True)
        if self.ranks > 1:
            group = parallel_state.get_tensor_model_parallel_group()
            squares = sum_over_ranks(squares, group)
        unit = flat * torch.rsqrt(squares / self.width + self.eps)
        return (self.weight * unit.to(x.dtype)).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """Return the gain, cut over tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


def olmoe_layer(spec: Any, router: Mapping[str, Any]) -> None:
    """Make the layers of a spec those of an OLMoE with a router of ours; see ``plug``.

    In a hybrid stack a layer is two of Megatron's: ``hybrid_layer_pattern="*E*E"`` has two.
    """
    plug(spec, router)
    for layer in _layer_specs(spec, "attention_layer"):
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm = ModuleSpec(module=HeadsNorm, params={"keys": False})
        attention.k_layernorm = ModuleSpec(module=HeadsNorm, params={"keys": True})
