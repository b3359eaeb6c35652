"""One optimizer step of a loop written out, with a feature of docs/your-loop.md in it.

In one process, under DDP and under FSDP2. Two micro-batches, non-reentrant activation
checkpointing, bfloat16 (by autocast; FSDP2 by its policy). Each function returns what ``watching``
saw, a ``Seen`` for every rank. Ranks import this module, and no tool.
"""

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import l2r
from l2r.analysis.diagnostics import RouterWatch
from l2r.hf.models.version_names import checkpoint_activations
from l2r.routers import step_loads
from scripts.others.tools.subjects import Subject
from scripts.others.tools.watching import NO_LABEL, Noise, Seen, watching
from tests.processes import on_two_ranks

MICRO_BATCHES, BALANCE, SPEED = 2, 10.0, 0.01
Routes = Sequence[Sequence[Any]]  # to be replayed, of each rank's micro-batches
SCOPES: dict[str, Any] = {f"losses, {s}": s for s in ("microbatch", "step", "sequence")}


class RefusedError(Exception):
    """What a tool cannot have, in a line."""


def autocast() -> Any:
    """Bfloat16 as the tools have it on a CPU."""
    return torch.autocast("cpu", torch.bfloat16)


def opened(subject: Subject) -> Any:
    """The model of a subject, as every tool gets it."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder).train()
    model.config.use_cache = False
    return model


def batches(rank: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches with padding, others for each rank; the prompt of a row has no label."""
    generator = torch.Generator().manual_seed(7 + rank)
    found = []
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(3, 64, (2, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        labels = ids.masked_fill(mask == 0, NO_LABEL)
        labels[0, :3] = NO_LABEL
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


def plain(subject: Subject, feature: str, routes: Routes | None = None) -> list[Seen]:
    """A loop written out."""
    return [_own_step(opened(subject), lambda model: model, autocast, feature, 0, routes)]


def ddp(subject: Subject, feature: str, routes: Routes | None = None) -> list[Seen]:
    """The same on two ranks under DistributedDataParallel."""
    wrap = partial(DistributedDataParallel, find_unused_parameters=False)
    return _on_ranks(subject, feature, routes, wrap, autocast)


def fsdp2(subject: Subject, feature: str, routes: Routes | None = None) -> list[Seen]:
    """The same on two ranks under FSDP2, whose policy computes in bfloat16."""
    return _on_ranks(subject, feature, routes, _sharded, contextlib.nullcontext)


def _on_ranks(
    subject: Subject, feature: str, routes: Routes | None, wrap: Any, half: Any
) -> list[Seen]:
    _ = subject.folder  # written before ranks read it
    with TemporaryDirectory() as folder:
        return [
            *on_two_ranks(_rank, Path(folder), str(subject.folder), wrap, half, feature, routes)
        ]


def _rank(
    rank: int, folder: str, wrap: Any, half: Any, feature: str, routes: Routes | None
) -> Seen:
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    model.config.use_cache = False
    seen = _own_step(model, wrap, half, feature, rank, routes)
    seen.forward, seen.again = dict(seen.forward), dict(seen.again)
    return seen


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    l2r.shard_routers(model, mesh)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _own_step(
    model: Any, wrap: Any, half: Any, feature: str, rank: int, routes: Routes | None
) -> Seen:
    balancing = l2r.bias_balancing(model, SPEED) if feature == "bias_balancing" else None
    checkpoint_activations(model)
    if "pin_routes" in feature:
        Noise(model)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = batches(rank)
    with watching(model) as seen, ExitStack() as blocks:
        if balancing is not None:
            balancing.start(wrapped)
            blocks.callback(balancing.stop)
        if feature == "pin_routes":
            blocks.enter_context(l2r.pin_routes(wrapped))
        watch = RouterWatch(wrapped) if feature == "router_statistics" else None
        if watch is not None:
            watch.start(wrapped)
        loads = counted_loads(wrapped, rows, half) if feature == "losses, step" else None
        for at, batch in enumerate(rows):
            seen.trained.append((batch["labels"] != NO_LABEL).flatten())
            with half(), around(wrapped, feature, seen, routes and routes[rank][at]) as captured:
                loss = wrapped(**batch).loss
            if feature in SCOPES:
                loss = loss + extra(captured, feature, loads, seen)
            (loss / len(rows)).backward()
        optimizer.step()
        if balancing is not None:
            balancing.step()
        if watch is not None and (statistics := watch.read()):
            seen.found["numbers"] = statistics.scalars()
    return seen


def counted_loads(model: Any, rows: Sequence[Mapping[str, Tensor]], half: Any) -> Any:
    with torch.no_grad(), step_loads(model) as loads:
        for batch in rows:
            with half():
                model(**batch)
    return loads


def extra(captured: Any, feature: str, loads: Any, seen: Seen) -> Tensor:
    found = l2r.router_losses(
        captured, balance=BALANCE, balance_scope=SCOPES[feature], loads=loads
    )  # fmt: skip
    seen.found.setdefault("balance", []).append(float(found.balance))
    return found.total


@contextlib.contextmanager
def around(model: Any, feature: str, seen: Seen, routes: Any) -> Any:
    """The block of a feature around one forward, in whatever loop."""
    with ExitStack() as blocks:
        captured = None
        if routes is not None:
            blocks.enter_context(l2r.replay(model, routes))
        if feature == "record and replay" and routes is None:
            recorder = blocks.enter_context(l2r.record(model))
        if feature in ("capture", "shard_routers", "record and replay", *SCOPES):
            captured = blocks.enter_context(l2r.capture(model, inputs=feature == "shard_routers"))
        yield captured
    if feature == "record and replay" and routes is None:
        seen.found.setdefault("routes", []).append(recorder.routes())
    if captured is not None:
        outputs = captured.outputs.items()
        rows = {path: tuple(x.detach() for x in calls[0]) for path, calls in outputs}
        assert all(len(calls) == 1 and calls[0].logits.requires_grad for _, calls in outputs)
        seen.found.setdefault("captured", []).append(rows)
        if captured.inputs:
            inputs = {path: calls[0] for path, calls in captured.inputs.items()}
            seen.found.setdefault("inputs", []).append(inputs)
