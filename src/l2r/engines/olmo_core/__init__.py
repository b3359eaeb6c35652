"""Our routers in OLMo-core's MoE transformers, and their checkpoints to and from Hugging Face.

    config = TransformerConfig.olmoe_1B_7B(vocab_size=50304)
    plug(config, {"kind": "l2r_sips", "rank": 2, "heads": 16})  # of l2r.engines.olmo_core.settings

``plug`` puts an ``L2RRouterConfig`` into every MoE block. We decide the logits and the router's
initial weights, which ``init_seed`` of the model gives. OLMo-core decides everything after the
logits: gating function, top-k, normalization, jitter, selection bias (``bias_gamma``), both
losses and their metrics; and dispatch, capacity, recompute and parallelism. Parameters are flat
vectors, as it wants them for FSDP, named as ours with underscores for dots. It decays them all:
``OptimGroupOverride(params=["*.router.anchors"], opts={"weight_decay": 0.0})`` spares anchors.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from l2r.engines.engine import Plug, require
from l2r.routers import RouterConfig
from l2r.routers.count import router_parameters

require("ai2-olmo-core")

from olmo_core.distributed.utils import distribute_like, get_local_tensor  # noqa: E402
from olmo_core.nn.moe.router import MoERouter, MoERouterConfig  # noqa: E402


@dataclass
class L2RRouterConfig(MoERouterConfig):
    """MoERouterConfig with ``router``: the dictionary form of a RouterConfig, ``kind`` first."""

    router: dict[str, Any] = field(default_factory=lambda: {"kind": "l2r_sips"})

    def num_params(self, d_model: int, num_experts: int) -> int:
        """Parameters of one router."""
        return router_parameters(
            RouterConfig.from_dict(self.router), hidden_size=d_model, num_experts=num_experts
        )

    def build(
        self,
        d_model: int,
        num_experts: int,
        *,
        dtype: torch.dtype | None = None,
        init_device: str = "cpu",
        **losses: Any,
    ) -> "L2RMoERouter":
        """Return the router of one layer; called by the engine's MoE module.

        Warns in one line of each of its settings that has no export to Hugging Face.
        """
        from l2r.engines.olmo_core.settings import router_lines  # which imports this module

        options = self.as_dict(exclude_none=True, exclude=("name", "dtype"), recurse=False)
        options |= losses | {"d_model": d_model, "num_experts": num_experts}
        dtype = dtype if self.dtype is None else self.dtype.as_pt()
        router = L2RMoERouter(dtype=dtype, init_device=init_device, **options)
        for line in router_lines(router):
            warnings.warn(line, stacklevel=2)
        return router


class L2RMoERouter(MoERouter):
    """OLMo-core's router with logits of ours: x [B, S, D] to [B, S, N].

    Under tensor parallel every rank has all parameters and its part of the sequence.
    """

    def __init__(
        self,
        *,
        router: Mapping[str, Any],
        dtype: torch.dtype | None = None,
        init_device: str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__(init_device=init_device, **options)
        sizes = {"hidden_size": self.d_model, "num_experts": self.num_experts}
        self.plug = Plug(router, top_k=self.top_k, **sizes)
        for name, shape in self.plug.parameters.items():
            flat = torch.empty(shape.numel(), device=init_device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(flat))
        if not hasattr(self, "weight"):
            self.weight = _Weight.of(self)
        self.reset_parameters()

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        found = next(self.parameters()).device
        return torch.device("cpu") if found.type == "meta" else found

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the part of the router on this rank as our own models initialize it."""
        super().reset_parameters()
        self.draw()

    @torch.no_grad()
    def draw(self, generator: torch.Generator | None = None) -> None:
        """Draw the part of the router on this rank, from the engine's generator where it is given.

        Ranks whose generators are alike draw the same router.
        """
        if generator is not None:
            drawn = torch.randint(2**62, (), generator=generator, device=generator.device)
            self.plug.reseed(int(drawn), 0)
        for name, value in self.plug.draw().items():
            mine = getattr(self, name)
            whole = value.to(mine.device, mine.dtype).flatten()
            get_local_tensor(mine).copy_(get_local_tensor(distribute_like(mine, whole)))

    def get_expert_logits(self, x: Tensor) -> Tensor:
        """Logits [B, S, N] in fp32 or wider, already divided by our temperature."""
        values = {name: _whole(getattr(self, name)) for name in self.plug.parameters}
        return self.plug.logits(x, values)

    def apply_tp(self, tp_mesh: Any, float8_enabled: bool = False) -> None:
        """Replicate the parameters; every rank routes its part of the sequence."""
        super().apply_tp(tp_mesh, float8_enabled=float8_enabled)
        for name, value in list(self.named_parameters()):
            whole = distribute_tensor(value.data, tp_mesh, [Replicate()])
            self.register_parameter(name, nn.Parameter(whole))


class _Weight(Tensor):
    """Empty tensor in the place of a linear router's weight, which others of ours do not have.

    The engine's ``init_weights`` draws a router's weight from its generator, of ``init_seed``;
    drawing this one draws the parameters of its router.
    """

    router: "L2RMoERouter"

    @classmethod
    def of(cls, router: "L2RMoERouter") -> "_Weight":
        """Return the one of a router."""
        made = torch.empty(0).as_subclass(cls)
        made.router = router
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        generator = (kwargs or {}).get("generator")
        if generator is None:
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        args[0].router.draw(generator)
        return args[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Weight":
        return _Weight.of(copy.deepcopy(self.router, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _Weight.of, (self.router,)


def _whole(tensor: Tensor) -> Tensor:
    """Return this rank's tensor; under TP its gradient comes from this rank's tokens."""
    if not isinstance(tensor, DTensor):
        return tensor
    local: Tensor = tensor.to_local(grad_placements=[Partial()] * tensor.device_mesh.ndim)
    return local
