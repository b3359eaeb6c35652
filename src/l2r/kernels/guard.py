"""Verify a backend against plain code before first use; else fall back to torch code.

A GPU's kernels are compiled on the machine that runs them. Before the first call of a kind (device,
dtypes, all sizes but the number of tokens: what kernels are compiled for) the same kernels run
forward and backward on a few fixed tokens. torch code replaces them, with one warning per process,
where they do not compile, do not fit, or differ from plain code in float64 by more than sqrt(eps)
of the dtype: far above rounding and far below a wrong result. Gradients are not compared where
they cancel to nothing in every arithmetic: a vector of one number has one direction.

The comparison runs in a separate thread, without autocast, modes, default device or compiler of
the caller, and with its own random numbers. Traced and fake calls never get here; captured calls
are not compared. ``L2R_GUARD=off`` skips all of it.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from l2r._version import __version__
from l2r.functional import expert_weights, routing_probs
from l2r.kernels import plain
from l2r.kernels.contract import INPUTS, Backend, Options, Tensors, first_input, sizes_of

_TOKENS = 17  # two blocks of the widest kernels, the second nearly empty
_BY_TOKEN = {"x", "logits"}
_MIN_SCALE = 0.1  # gradients are near 1: a largest one below this is rounding alone


class KernelVerdict(NamedTuple):
    """Outcome of a comparison.

    reason: cause of a fallback, empty where kernels are used. error: largest error over its limit.
    seconds: duration of the comparison.
    """

    reason: str = ""
    error: float = 0.0
    seconds: float = 0.0


verdicts: dict[tuple[object, ...], KernelVerdict] = {}  # of this process, by kind of call


class Guarded:
    """Backend that uses the kernels of ``load`` if they agree with plain code, else ``instead``."""

    def __init__(self, load: Callable[[], Backend], instead: Backend) -> None:
        self.load, self.instead = load, instead

    def forward(self, given: Tensors, options: Options) -> Tensors:
        kind = _kind(given, options, routed=given.routes is not None)
        if kind not in verdicts and not _capturing(first_input(given)):
            first = not any(known.reason for known in verdicts.values())
            verdicts[kind] = verdict = _judge(self.load, given, options)
            if verdict.reason and first:
                warnings.warn(_message(verdict.reason, given), RuntimeWarning, stacklevel=2)
        return self._chosen(kind).forward(given, options)

    def backward(self, tensors: Tensors, up: Tensors, options: Options) -> Tensors:
        # Routes are not kept for it, so that it may be of either forward.
        kinds = (_kind(tensors, options, routed=routed) for routed in (False, True))
        return self._chosen(*kinds).backward(tensors, up, options)

    def _chosen(self, *kinds: tuple[object, ...]) -> Backend:
        wrong = any(verdicts.get(kind, KernelVerdict()).reason for kind in kinds)
        return self.instead if wrong else self.load()


def compare(kernels: Backend, like: Tensors, options: Options) -> KernelVerdict:
    """Compare kernels with plain code on fixed tokens of the sizes and dtypes of ``like``."""
    start, draws = time.perf_counter(), torch.Generator().manual_seed(0)
    device = first_input(like).device

    def draw(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=draws, device="cpu").to(device, dtype)

    given, routes = {}, None
    for name, tensor in zip(Tensors._fields[:INPUTS], like, strict=False):
        if name == "routes" and tensor is not None:
            order = torch.rand(_TOKENS, sizes_of(like).experts, generator=draws).argsort(dim=1)
            routes = order[:, : options.top_k].contiguous().to(device)
            routes[::3] = -1  # these choose
        elif tensor is not None:
            tokens = [_TOKENS] if name in _BY_TOKEN else []
            given[name] = draw(torch.Size([*tokens, *tensor.shape[len(tokens) :]]), tensor.dtype)
    if "weight" in given:
        given["weight"] /= given["weight"].shape[1] ** 0.5  # queries near 1
    exact = {name: tensor.double().cpu().requires_grad_() for name, tensor in given.items()}

    done = kernels.forward(Tensors(**given, routes=routes), options._replace(save=True))
    expected = _plain(Tensors(**exact, routes=routes), options, done.indices)
    best = expected.pop("best", None)
    up = {n: draw(value.shape, getattr(done, n).dtype) for n, value in expected.items()}
    grads = kernels.backward(done, Tensors(**up), options._replace(need_x=True))
    exact_up = [up[name].double().cpu() for name in expected]
    exact_grads = torch.autograd.grad(list(expected.values()), list(exact.values()), exact_up)

    pairs = [(getattr(done, name), value) for name, value in expected.items()]
    if not _cancel(like, options):
        pairs += zip([getattr(grads, name) for name in exact], exact_grads, strict=True)
    if best is not None:
        pairs.append((done.weights, best))
    computed = [tensor.dtype for name, tensor in given.items() if name != "x"]
    error = max(_error(actual, value, computed) for actual, value in pairs)
    reason = "" if error <= 1 else f"differs from plain code by {error:.1g} times the limit"
    return KernelVerdict(reason, error, time.perf_counter() - start)


def _cancel(given: Tensors, options: Options) -> bool:
    """Tell whether gradients are zero but for rounding, whose size says nothing of the kernels."""
    sizes = sizes_of(given)
    normed = options.score.scoring != "dot" and given.anchors is not None
    return (normed and 1 in (sizes.rank, sizes.hidden)) or (
        given.gain is not None and sizes.hidden == 1
    )


def _plain(given: Tensors, options: Options, chosen: Tensor | None) -> dict[str, Tensor]:
    """Return results by name; weights of the ``chosen`` experts, since equals have two orders."""
    logits, results = given.logits, {}
    if given.x is not None and given.weight is not None and given.anchors is not None:
        weights = (given.weight, given.gain, given.anchors)
        logits = results["logits"] = plain.route_logits(given.x, weights, options.score)
    if chosen is not None and logits is not None:
        rule: Any = {"normalize": options.normalize}
        results["weights"] = expert_weights(routing_probs(logits), chosen.cpu(), **rule)
        routes = None if given.routes is None else given.routes.cpu()
        best, _ = plain.softmax_top_k(logits.detach(), options.top_k, routes=routes, **rule)
        results["best"] = best
    return results


def _error(actual: Tensor | None, expected: Tensor, computed: list[torch.dtype]) -> float:
    """Return the largest difference over the largest expected entry and its limit; NaN is inf."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    expected = expected.detach()
    gap = (actual.double().cpu() - expected).abs().max() / expected.abs().max().clamp_min(
        _MIN_SCALE
    )
    limit = max(torch.finfo(dtype).eps for dtype in (actual.dtype, *computed)) ** 0.5
    return float(torch.nan_to_num(gap, nan=float("inf"))) / limit


