"""An export proves itself: the engine's model and the Hugging Face one give the same logits.

    answer = ask(forward, vocabulary, positions=4096, record=record(model))  # on every rank
    on_first_rank(lambda: compare(answer, made))  # raises on all of them

``prove`` is both for a model on one rank.

Shape letters: S positions, V vocabulary, T = S tokens, N experts, K experts chosen per token.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.hf.models import computing_experts
from l2r.hf.routes import Routes, record, replay, routed_layers
from l2r.hf.swap import Site
from l2r.routers.observe import block_bias, evaluating, hooked

# An engine sums the same numbers in another order, and some of them once more in its own dtype:
# its rounding is that of Hugging Face times a number near 1, the largest of V x S of them too.
MULTIPLE = 8

T = TypeVar("T")


class EngineOutput(NamedTuple):
    """Output of an engine's model: ids [1, S], logits [1, S, V], and the experts that it took.

    dtype: what it computes in.
    """

    ids: Int[Tensor, "1 S"]
    logits: Float[Tensor, "1 S V"]
    routes: Routes | None
    dtype: torch.dtype


def prove(
    forward: Callable[[Tensor], Tensor],
    made: nn.Module,
    *,
    positions: int,
    record: AbstractContextManager[Any] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Raise InputError unless ``made``, a Hugging Face model, gives an engine's logits.

    See ``ask`` and ``compare``. ``forward`` is the engine's model in evaluation mode.
    """
    vocabulary = made.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    compare(ask(forward, vocabulary, positions=positions, record=record, dtype=dtype), made)


@torch.no_grad()
def ask(
    forward: Callable[[Tensor], Tensor],
    vocabulary: int,
    *,
    positions: int,
    record: AbstractContextManager[Any] | None = None,
    dtype: torch.dtype | None = None,
) -> EngineOutput:
    """Run an engine's model on one row of seeded random tokens; every rank of it asks.

    ``forward`` takes ids [1, positions] and returns logits [1, positions, V]. ``record`` is the
    engine's ``record(model)``. dtype: what the model computes in, where its logits have another.
    """
    ids = torch.randint(vocabulary, (1, positions), generator=torch.Generator().manual_seed(0))
    with _undisturbed(), nullcontext() if record is None else record as recorder:
        logits = forward(ids)
        routes = None if recorder is None else recorder.routes()
    return EngineOutput(ids, logits.detach().cpu(), routes, dtype or logits.dtype)


@torch.no_grad()
def compare(answer: EngineOutput, made: Any) -> None:
    """Raise InputError where ``made`` and the engine differ by more than rounding.

    The engine's routes are replayed, so that a near tie is no difference of logits, in the dtype
    of the engine and in float64; the difference of the two is the rounding, of logits and of the
    logits of each router. The engine may be ``MULTIPLE`` times as far from float64, and take other
    experts than a router of ``made`` where so much rounding brings that router to take them.
    Without routes the experts of ``made`` in the dtype of the engine stand for them.

    ``made`` is afterwards what it was: its mode, dtypes, tensors and hooks.
    """
    with _undisturbed(), evaluating(made):
        with _in_dtype(made, answer.dtype):
            routes = answer.routes or _own_routes(made, answer.ids)
            narrow, rough = _run(made, answer.ids, routes)
        with computing_experts(made, "eager"), _in_dtype(made, torch.float64, nudged=True):
            wide, fine = _run(made, answer.ids, routes)
    _check_logits(answer, narrow, wide)
    if answer.routes is not None:
        _check_choices(made, answer.routes, rough, fine, answer.dtype)


def _check_logits(answer: EngineOutput, narrow: Tensor, wide: Tensor) -> None:
    if answer.logits.shape != wide.shape:
        raise InputError(
            f"the Hugging Face model must give logits {list(answer.logits.shape)} as the engine "
            f"does; it gives {list(wide.shape)}"
        )
    largest = float(wide.abs().max())
    rounding = max(float(_apart(narrow, wide).max()), torch.finfo(answer.dtype).eps * largest)
    by_position = _apart(answer.logits, wide)
    worst = int(by_position.argmax())  # of a NaN, where there is one
    difference = float(by_position[worst])
    if not difference <= MULTIPLE * rounding:
        raise InputError(
            f"the Hugging Face model would not be the engine's: at position {worst} of "
            f"{len(by_position)} a logit differs by {difference / largest:.2%} of the largest, and "
            f"rounding is {rounding / largest:.1e} of it; nothing was written"
        )


