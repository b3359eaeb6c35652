"""What the routers of a model choose in a call of it.

Shape letters: T inputs of a router, L layers with a router, K experts chosen per token.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.models.layouts import unpack_before_calls
from l2r.hf.routes.backward_pass import in_backward, outside_of_graphs
from l2r.hf.routes.layers import RoutedLayer, fingerprint_of, routed_layers
from l2r.routers.observe import routed


class _Chosen:
    """Choice of a layer's router in the running call."""

    indices: Tensor | None = None
    weights: Tensor | None = None


class Choices:
    """Experts that each router of a model chooses in one call.

    ``forwards`` are put in the place of the routers' own, see ``replaced``. weights: note those of
    the experts too. Raises ValueError for a model without routers of ours or of a supported family.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, *, weights: bool = False) -> None:
        unpack_before_calls(model)
        self._layers = routed_layers(model)
        self.fingerprint = fingerprint_of(model, tokenizer, layers=self._layers)
        self._notes_weights = weights
        self._chosen = [_Chosen() for _ in self._layers]
        self._open = False
        self._caller = 0  # thread of the running call
        self._ended = False  # the block, whose functions later blocks may still call

    def forwards(self) -> dict[tuple[nn.Module, str], Callable[..., Any]]:
        """A forward that notes its choice for every router."""
        pairs = zip(self._layers, self._chosen, strict=True)
        return {
            (site.router, "forward"): self._noting(layer, site.router, chosen)
            for layer, chosen in pairs
            for site in layer.sites
        }

    @outside_of_graphs
    def begin(self) -> None:
        """A call of the model begins: forget what was chosen before.

        Raises ValueError while a call of another thread runs.
        """
        if self._open and self._caller != threading.get_ident():
            raise InputError(
                "a recorded model is called by one thread at a time; another thread's call runs"
            )
        self._caller = threading.get_ident()
        for chosen in self._chosen:
            chosen.indices = chosen.weights = None
        self._open = True

    @outside_of_graphs
    def close(self) -> None:
        """The call is over, whether it succeeded or not."""
        if self._caller == threading.get_ident():
            self._open = False

    def end(self) -> None:
        """The block is over: functions that later blocks keep alive note nothing."""
        self._open, self._ended = False, True

    def experts(self) -> Int[Tensor, "T L K"]:
        """Experts of the whole call, uint8 up to 256 of them and int32 above.

        Raises ValueError where a layer's router was not called.
        """
        small = torch.uint8 if self.fingerprint.num_experts <= 256 else torch.int32
        return self._stacked("indices").to(small)

    def weights(self) -> Float[Tensor, "T L K"]:
        """Weights of the experts' outputs, where noted. Raises ValueError as ``experts``."""
        return self._stacked("weights")

    def _stacked(self, name: str) -> Tensor:
        parts: list[Tensor] = []
        for layer, chosen in zip(self._layers, self._chosen, strict=True):
            part = getattr(chosen, name)
            if part is None:
                raise InputError(
                    f"the router of layer {layer.layer} ({layer.sites[0].path}) was not called"
                )
            parts.append(part)
        return torch.stack([part.to(parts[0].device) for part in parts], dim=1)

    def _noting(self, layer: RoutedLayer, router: nn.Module, chosen: _Chosen) -> Callable[..., Any]:
        forward = router.forward

        def noting(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if self._open:
                _, weights, indices = routed(router, output)
                if chosen.indices is not None:
                    raise InputError(
                        f"the router of layer {layer.layer} was called twice in a call: its layers "
                        "run in a loop, and a token has no single route"
                    )
                chosen.indices = indices.detach()
                if self._notes_weights:
                    chosen.weights = weights.detach()
            elif not self._ended:
                _check_recomputed(layer)
            return output

        return noting


@outside_of_graphs
def _check_recomputed(layer: RoutedLayer) -> None:
    if not in_backward():
        raise InputError(
            f"the router of layer {layer.layer} ran outside of a call of the model that is "
            "recorded; pass the model that is called to record, compiled where it is"
        )
