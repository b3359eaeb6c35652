"""The routes of a forward pass, taken again where activation checkpointing runs a layer again.

A recomputed layer sees inputs that may differ by rounding (other kernels, autocast, noise), and a
token near a tie then takes other experts: its gradient is of another function, or the checkpoint
fails, since the experts have other numbers of tokens.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.routes.backward_pass import next_number, running_number
from l2r.hf.routes.layers import check_weighable
from l2r.hf.swap import Site, observed_sites
from l2r.kernels.tracing import in_backward
from l2r.routers.capture import refuse_reentrant
from l2r.routers.observe import routed, unwrapped_model
from l2r.routers.temporary import replaced

_KEPT = 16  # calls without a graph of their own, of frozen routers, that may be in flight


def pin_routes(model: nn.Module) -> "RoutePins":
    """Let layers that activation checkpointing runs again take the experts of their forward.

    One line before training, ``pin_routes(model)``, holds until ``stop()`` of what it returns, or
    for a ``with`` block. Experts are fixed; their weights come from the recomputed logits by the
    model's own rule, so that gradients are those of the forward. Micro-batches may be in flight.
    A layer that a compiler recomputes inside its graph needs no pin and gets none.

    Raises ValueError for a model without routers of ours or of a supported family, for a rule that
    cannot weigh given experts, and for reentrant checkpointing, under which a forward leaves no
    graph to find its routes by.
    """
    return RoutePins(model)


class RoutePins:
    """Routes of the forwards whose graphs live, of every router; see ``pin_routes``."""

    def __init__(self, model: nn.Module) -> None:
        inner = unwrapped_model(model)
        refuse_reentrant(inner)
        sites = [site for site in observed_sites(inner) if not site.by_token]
        forwards: dict[Any, Any] = {(site.router, "forward"): _pinned(site) for site in sites}
        for forward in forwards.values():
            forward.pins = self  # kept by the model: a block that nobody keeps would end here
        self._open = ExitStack()
        self._open.enter_context(replaced(forwards))

    def stop(self) -> None:
        """Let routers choose by themselves again."""
        self._open.close()

    def __enter__(self) -> "RoutePins":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Pin:
    """Experts [T, K] of one call, and the number that the next node of the graph had then."""

    def __init__(self, experts: Tensor, number: int) -> None:
        self.experts, self.number = experts, number


class _Pins:
    """Pins of one router: they live as long as the graph of their call."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._alive: list[ref[_Pin]] = []
        self._frozen: deque[_Pin] = deque(maxlen=_KEPT)

    def keep(self, experts: Tensor, logits: Tensor, number: int) -> None:
        """Note a forward; ``logits`` belong to its graph."""
        pin = _Pin(experts, number)
        if logits.grad_fn is None:
            self._frozen.append(pin)
        else:
            node: Any = logits.grad_fn
            node.metadata["l2r.pin"] = pin
        self._alive = [one for one in self._alive if one() is not None]
        self._alive.append(ref(pin))

    def of_running_node(self, tokens: int) -> Tensor:
        """Experts of the forward that is run again: the last that began before the running node.

        Raises ValueError where there is none.
        """
        number = running_number() + 1
        pins = (pin for one in reversed(self._alive) if (pin := one()) is not None)
        found = next((pin for pin in pins if pin.number <= number), None)
        if found is None or len(found.experts) != tokens:
            raise InputError(
                f"the router of layer {self.site.layer} is run again for a forward whose routes "
                "were not pinned; call pin_routes before the forward, and enable activation "
                "checkpointing with {'use_reentrant': False}"
            )
        return found.experts


def _pinned(site: Site) -> Callable[..., Any]:
    router, forward, selection = site.router, site.router.forward, check_weighable(site)
    pins = _Pins(site)

    def pinned(*args: Any, **kwargs: Any) -> Any:
        again = not torch.compiler.is_compiling() and in_backward()
        if torch.compiler.is_compiling() or not (again or torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        number = 0 if again else next_number()
        output = forward(*args, **kwargs)
        logits, weights, own = routed(router, output)
        if again:
            experts = pins.of_running_node(len(own)).to(own)
        else:
            experts = own.detach()
            pins.keep(experts, logits, number)
        # The same operations in both, since the checkpoint compares what they save. Weights of
        # the router itself where it chose the same: equal to the bit.
        same = (experts == own).all(dim=1, keepdim=True)
        live = selection.weigh(router, logits, experts).to(weights.dtype)
        values = (logits, torch.where(same, weights, live), experts)
        return type(output)(*values) if hasattr(output, "_fields") else values

    return pinned