def _apart(first: Tensor, second: Tensor) -> Float[Tensor, " S"]:
    """Largest difference of logits [1, S, V] at each position; a part of them at a time."""
    parts = zip(torch.split(first[0], 256), torch.split(second[0], 256), strict=True)
    return torch.cat([(a.double() - b.double()).abs().amax(dim=-1) for a, b in parts])


def on_first_rank(work: Callable[[], T]) -> T | None:
    """Run ``work`` on rank 0 and return its result, None elsewhere; every rank calls this.

    An InputError that it raises is raised on every rank, so that none waits for another.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return work()
    result, raised = None, None
    if dist.get_rank() == 0:
        try:
            result = work()
        except Exception as error:
            raised = error
    said: list[Any] = [None if raised is None else (isinstance(raised, InputError), str(raised))]
    dist.broadcast_object_list(said, src=0)
    if raised is not None:
        raise raised
    if said[0] is not None:
        mended, text = said[0]
        raise InputError(text) if mended else RuntimeError(f"rank 0 failed: {text}")
    return result


def _own_routes(made: Any, ids: Tensor) -> Routes:
    with record(made) as recorder:
        made(input_ids=ids.to(made.device), use_cache=False)
    return recorder.routes()


def _run(made: Any, ids: Tensor, routes: Routes) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [1, S, V] and those of every router [T, N] in float64, by its path, on the CPU."""
    seen: dict[str, Tensor] = {}

    def noting(path: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            seen[path] = output[0].double().cpu()

        return note

    hooks = {site.router: noting(site.path) for site in _sites(made)}
    with replay(made, routes), hooked(hooks):
        logits = made(input_ids=ids.to(made.device), use_cache=False).logits
    return logits.cpu(), seen


def _sites(made: nn.Module) -> list[Site]:
    sites = [layer.sites[0] for layer in routed_layers(made)]
    return [site for site in sites if not site.by_token]


def _check_choices(
    made: nn.Module,
    routes: Routes,
    rough: dict[str, Tensor],
    fine: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """Refuse experts of the engine that a router does not take within the rounding of its logits.

    Its logits are moved by that much towards the engine's experts, and away from all others.
    """
    places = {layer: place for place, layer in enumerate(routes.layers)}
    for site in _sites(made):
        logits = fine[site.path]
        taken = torch.from_numpy(routes.experts[:, places[site.layer]].astype("int64"))
        # A softmax in fp32 makes equal what differs by less than its last digit.
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        last = eps * max(1.0, float(logits.abs().max()))
        room = MULTIPLE * max(float((rough[site.path] - logits).abs().max()), last)
        towards = torch.full_like(logits, -room).scatter_(1, taken, room)
        bias = next(iter(block_bias(made, site.path)), None)
        device = next(site.router.parameters()).device
        given = (logits + towards).to(device)
        _, own = site.selection(site.router, given, *(() if bias is None else (bias,)))
        other = (own.cpu().sort(dim=1).values != taken.sort(dim=1).values).any(dim=1)
        if other.any():
            raise InputError(
                f"the Hugging Face model would not be the engine's: in layer {site.layer} "
                f"{int(other.sum())} of {len(other)} tokens, the first at position "
                f"{int(other.nonzero()[0])}, take other experts, and no rounding explains it; "
                "nothing was written"
            )


@contextmanager
def _in_dtype(made: nn.Module, dtype: torch.dtype, *, nudged: bool = False) -> Iterator[None]:
    """Parameters of ``made`` in a dtype inside the block, but for routers in a narrower one.

    nudged: its buffers too, each entry moved by its last digit, as an engine that makes its own
    rotary frequencies may have them; over thousands of positions that digit is seen in logits.
    """
    wide = {p for site in _sites(made) for p in site.router.parameters()}
    values = {p: p.data for p in made.parameters()}
    buffers = [
        (module, name, buffer)
        for module in made.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if nudged and buffer.is_floating_point()
    ]
    signs = torch.Generator().manual_seed(0)
    try:
        for p, value in values.items():
            narrower = dtype.itemsize < value.dtype.itemsize
            if p.is_floating_point() and not (narrower and p in wide):
                p.data = value.to(dtype)
        for module, name, buffer in buffers:
            sign = torch.randint(2, buffer.shape, generator=signs).to(buffer.device) * 2 - 1
            step = torch.finfo(buffer.dtype).eps * sign
            module._buffers[name] = buffer.to(dtype) * (1 + step.double())
        yield
    finally:
        for p, value in values.items():
            p.data = value
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Full float32 products inside the block; they and the random state are as before after it."""
    libraries: Any = (torch.backends.cuda, torch.backends.mkldnn)
    backends = [library.matmul for library in libraries]
    before = [backend.fp32_precision for backend in backends]
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision
