"""What recording and replaying routes costs over a plain step, in processor time.

    python -m scripts.machines.route_cost [--turns 20] [--only NAME] [--json out.json]

Each model runs plain, in a ``record`` block whose routes are read, and in a ``replay`` block, of
routes in which one token in ten has another expert; blocks open and close in every step. The forms
take turns, one step each, in one process with one thread. Prints the plain step and the median and
quartiles of the ratios of the turns. "plain again" is a second plain step: what its ratio is off 1
is noise.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2r import L2RConfig, build_router, record, replay, swap_routers
from l2r.cost.benchmarks.language_models import models, sizes
from l2r.cost.benchmarks.results import BenchSettings
from l2r.hf.routes import Routes

ROWS, COLUMNS, PROMPT, DECODED = 2, 256, 16, 8
FORMS = ("plain", "plain again", "record", "replay")
Work = Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", default="", help="subjects whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="small models, to try it")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    sys.stdout.write(
        "| step | plain, ms | plain again | record | replay |\n|---|---|---|---|---|\n"
    )
    for name, model, work in subjects(given.quick):
        if given.only not in name:
            continue
        found[name] = timed({form: _step(form, model, work) for form in FORMS}, given.turns)
        sys.stdout.write(row(name, found[name]) + "\n")
        sys.stdout.flush()
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def timed(steps: dict[str, Work], turns: int) -> dict[str, list[float]]:
    """Seconds of one step of each form in every turn; the order turns round."""
    seconds: dict[str, list[float]] = {form: [] for form in steps}
    for turn in range(-2, turns):  # two to warm up
        for form in steps if turn % 2 else reversed(steps):
            start = time.process_time()
            steps[form]()
            if turn >= 0:
                seconds[form].append(time.process_time() - start)
    return seconds


def subjects(quick: bool) -> Iterator[tuple[str, nn.Module, Work]]:
    """Name, model and step of each row."""
    for name, model in _models(quick).items():
        vocabulary = model.config.vocab_size
        ids = torch.randint(2, vocabulary, (ROWS, COLUMNS), generator=torch.manual_seed(0))
        yield f"{name}, forward and backward", model, _trained(model, ids)
        yield f"{name}, {DECODED} tokens one by one", model, _decoded(model, ids[:1, :PROMPT])
    hidden, experts, top_k = (64, 16, 4) if quick else (2048, 64, 8)
    for kind in ("linear", "l2r_sips"):
        name = f"router {kind} alone"
        router = build_router(kind, hidden_size=hidden, num_experts=experts, top_k=top_k)
        draw = torch.manual_seed(0)
        x = torch.randn(ROWS * COLUMNS, hidden, generator=draw, requires_grad=True)
        yield f"{name}, {ROWS * COLUMNS} tokens, forward and backward", router, _routed(router, x)
        yield f"{name}, 1 token, forward", router, _chosen(router, x[:1].detach())


def _models(quick: bool) -> dict[str, Any]:
    from transformers import MixtralConfig, MixtralForCausalLM

    settings = BenchSettings(quick=quick)
    shape = {**sizes(settings), "num_hidden_layers": 2 if quick else 4}
    torch.manual_seed(0)
    experts = {"num_local_experts": shape["num_experts"], "num_key_value_heads": 2}
    swapped = MixtralForCausalLM(MixtralConfig(**shape, **experts))
    swap_routers(swapped, L2RConfig(gamma=4.0, rank=8, heads=4))
    ours = models(settings)
    made = {
        "Mixtral, swapped (L2R, rank 8)": swapped,
        "OLMoE, stock": ours["stock"],
        "ours, L2R (SIPS)": ours["l2r, l2r_sips H16"],
    }
    return {name: model.train() for name, model in made.items()}


def _trained(model: Any, ids: Tensor) -> Work:
    def work() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    return work


def _decoded(model: Any, prompt: Tensor) -> Work:
    """Greedy tokens after a prompt, as ``generate`` calls the model, without its own overhead."""

    def work() -> None:
        with torch.no_grad():
            answer = model(prompt, use_cache=True, logits_to_keep=1)
            for _ in range(DECODED):
                token, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
                answer = model(token, past_key_values=cache, use_cache=True)

    return work


def _routed(router: nn.Module, x: Tensor) -> Work:
    def work() -> None:
        logits, weights, _ = router(x)
        (logits.sum() + weights.sum()).backward()
        router.zero_grad()

    return work


def _chosen(router: nn.Module, x: Tensor) -> Work:
    def work() -> None:
        with torch.no_grad():
            router(x)

    return work


def _step(form: str, model: nn.Module, work: Work) -> Work:
    if form == "record":
        return lambda: _recorded(model, work)
    if form == "replay":
        routes = _changed(_recorded(model, work))

        def replayed() -> None:
            with replay(model, routes):
                work()

        return replayed
    return work


def _recorded(model: nn.Module, work: Work) -> Routes:
    with record(model) as recorder:
        work()
    return recorder.routes()


def _changed(routes: Routes) -> Routes:
    """Every tenth token has the lowest expert that it did not choose in place of its last."""
    experts = routes.experts.copy()
    for token in range(0, len(experts), 10):
        for chosen in experts[token]:
            chosen[-1] = min(set(range(routes.fingerprint.num_experts)) - set(chosen.tolist()))
    return dataclasses.replace(routes, experts=experts)


def row(name: str, turns: dict[str, list[float]]) -> str:
    """A row of the table: medians and quartiles of ratios to the plain step of the same turn."""
    cells = [name, f"{1e3 * statistics.median(turns['plain']):.1f}"]
    for form in FORMS[1:]:
        ratios = [b / a for a, b in zip(turns["plain"], turns[form], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{middle:.3f} ({low:.3f} to {high:.3f})")
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    raise SystemExit(main())
