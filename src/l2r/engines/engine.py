"""Code that all engines share: the versions tried, the router, its selection, another model's."""

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from l2r.errors import InputError
from l2r.routers import Router, RouterConfig, build_router
from l2r.routers.selection_rule import Selection
from l2r.versions import TRIED, check_version

ENGINES = ("ai2-olmo-core", "megatron-core", "torchtitan")  # distributions


def require(package: str) -> None:
    """Check that an engine is installed; one newer than the versions tried gets a warning.

    Raises ImportError where it is missing or too old.
    """
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        oldest, _, extra = TRIED[package]
        raise ImportError(
            f"l2r needs {package}>={oldest}; none is installed: pip install 'l2r-moe[{extra}]'"
        ) from None
    check_version(package, installed)


def engine_router(values: Mapping[str, Any], **sizes: int) -> Router:
    """Our router for an engine that asks it for logits and selects by itself.

    Raises ValueError for what needs more of an engine than that.
    """
    config: Any = RouterConfig.from_dict(values)
    if getattr(config, "anchor_norm", None) is not None:
        raise InputError(
            "anchor_norm must be None in an engine, which calls no router after an optimizer "
            f"step; got anchor_norm={config.anchor_norm}"
        )
    if getattr(config, "query_norm", None) == "batchnorm":
        raise InputError(
            "query_norm must be rmsnorm or none in an engine, whose ranks do not all meet in a "
            "layer to share a batch statistic; got query_norm='batchnorm'"
        )
    router = build_router(config, **sizes)
    router.lift_scalars()
    return router


@contextmanager
def own_stream(seed: int | None = None) -> Iterator[None]:
    """Draw from another random stream on the CPU, so that models differ in their routers alone.

    ``seed`` is one number of the common stream by default; that stream goes on where it was.
    """
    with torch.random.fork_rng(devices=[]):
        drawn = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        torch.default_generator.manual_seed(drawn)
        yield


class Plug:
    """A router whose parameters are those of an engine's module, which cuts and gathers them.

    The router itself is a template without storage. ``parameters`` are its names, with
    underscores for dots, and shapes. Ranks that build the same model draw the same router.
    """

    def __init__(self, values: Mapping[str, Any], *, seed: int | None = None, **sizes: int) -> None:
        self._build = partial(engine_router, values, **sizes)
        # One number of the common stream, which engines keep alike on all ranks.
        self._seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        with torch.device("meta"):
            self.router = self._build()
        self._logits = _Logits(self.router)
        # A selection bias, which would be the engine's, is no parameter.
        self.names = {name.replace(".", "_"): name for name, _ in self.router.named_parameters()}
        self.parameters = {
            flat: self.router.get_parameter(name).shape for flat, name in self.names.items()
        }

    def reseed(self, seed: int, layer: int) -> None:
        """Draw from now on by an engine's seed and the layer, however the model was built."""
        self._seed = (seed + 0x9E3779B97F4A7C15 * (layer + 1)) % 2**63

    def draw(self) -> dict[str, Tensor]:
        """Draw initial parameters by name, whole and on the CPU."""
        with own_stream(self._seed), torch.device("cpu"):
            fresh = self._build()
        return {flat: fresh.get_parameter(name).detach() for flat, name in self.names.items()}

    def logits(self, x: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Logits [..., N] of x [..., D], from this rank's ``values`` of the parameters."""
        named = {
            f"router.{self.names[flat]}": value.view(self.parameters[flat])
            for flat, value in values.items()
        }
        logits: Tensor = functional_call(self._logits, named, (x,))
        return logits.view(*x.shape[:-1], self.router.num_experts)


class _Logits(nn.Module):
    """Router whose forward returns only logits, since functional_call calls no other method."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router

    def forward(self, x: Tensor) -> Tensor:
        return self.router.logits(x)


def selecting_as(router: Router, rule: Selection) -> RouterConfig:
    """Return the configuration with which ``router`` alone selects as an engine did.

    ``rule.bias`` is not None where the engine balances by a selection bias; a router that has none
    gets one, ``selection_bias``. Raises ValueError where no setting of this router selects so.
    """
    fields = {field.name for field in dataclasses.fields(router.config)}
    wanted = {"normalize_weights": rule.normalize, "gate": rule.gate, "scale": rule.scale}
    config: RouterConfig = dataclasses.replace(
        router.config, **{name: value for name, value in wanted.items() if name in fields}
    )
    if rule.bias is not None and _selection(config, router).bias is None:
        config = dataclasses.replace(config, selection_bias=True)
    own = _selection(config, router)
    same = dataclasses.replace(own, norm_eps=0.0, norm_min=0.0, bias=rule.bias) == rule
    if not same or (rule.bias is not None and own.bias is None):
        raise InputError(
            f"no {config.kind} router selects by itself as the engine does, so a checkpoint "
            f"would route otherwise; got {rule} from the engine, {own} from the router"
        )
    return config


def _selection(config: RouterConfig, router: Router) -> Selection:
    """Rule by which a router of ``config`` with the sizes of ``router`` selects."""
    sizes = {name: getattr(router, name) for name in ("hidden_size", "num_experts", "top_k")}
    with torch.device("meta"):
        return build_router(config, **sizes).selection


def check_sizes(config: Any, sizes: Mapping[str, Any]) -> None:
    """Raise InputError where a Hugging Face configuration differs from an engine's ``sizes``."""
    for name, value in sizes.items():
        found = getattr(config, name, None)
        if isinstance(value, Mapping):
            found = {key: (found or {}).get(key) for key in value}
        if found != value:
            raise InputError(
                f"both models must have the same {name}; got {found} in the Hugging Face model "
                f"and {value} in the engine's"
            )


def check_router(model: Any, config: RouterConfig, *, family: bool = False) -> None:
    """Raise InputError where a Hugging Face model's routers compute otherwise than an engine's.

    Equal tensors do not tell: l2r_dot has those of l2r_sips. A selection bias is a tensor.
    ``family``: the family's selection is in force in the engine, too.
    """
    router = next((m for m in model.modules() if isinstance(m, Router)), None)
    if router is None:
        return
    theirs: Any = router.config
    if not family and router.selection.family is not None:
        theirs = dataclasses.replace(theirs, normalize_weights=router.selection.normalize)
    own, found = config.to_dict(), theirs.to_dict()
    names = (own.keys() | found.keys()) - {"init_std", "selection_bias"}
    for name in sorted(names, key=lambda name: name != "kind"):
        if own.get(name) != found.get(name):
            raise InputError(
                f"both models must have the same router; got {name}={found.get(name)} in the "
                f"Hugging Face model and {own.get(name)} in the engine's"
            )
