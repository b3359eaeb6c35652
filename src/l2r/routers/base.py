"""The contract of a router: x [..., D] in, (logits, weights, indices) out, nothing remembered.

``@register_router("name")`` adds one, ``build_router`` builds one. A router's own file registers
it; routers/__init__.py imports these files.

Shape letters: T tokens, D hidden size, R rank, N experts, K experts chosen per token.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.errors import InputError, sizes
from l2r.functional.autocast import autocasts, without_autocast
from l2r.functional.scoring import DEFAULTS, ScoreConstants
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.routers.config import (
    ROUTERS,
    Registered,
    RouterConfig,
    make_config,
    refusals_of,
    registered,
)
from l2r.routers.holder import holders_that_take_part
from l2r.routers.selection_rule import FAMILY_FIELDS, Selection

SELECTION_BIAS = "e_score_correction_bias"  # of a selection, named as in Hugging Face


class RouterOutput(NamedTuple):
    """Results of a router for T tokens, in the order Hugging Face MoE blocks expect.

    logits [T, N] in the router's dtype, weights [T, K] in the dtype of x, indices [T, K].
    """

    logits: Float[Tensor, "T N"]
    weights: Float[Tensor, "T K"]
    indices: Int[Tensor, "T K"]


class Router(nn.Module):
    """Base class: a subclass gives ``Config``, its parameters, ``raw_logits`` and maybe ``query``.

    Computes with autocast off, in the wider of config.dtype and the dtype of x: by default fp32
    for half-precision inputs. Raises ValueError for sizes that do not fit together.
    """

    Config: ClassVar[type[RouterConfig]] = RouterConfig
    config: Any
    selection: Selection  # of the router's own, or of the model family it was swapped into
    heads = 1  # anchors per expert, whose scores a logit pools
    score: ScoreConstants = DEFAULTS  # constants of the logits, where ``kernel_weights`` are given
    holders: tuple[str, ...] = ()  # Holders by name: the router reads their parameters itself

    def __init__(
        self, config: RouterConfig, *, hidden_size: int, num_experts: int, top_k: int
    ) -> None:
        super().__init__()
        for name, value in (("hidden_size", hidden_size), ("num_experts", num_experts)):
            if value < 1:
                raise InputError(f"{name} must be >= 1; got {name}={value}")
        if not 1 <= top_k <= num_experts:
            raise InputError(
                f"top_k must be between 1 and num_experts; "
                f"got top_k={top_k}, num_experts={num_experts}"
            )
        if top_k == 1 and config.normalize_weights:
            raise InputError(
                "normalize_weights with top_k=1 makes every weight 1 and stops the router's "
                "gradient; set normalize_weights=False or top_k >= 2"
            )
        self.config = config
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.selection = self.configured_selection()
        if config.selection_bias:
            self.register_buffer(SELECTION_BIAS, torch.zeros(num_experts))
        self.log_temperature: nn.Parameter | None = None
        if config.learn_temperature:
            self.log_temperature = nn.Parameter(torch.empty(()))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw fresh parameters; a subclass extends it for its own."""
        if self.config.selection_bias:
            self.get_buffer(SELECTION_BIAS).zero_()
        if self.log_temperature is not None:
            self.log_temperature.fill_(self.config.temperature).log_()

    def lift_scalars(self) -> None:
        """Make a learned temperature a vector of one: FSDP2 shards no scalar."""
        scalar = self.log_temperature
        if scalar is not None:
            lifted = scalar.detach().reshape(1)
            self.log_temperature = nn.Parameter(lifted, requires_grad=scalar.requires_grad)

    def constrain(self) -> None:
        """Bring parameters back onto their surface after a step; most routers have none."""

    def raw_logits(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
        """Expert logits before the temperature, in the compute dtype; every router defines it."""
        raise TypeError(f"{type(self).__name__} does not define raw_logits")

    def query(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "T R"]:
        """Routing query of every token; the input itself where there is no projection."""
        return self._prepare(x).to(self.compute_dtype(x))

    def logits(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "T N"]:
        """Expert logits, divided by the temperature."""
        with without_autocast(x.device):
            return self._inside_holders(self._all_logits, x)

    def own_selection(self) -> Selection:
        """Return selection rule of the router by itself, Eq. 2 and 3, without a bias."""
        return Selection(normalize=self.config.normalize_weights)

    def configured_selection(self) -> Selection:
        """Return selection rule with the bias that the configuration asks for."""
        own = self.own_selection()
        return dataclasses.replace(own, bias=SELECTION_BIAS) if self.config.selection_bias else own

    def kernel_weights(self, x: Tensor) -> KernelWeights | None:
        """Projection, gain and anchors of a router that these and ``score`` describe whole.

        One call of the kernels then computes the logits and, where the selection is the usual one,
        weights and indices. None, the default, means that ``raw_logits`` is called instead.
        """
        del x
        return None

    def forward(
        self, x: Float[Tensor, "*B D"], bias: Tensor | None = None, routes: Tensor | None = None
    ) -> RouterOutput:
        """Route every token of x; leading dimensions are flattened to T.

        ``bias`` [N] is the selection bias that some model families pass. ``routes`` [T, K], int64,
        are experts that replace the router's choice; a token whose first is negative chooses for
        itself. Raises ValueError for ``routes`` with a selection other than softmax top-k, and on a
        CPU for an expert that is not there or that a token has twice.
        """
        # torch takes longer to read a device's name than for the rest of the question.
        if (not x.is_cpu or torch._C._is_any_autocast_enabled()) and autocasts(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return self._inside_holders(self._route, x, bias, routes)
        called = holders_that_take_part(self, self.holders)
        if called:
            return _inside(called, self._route, x, bias, routes)
        return self._route(x, bias, routes)

    def choose(self, x: Float[Tensor, "*B D"]) -> tuple[Tensor, Tensor]:
        """Weights and indices [T, K]; a router may compute them without all logits."""
        _, weights, indices = self(x)
        return weights, indices

    def is_watched(self) -> bool:
        """Tell whether a capture, a hook or a replaced forward takes part in a call.

        Other libraries bring weights by hooks and replaced forwards, and routes are replayed so.
        """
        hooks = self._forward_hooks or self._forward_pre_hooks
        hooks = hooks or self._backward_hooks or self._backward_pre_hooks
        return bool(hooks) or "forward" in vars(self)

    def _inside_holders(self, run: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        """``run(x, *rest)`` inside the forward of every holder that takes part in a call."""
        return _inside(holders_that_take_part(self, self.holders), run, x, *rest)

    def _route(self, x: Tensor, bias: Tensor | None, routes: Tensor | None) -> RouterOutput:
        flat = x if x.dim() == 2 and x.shape[1] == self.hidden_size else self._prepare(x)
        selection = self.selection
        if routes is not None and not selection.fused:
            raise ValueError(f"routes need a softmax top-k selection; got {selection}")
        parts = self.kernel_weights(flat)
        if parts is not None and selection.fused:
            logits, weights, indices = dispatch.route(
                flat,
                parts,
                self.score,
                top_k=self.top_k,
                normalize=selection.normalize,
                routes=routes,
            )
        elif routes is not None:
            logits = self._logits(flat, parts)
            weights, indices = dispatch.softmax_top_k(
                logits, self.top_k, normalize=selection.normalize, routes=routes
            )
        else:
            logits = self._logits(flat, parts)
            weights, indices = selection(self, logits, bias)
        if weights.dtype is not x.dtype:
            weights = weights.to(x.dtype)
        # Past the constructor of named tuples, which is another call in Python.
        return tuple.__new__(RouterOutput, (logits, weights, indices))

    def _all_logits(self, x: Tensor) -> Tensor:
        return self._logits(self._prepare(x), self.kernel_weights(x))

    def _logits(self, x: Tensor, parts: KernelWeights | None) -> Tensor:
        if parts is not None:
            return dispatch.route_logits(x, parts, self.score)
        return self._tempered(self.raw_logits(x))

    def extra_repr(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, num_experts={self.num_experts}"
        if self.selection.family is None:
            return f"{sizes}, top_k={self.top_k}, {self.config}"
        named = {
            field.name: getattr(self.config, field.name)
            for field in dataclasses.fields(self.config)
        }
        own = ", ".join(f"{n}={value!r}" for n, value in named.items() if n not in FAMILY_FIELDS)
        config = f"{type(self.config).__name__}({own})"
        return f"{sizes}, top_k={self.top_k}, {config}, {self.selection}"

    def _tempered(self, logits: Tensor) -> Tensor:
        if self.log_temperature is not None:
            return logits * torch.exp(-self.log_temperature)
        if self.config.temperature == 1.0:
            return logits
        return logits / self.config.temperature

    def _prepare(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"x must have hidden_size={self.hidden_size} as its last dimension; "
                f"got shape {tuple(x.shape)}"
            )
        return x if x.dim() == 2 else x.reshape(-1, self.hidden_size)

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """Return the wider of config.dtype and the dtype of x."""
        dtype = self._dtype
        if x.dtype is not dtype and not x.is_floating_point():
            raise ValueError(f"x must have a floating-point dtype; got {x.dtype}")
        return dtype if x.dtype is dtype else torch.promote_types(dtype, x.dtype)


R = TypeVar("R", bound=type[Router])


def register_router(name: str, **fixed: Any) -> Callable[[R], R]:
    """Class decorator: make a Router subclass available as ``name``.

    The class needs an attribute ``Config``, a frozen dataclass derived from RouterConfig.
    ``fixed`` are fields of that dataclass that the name decides: one class can carry several names.
    Raises ValueError if another class holds the name.
    """

    def register(cls: R) -> R:
        taken = ROUTERS.get(name)
        if taken is not None and _place(taken.router) != _place(cls):
            raise InputError(f"router name {name!r} is taken by {taken.router.__name__}")
        ROUTERS[name] = Registered(cls, cls.Config, fixed)
        return cls

    return register


def _place(cls: type) -> tuple[str, str]:
    """Place of a class; one that is defined again, as in a notebook, replaces the first."""
    return cls.__module__, cls.__qualname__


def build_router(
    kind: str | RouterConfig,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    **options: Any,
) -> Router:
    """Build a router from a name and options, or from a configuration.

    ``build_router("l2r_sips", hidden_size=2048, num_experts=64, top_k=8, rank=2, heads=16)``

    Parameters are float32, also under a half-precision default dtype, or float64 under that one.

    Raises ValueError that names the field, the value and what is allowed.
    """
    config = make_config(kind, **options) if isinstance(kind, str) else kind
    if options and not isinstance(kind, str):
        config = dataclasses.replace(config, **options)
    router_class = registered(config.kind).router
    with _at_least_float32(), sizes(), refusals_of(router_class):
        return router_class(config, hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)


@contextmanager
def _at_least_float32() -> Iterator[None]:
    """Set a default dtype no narrower than float32 inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(default, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _inside(holders: Iterable[nn.Module], run: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """Call ``run(x, *rest)`` inside the forward of each holder."""

    def inner(x: Tensor) -> Any:
        return run(x, *rest)

    for holder in holders:
        inner = partial(holder, run=inner)
    return inner(x)


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in a dtype; half a microsecond less than ``to`` where it has it already."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def truncated_normal(weight: Tensor, std: float) -> None:
    """OLMoE's initial weights: normal, cut at three standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-3 * std, b=3 * std)


def constrain(model: nn.Module) -> None:
    """Restore the constraint of every Router inside ``model``; call it after each optimizer step.

    Our training loop, ``add_router_losses`` and joint training of an upcycled model call it. It
    changes parameters in place, whole or sharded by FSDP2, which a forward must not do.
    """
    for module in model.modules():
        if isinstance(module, Router):
            module.constrain()