def _judge(load: Callable[[], Backend], given: Tensors, options: Options) -> KernelVerdict:
    wanted = os.environ.get("L2R_GUARD", "on")
    if wanted not in ("on", "off"):
        raise ValueError(f"L2R_GUARD must be on or off; got {wanted!r}")
    if wanted == "off":
        return KernelVerdict()
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(compare, load(), given, options).result()
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernels
    except Exception as problem:  # whatever a compiler or a driver raises
        return KernelVerdict(f"{type(problem).__name__}: {problem}".split("\n", 1)[0])


def _message(reason: str, given: Tensors) -> str:
    device, triton = first_input(given).device, "none"
    with contextlib.suppress(metadata.PackageNotFoundError):
        triton = metadata.version("triton")
    card = str(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        card = f"{device}, {torch.cuda.get_device_name(device)}, capability {major}.{minor}"
    return (
        f"the router's Triton kernels are not used, torch code runs instead, slower: {reason} "
        f"(l2r {__version__}, torch {torch.__version__}, triton {triton}, {card}, "
        f"T D R N H {list(sizes_of(given))}). Please report this line with the output of "
        f"l2r doctor --json. L2R_GUARD=off uses the kernels all the same"
    )


def _kind(tensors: Tensors, options: Options, *, routed: bool) -> tuple[object, ...]:
    """Return what kernels are compiled for, with or without routes."""
    first, t = first_input(tensors), tensors
    parameters = (t.weight, t.gain, t.anchors)
    dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
    sizes = sizes_of(tensors)._replace(tokens=0)
    rule = (options.score.scoring, options.top_k, options.normalize, routed)
    return (first.device, first.dtype, *dtypes, *sizes, *rule)


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
