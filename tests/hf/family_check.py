"""Run every supported family through a swap, with tiny random models: docs/swap.md."""

import copy
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import l2r
from l2r.hf.checkpoints.pretrained import load_pretrained
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import replace_routers
from l2r.routers import L2RConfig, LinearConfig, RouterConfig, capture
from tests.hf.families import matrix_of_logits, sample_tokens, tiny_model

_TOLERANCE = 1e-5  # of float32 logits of order one after two layers


@dataclass(frozen=True)
class FamilyResult:
    """Checks of one family, in the order of the columns of docs/swap.md.

    None where a check says nothing: a model that classifies tokens generates none, and a family
    that does not compile with its own routers cannot with ours.
    """

    family: str
    same_rule: bool
    swap: bool
    train_step: bool
    generate: bool | None
    reload: bool
    compile: bool | None


COLUMNS = tuple(f.name for f in fields(FamilyResult))


def check_families(names: Sequence[str]) -> Iterator[FamilyResult]:
    """Check each family; yields results as they come. Raises ValueError for unknown names."""
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {name!r}")
    config = L2RConfig(rank=2, heads=4)
    with tempfile.TemporaryDirectory() as folder:
        models = {name: tiny_model(FAMILIES[name]) for name in names}
        for name, model in models.items():
            swapped = replace_routers(copy.deepcopy(model), config)
            swapped.save_pretrained(Path(folder) / name)
            torch.save(_logits(swapped, sample_tokens()), Path(folder) / f"{name}.pt")
        reloaded = _in_fresh_process(Path(folder))
        for name, model in models.items():
            yield _check(name, model, config, reload=reloaded[name])


def keeps_rule(model: Any) -> bool:
    """A linear router with the old weights must give the old model's outputs."""
    ids = sample_tokens()
    before = _logits(model, ids)
    weights = {site.path: matrix_of_logits(site) for site in router_sites(model)}
    swapped = replace_routers(copy.deepcopy(model), LinearConfig())
    with torch.no_grad():
        for path, weight in weights.items():
            swapped.get_submodule(path).weight.copy_(weight)
    return torch.allclose(before, _logits(swapped, ids), atol=_TOLERANCE)


def trains(model: Any) -> bool:
    """A step on language modeling moves every router parameter and lowers the loss."""
    model = copy.deepcopy(model).eval()  # evaluation mode: no sampled routing, no dropout
    ids = sample_tokens()
    with capture(model) as record:
        loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    routers = {n: p for n, p in model.named_parameters() if _inside(n, record.outputs)}
    trainable = {n: p for n, p in routers.items() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trainable.items()}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    moved = [not torch.equal(before[n], p) for n, p in trainable.items()]
    with torch.no_grad():
        after = model(ids, labels=ids, use_cache=False).loss
    return bool(moved) and all(moved) and bool(after < loss)


def generates(model: Any) -> bool:
    """Greedy generation with the cache equals generation without."""
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ids = sample_tokens(1)
    with_cache = model.generate(ids, use_cache=True, **options)
    return torch.equal(with_cache, model.generate(ids, use_cache=False, **options))


def compiles(model: Any) -> bool:
    """One graph without breaks, and the same logits; experts by batched_mm, which CPUs compile."""
    model = copy.deepcopy(model)
    model.set_experts_implementation("batched_mm")
    ids = sample_tokens()
    expected = _logits(model, ids)
    torch.compiler.reset()
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():  # about functions of transformers that cache a constant
        warnings.filterwarnings("ignore", message=r"(?s)Dynamo detected a call to a `functools")
        return torch.allclose(expected, _logits(graph, ids), atol=_TOLERANCE)


def reload_all(folder: str) -> None:
    """Print, as JSON, which saved models give their saved logits again. Runs in its own process."""
    results = {}
    for expected in sorted(Path(folder).glob("*.pt")):
        results[expected.stem] = _without_failure(_reloads, expected)
    sys.stdout.write(json.dumps(results))


def _reloads(expected: Path) -> bool:
    # copied, since sums of small matrices round by where in memory a file's tensors begin
    model = copy.deepcopy(load_pretrained(expected.with_suffix("")))
    saved = torch.load(expected, weights_only=True)
    return torch.equal(_logits(model, sample_tokens()), saved)


def _check(name: str, model: Any, config: RouterConfig, *, reload: bool) -> FamilyResult:
    sites = [site.path for site in router_sites(model)]
    swapped = replace_routers(copy.deepcopy(model), config)
    with capture(swapped) as record:
        output = swapped(sample_tokens(), output_router_logits=True)
    compiled = _without_failure(compiles, swapped)
    return FamilyResult(
        family=name,
        same_rule=_without_failure(keeps_rule, model),
        swap=list(record.outputs) == sites and _shows(output, record.logits()),
        train_step=_without_failure(trains, swapped),
        generate=_without_failure(generates, swapped) if model.can_generate() else None,
        reload=reload,
        compile=compiled or (False if _without_failure(compiles, model) else None),
    )


def _shows(output: Any, logits: Sequence[Tensor]) -> bool:
    """Whether ``output_router_logits`` gave these; in another order where layers run in a loop.

    True for a model whose output has no place for them.
    """
    recorded = getattr(output, "router_logits", logits)
    left = [layer for layer in recorded or () if layer is not None]
    return len(left) == len(logits) and all(any(torch.equal(a, b) for b in left) for a in logits)


def _without_failure(check: Callable[[Any], bool], subject: Any) -> bool:
    """A check that raises is a check that failed; the reason goes to standard error."""
    try:
        return check(subject)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else ""
        sys.stderr.write(f"{check.__name__}: {type(error).__name__}: {first}\n")
        return False


def _in_fresh_process(folder: Path) -> dict[str, bool]:
    code = f"import sys; from {__name__} import reload_all; reload_all(sys.argv[1])"
    command = [sys.executable, "-P", "-c", code, str(folder)]  # P: nothing of the current folder
    # the l2r of this process, which need not be the installed one
    sources = str(Path(__file__).parents[2]), str(Path(l2r.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"reloading in a fresh process failed: {done.stderr[-500:]}")
    sys.stderr.write(
        "".join(f"{x}\n" for x in done.stderr.splitlines() if x.startswith("_reloads"))
    )
    result: dict[str, bool] = json.loads(done.stdout)
    return result


def _inside(name: str, paths: Any) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids, use_cache=False).logits
    return logits
