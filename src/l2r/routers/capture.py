"""Record what every router of a model returns, ours or of a supported family.

The routers store nothing: forward hooks do, and in compiled models replaced forwards, which
torch.compile guards. ``observed`` is the one way to see routers in training; ``capture``, the
losses, the bias balancing and the statistics of a step use it.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.imports import MissingExtraError
from l2r.kernels.tracing import in_backward
from l2r.routers.base import Router, RouterOutput
from l2r.routers.model_calls import ModelCall
from l2r.routers.observe import layer_index, routed, unwrapped_model
from l2r.routers.selection_rule import Selection
from l2r.routers.temporary import removing, replaced


@dataclass(frozen=True)
class RouterSite:
    """Place of a router: its module path, the number of its block, and the module, one of ours.

    l2r.hf.swap has those of model families.
    """

    path: str
    layer: int
    router: Any

    @property
    def selection(self) -> Selection:
        """Selection in force here."""
        selection: Selection = self.router.selection
        return selection


See = Callable[[RouterSite, Tensor, RouterOutput, ModelCall], None]


@dataclass
class Captured:
    """Router outputs by module name, one per forward call, in the order of the calls.

    ``calls`` holds the model's call that each output is of, ``sites`` the routers by name, with
    the numbers of their blocks (``layers``). ``inputs`` holds what each router saw (only with
    ``capture(model, inputs=True)``).
    """

    outputs: dict[str, list[RouterOutput]] = field(default_factory=dict)
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    calls: dict[str, list[ModelCall]] = field(default_factory=dict)
    sites: dict[str, RouterSite] = field(default_factory=dict)

    @property
    def layers(self) -> dict[str, int]:
        """Number of the block of every router."""
        return {name: site.layer for name, site in self.sites.items()}

    def logits(self) -> list[Tensor]:
        """Logits [T, N] of every layer, calls after one another."""
        return [output.logits for calls in self.outputs.values() for output in calls]

    def weights(self) -> list[Tensor]:
        """Weights [T, K] of every layer, calls after one another."""
        return [output.weights for calls in self.outputs.values() for output in calls]

    def indices(self) -> list[Tensor]:
        """Return indices [T, K] of every layer, calls after one another."""
        return [output.indices for calls in self.outputs.values() for output in calls]

    def masks(self) -> list[Tensor | None]:
        """Tokens [T] that are no padding, for every layer as ``logits``; None where all are."""
        return [
            call.real(len(output.logits))
            for name, calls in self.outputs.items()
            for call, output in zip(self.calls[name], calls, strict=True)
        ]

    def model_calls(self) -> list[ModelCall]:
        """List the calls of the model in their order, each one once."""
        return list({id(call): call for calls in self.calls.values() for call in calls}.values())

    def by_call(self, name: str, values: Any) -> dict[int, Any]:
        """Return what was given for the calls, by their ``id``: one tensor, or one for each.

        Raises ValueError, with the ``name``, where they are not as many as the calls.
        """
        calls = self.model_calls()
        given = [values] if isinstance(values, Tensor) else list(values)
        if len(given) != len(calls):
            raise InputError(
                f"{name} must be a tensor for each of the {len(calls)} calls that were captured, "
                f"in a list; got {len(given)}"
            )
        return {id(call): value for call, value in zip(calls, given, strict=True)}

    def rankings(self) -> list[Tensor]:
        """Scores [T, N] of every layer by which experts were chosen; see ``Selection.ranking``."""
        return [
            self.sites[name].selection.ranking(self.sites[name].router, output.logits)
            for name, calls in self.outputs.items()
            for output in calls
        ]

    def heads(self) -> list[int]:
        """Anchors per expert of every layer, 1 for a family's own, calls after one another."""
        return [
            getattr(self.sites[name].router, "heads", 1)
            for name, calls in self.outputs.items()
            for _ in calls
        ]

    def add(self, site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        """Keep one output."""
        self.outputs.setdefault(site.path, []).append(output)
        self.calls.setdefault(site.path, []).append(call)


@contextmanager
def capture(model: nn.Module, *, inputs: bool = False) -> Iterator[Captured]:
    """Record the RouterOutput of every router inside ``model`` during the ``with`` block.

    ``model`` has routers of ours, swapped ones, or those of a supported family, whose logits,
    weights and experts are what the family's block gets from them. Outputs keep their graph, so
    losses computed from them train the routers. Layers that non-reentrant activation checkpointing
    runs again are not recorded again. Calls of other threads are not recorded. A compiled model
    is passed compiled: torch compiles anew for each further call in a block of a model with
    compiled parts, whose lists have another length.

    Raises ValueError for a model without routers of ours or of a supported family, and in training
    with reentrant checkpointing, under which the logits carry no gradient.
    """
    record = Captured()

    def keep(site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        record.add(site, x, output, call)
        if inputs:
            record.inputs.setdefault(site.path, []).append(x.detach())

    sites = sites_of(model)
    record.sites = {site.path: site for site in sites}
    if model.training and torch.is_grad_enabled():
        refuse_reentrant(model)
    with observed(model, keep, sites=sites):
        yield record


def sites_of(model: nn.Module) -> list[RouterSite]:
    """Routers that run in a model, ours or of a supported family, in the order of the model.

    A family's own can be there only where transformers is imported. Raises ValueError where there
    is none.
    """
    inner = unwrapped_model(model)
    own: list[RouterSite] = [
        RouterSite(name, layer_index(name), module)
        for name, module in inner.named_modules()
        if isinstance(module, Router)
    ]
    if "transformers" in sys.modules:  # this room stands below hf/, and does without it
        try:
            return list(import_module("l2r.hf.swap").observed_sites(inner))
        except MissingExtraError:  # an older one, that something else has imported
            pass
    if not own:
        raise InputError(f"{type(inner).__name__} contains no router of l2r or of a known family")
    return own


def refuse_reentrant(model: nn.Module) -> None:
    """Raise ValueError where reentrant checkpointing is on: logits would carry no gradient."""
    for module in model.modules():
        values = vars(module)
        if values.get("gradient_checkpointing") and is_reentrant(module):
            raise InputError(
                "router outputs carry no gradient under reentrant activation checkpointing; enable "
                "it with {'use_reentrant': False}"
            )


def is_reentrant(module: nn.Module) -> bool:
    """Tell whether the checkpointing function that transformers gave a module is reentrant."""
    function = getattr(module, "_gradient_checkpointing_func", None)
    if function is None:
        return False
    function = inspect.unwrap(function)  # replay puts its own around it
    keywords = function.keywords if isinstance(function, partial) else {}
    return keywords.get("use_reentrant", True) is not False


@contextmanager
def observed(
    model: nn.Module, see: See, *, sites: list[RouterSite] | None = None
) -> Iterator[None]:
    """Pass every output of every router to ``see`` inside the block, with the call it is of.

    ``model`` may be compiled or wrapped by DDP. What a backward pass runs again is not seen, nor
    are calls of other threads. Raises ValueError as ``sites_of``, and for DataParallel, whose
    copies run in other threads.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise InputError(
            "DataParallel runs copies of the model in threads, where its routers are not seen; "
            f"start one process per GPU (torchrun); got device_ids={model.device_ids}"
        )
    found = sites_of(model) if sites is None else sites
    watch = _Watch(see, threading.get_ident())
    inner, outer = unwrapped_model(model), _compiled_wrapper(model)
    compiled = outer is not None or any(_is_compiled(part) for part in inner.modules())
    # Loops that compute logits by themselves call the model inside a causal language model.
    called = _called(inner)[:1] if compiled else _called(inner)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watch.begin(inner if module is outer else module, args, kwargs)

    handles: dict[Any, nn.Module] = {}
    for module in called if outer is None else [outer]:
        handles[module.register_forward_pre_hook(begin, with_kwargs=True)] = module
        handles[module.register_forward_hook(watch.end, always_call=True)] = module
    forwards: dict[tuple[nn.Module, str], Any] = {}
    for site in found:
        if compiled:
            forwards[(site.router, "forward")] = watch.noting(site)
        else:
            hook = site.router.register_forward_hook(watch.hook(site), with_kwargs=True)
            handles[hook] = site.router
    with removing(handles), replaced(forwards):
        try:
            yield
        finally:
            watch.is_open = False


class _Watch:
    """The running call of a model, and where outputs go.

    traced: outputs of a compiled call, which are passed on after it, outside of its graph. depth:
    models that are running, each inside the one before.
    """

    def __init__(self, see: See, thread: int) -> None:
        self.see, self.thread = see, thread
        self.call, self.depth = ModelCall(), 0
        self.traced: list[tuple[RouterSite, Tensor, RouterOutput]] = []
        self.is_open, self.without_values = True, False

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.is_here():
            return
        self.depth += 1
        if self.depth == 1:
            self.call = ModelCall.of(model, args, kwargs)
            given = (part for part in (*args, *kwargs.values()) if isinstance(part, Tensor))
            self.without_values = any(part.is_meta for part in given)

    def end(self, *_: Any) -> None:
        if not self.is_here():
            return
        self.depth -= 1
        if not self.depth:
            for site, x, output in self.traced:
                self.see(site, x, output, self.call)
            self.traced.clear()
            self.call = ModelCall()

    def is_here(self) -> bool:
        return not in_backward() and threading.get_ident() == self.thread

    def hook(self, site: RouterSite) -> Callable[..., None]:
        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
        ) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            # shard_routers tries a router without values; a model may run without them, too
            if self.is_here() and (self.without_values or not x.is_meta):
                self.see(site, x, _as_output(module, output), self.call)

        return hook

    def noting(self, site: RouterSite) -> Callable[..., Any]:
        router = site.router
        forward = router.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                if self.is_open:
                    x = args[0] if args else next(iter(kwargs.values()))
                    self.traced.append((site, x, _as_output(router, output)))
            elif self.is_open and self.is_here():
                x = args[0] if args else next(iter(kwargs.values()))
                self.see(site, x, _as_output(router, output), self.call)
            return output

        return noting


def _as_output(router: nn.Module, output: Any) -> RouterOutput:
    return output if isinstance(output, RouterOutput) else RouterOutput(*routed(router, output))


def _called(model: nn.Module) -> list[nn.Module]:
    """Return models of transformers, from the outermost on, which are called with masks."""
    return [m for m in model.modules() if hasattr(m, "get_input_embeddings")] or [model]


def _compiled_wrapper(model: nn.Module) -> nn.Module | None:
    """Return the wrapper of torch.compile around a model, which is called outside of the graph."""
    while model is not None:
        if hasattr(model, "_orig_mod"):
            return model
        inner = getattr(model, "module", None)
        if not isinstance(inner, nn.Module) or next(model.children()) is not inner:
            return None
        model = inner
    return None


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or vars(module).get("_compiled_call_impl") is not None
