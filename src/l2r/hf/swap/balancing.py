"""Loss-free balancing in any loop: selection biases move against the load (arXiv 2408.15664)."""

import math
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from l2r.errors import InputError
from l2r.hf.swap.sites import bias_places
from l2r.routers import RouterOutput, StepLoads, update_selection_bias
from l2r.routers.capture import RouterSite, observed
from l2r.routers.model_calls import ModelCall
from l2r.routers.observe import unwrapped_model

_RUNNING: WeakSet[nn.Module] = WeakSet()  # models whose biases are moved


def moves_biases(model: nn.Module) -> bool:
    """Tell whether ``bias_balancing`` of a model is open, in a loop or a trainer."""
    return unwrapped_model(model) in _RUNNING


def bias_balancing(model: nn.Module, speed: float = 0.001) -> "BiasBalancing":
    """Count the experts' loads in training from here on; ``step()`` moves the selection biases.

    ``balancing = bias_balancing(model)`` before the loop, ``balancing.step()`` after each
    ``optimizer.step()``, ``balancing.stop()`` after the loop, or a ``with`` block around it.
    Every family with a selection bias is balanced, wherever the bias is held, and routers of ours
    with ``selection_bias``. An expert above the mean load loses ``speed`` (in units of the scores),
    one below it gains as much. Loads are those of all calls with gradients since the last step,
    without padding, over all ranks.

    Biases in half precision become float32 here, so that no update is lost, and are saved so. They
    are tensors of the model: its checkpoints hold them, and loading one restores them.

    Raises ValueError for a model without a selection bias, with the two remedies, for one whose
    biases are sharded in half precision or offloaded, and for a speed that is not > 0.
    """
    return BiasBalancing(model, speed)


class BiasBalancing:
    """Selection biases of a model, and the loads since the last step; see ``bias_balancing``."""

    def __init__(self, model: nn.Module, speed: float) -> None:
        if not 0 < speed < math.inf:
            raise InputError(f"speed must be > 0 and finite; got speed={speed}")
        inner: Any = unwrapped_model(model)
        self.speed, self._model = speed, inner
        self._places = bias_places(inner)
        if not self._places:
            kind = getattr(getattr(inner, "config", None), "model_type", type(inner).__name__)
            raise InputError(
                f"{kind!r} has no selection bias to move. Balance it by a loss (add_router_losses, "
                "or l2r.router_losses in a loop of your own), or give it routers with a bias: "
                "swap_routers(model, L2RConfig(selection_bias=True), selection='router')"
            )
        for path, bias in self.biases.items():
            _lift(path, bias)
        self._last: StepLoads | None = None
        self._open = ExitStack()
        self.start(model)

    @property
    def biases(self) -> dict[str, Tensor]:
        """Biases by the paths of their routers, as the modules hold them now."""
        return {path: getattr(holder, name) for path, (holder, name) in self._places.items()}

    def start(self, model: nn.Module) -> None:
        """Count from here on, in another wrapper of the same model too."""
        self._open.close()
        self._loads = self._none()  # without a step that an exception ended
        self._open.enter_context(observed(model, self._see))
        _RUNNING.add(self._model)

    def stop(self) -> None:
        """Count no more; the model is left without hooks."""
        self._open.close()
        _RUNNING.discard(self._model)

    def __enter__(self) -> "BiasBalancing":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @torch.no_grad()
    def step(self) -> None:
        """Move the biases by the loads since the last step, which all ranks call together."""
        self._last, self._loads = self._loads.over_ranks(), self._none()
        for path, bias in self.biases.items():
            counts = self._last.counts[path].to(bias.device)
            if isinstance(bias, DTensor):
                whole = bias.full_tensor()
                update_selection_bias(whole.view(-1), counts, speed=self.speed)
                bias.copy_(distribute_tensor(whole, bias.device_mesh, bias.placements))
            else:
                update_selection_bias(bias.data.view(-1), counts, speed=self.speed)

    def numbers(self) -> dict[str, float]:
        """Numbers for a log: of the last step's loads, largest over mean, and of the biases.

        ``bias_balancing/max_over_mean`` is the mean over layers, ``bias_balancing/bias_span`` the
        largest difference between two biases of a layer. Empty before the first step.
        """
        if self._last is None:
            return {}
        peaks = [c.max() * len(c) / c.sum().clamp_min(1) for c in self._last.counts.values()]
        spans = [_whole(bias).max() - _whole(bias).min() for bias in self.biases.values()]
        return {
            "bias_balancing/max_over_mean": float(sum(float(peak) for peak in peaks) / len(peaks)),
            "bias_balancing/bias_span": max(float(span) for span in spans),
        }

    def _none(self) -> StepLoads:
        """No loads yet, of every router, so that all ranks reduce alike."""
        loads = StepLoads()
        for path, bias in self.biases.items():
            loads.counts[path] = torch.zeros(bias.numel(), dtype=torch.int64, device=bias.device)
            loads.tokens[path] = torch.zeros((), dtype=torch.int64, device=bias.device)
        return loads

    def _see(self, site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        if call.gradients and site.path in self._places:
            self._loads.add(site, x, output, call)


def _lift(path: str, bias: Tensor) -> None:
    if bias.is_meta:
        raise InputError(f"the selection bias of {path} is offloaded; keep it in memory to move it")
    if bias.dtype.itemsize >= 4:
        return
    if isinstance(bias, DTensor):
        raise InputError(
            f"the selection bias of {path} is sharded in {bias.dtype}, in which updates are lost; "
            "call bias_balancing before fully_shard, or shard_routers first"
        )
    bias.data = bias.data.float()


def _whole(bias: Tensor) -> Tensor:
    return bias.full_tensor() if isinstance(bias, DTensor) else bias.detach()
