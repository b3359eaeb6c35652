"""Routes recorded and replayed: what either costs over the plain model, in turns of one run."""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench import Bench, main
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.inference import models, sizes
from l2r_lab.timing import Step

PHASES = ("forward", "forward+backward", "decode", "generate")
_DEMO = {  # as in the recipes of the demo
    "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_experts": 16, "num_experts_per_tok": 4,
}  # fmt: skip
Work = Callable[[], object]
Make = Callable[[Any, Tensor], Work]


def run(settings: BenchSettings) -> Bench:
    """Each model plain, recorded and replayed; a block opens and closes in every step."""
    bench = Bench(
        "routes",
        settings,
        note="ratio: time over plain's. second plain: what noise does. replay own: the routes that "
        "the model chooses itself; other: one token in ten has another expert. decode: "
        f"{_decoded(settings)} tokens, generate: {_generated(settings)}, by the method.",
    )
    for name, (model, ids) in _subjects(settings).items():
        for phase in PHASES:
            _group(bench, name, phase, model, ids)
    return bench


def _subjects(settings: BenchSettings) -> dict[str, tuple[Any, Tensor]]:
    """Models with the tokens they read: of the demo's size, stock, and stock with our router."""
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts
    from l2r.hf.swap import swap_routers
    from l2r.routers import make_config

    torch.manual_seed(0)
    size = "tiny" if settings.quick else "small"
    shape = sizes(settings, size) if settings.quick else {**sizes(settings, size), **_DEMO}
    demo: Any = L2rOlmoeForCausalLM(
        L2rOlmoeConfig(**shape, router={"kind": "l2r_sips", "rank": 2, "heads": 16})
    )
    demo.set_experts_implementation(register_experts())
    stock, swapped = (models(settings, size)["stock"] for _ in range(2))
    with warnings.catch_warnings():  # times do not depend on what is learned
        warnings.simplefilter("ignore", UserWarning)
        swap_routers(swapped, make_config("l2r_sips", heads=16))
    batches = ((2, 16), (2, 16)) if settings.quick else ((8, 128), (2, 256))
    draw = torch.Generator().manual_seed(0)
    ids = [
        torch.randint(2, shape["vocab_size"], batch, generator=draw).to(settings.device)
        for batch in batches
    ]
    return {
        "demo": (demo.to(settings.device, settings.dtype).train(), ids[0]),
        "olmoe, stock": (stock.train(), ids[1]),
        "olmoe, swapped": (swapped.train(), ids[1]),
    }


def _group(bench: Bench, name: str, phase: str, model: Any, ids: Tensor) -> None:
    """Time one phase of a model in all forms."""
    decode: Make = partial(_decode, count=_decoded(bench.settings))
    generate: Make = partial(_generate, count=_generated(bench.settings))
    makes: dict[str, Make] = {
        "forward": _forward,
        "forward+backward": _backward,
        "decode": decode,
        "generate": generate,
    }
    work = makes[phase](model, ids)
    steps = _steps(model, work, lambda: model(ids[:1]).logits)
    times = bench.measure(steps, f"{name}, {phase}", rounds=15)
    for form, time in times.items():
        bench.add(
            size=name,
            phase=phase,
            contender=form,
            **time.columns("ms"),
            **time.over(times["plain"]),
        )


def _steps(model: Any, work: Work, logits: Callable[[], Tensor]) -> dict[str, Step]:
    """Make a step of every form, each checked: the plain model's logits or other routes."""
    from l2r.hf.routes import record, replay

    def recorded() -> Any:
        with record(model) as recorder:
            work()
        return recorder.routes()

    def replayed(routes: Any) -> Step:
        def step(_: int) -> None:
            with replay(model, routes):
                work()

        return step

    own = recorded()
    other = changed(own)
    steps: dict[str, Step] = {"plain": lambda _: work(), "second plain": lambda _: work()}
    with torch.no_grad():
        expected = logits()
        with record(model) as recorder:
            same = torch.equal(logits(), expected)
        if same:
            steps["record"] = lambda _: recorded()
        with replay(model, recorder.routes()):
            if torch.equal(logits(), expected):
                steps["replay own"] = replayed(own)
    with replay(model, other):
        taken = recorded()
    if np.array_equal(taken.experts, other.experts):
        steps["replay other"] = replayed(other)
    return steps


def changed(routes: Any) -> Any:
    """Every tenth token has the lowest expert that it did not choose in place of its last."""
    experts = routes.experts.copy()
    free = np.arange(routes.fingerprint.num_experts)
    for token in experts[::10]:
        for chosen in token:
            chosen[-1] = np.setdiff1d(free, chosen)[0]
    return dataclasses.replace(routes, experts=experts)


def _decoded(settings: BenchSettings) -> int:
    """Tokens of a step of decoding."""
    return 2 if settings.quick else 8


def _generated(settings: BenchSettings) -> int:
    """Tokens of a call of ``generate``."""
    return 4 if settings.quick else 32


def _forward(model: Any, ids: Tensor) -> Work:
    def work() -> None:
        with torch.no_grad():
            model(ids)

    return work


def _backward(model: Any, ids: Tensor) -> Work:
    def work() -> None:
        model(ids, labels=ids).loss.backward()
        model.zero_grad()

    return work


def _decode(model: Any, ids: Tensor, count: int) -> Work:
    """Greedy tokens after a prompt, as ``generate`` calls the model, without its own overhead."""
    from l2r.hf.models import CACHE

    prompt = ids[:1, :16]

    def work() -> None:
        with torch.no_grad():
            answer = model(prompt, use_cache=True, logits_to_keep=1)
            for _ in range(count):
                token, cache = answer.logits[:, -1:].argmax(-1), answer[CACHE]
                answer = model(token, **{CACHE: cache}, use_cache=True)

    return work


def _generate(model: Any, ids: Tensor, count: int) -> Work:
    """Greedy tokens after a prompt, by ``generate``."""
    prompt = ids[:1, :16]
    length = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}

    def work() -> None:
        with torch.no_grad():
            mask = torch.ones_like(prompt)
            model.generate(prompt, attention_mask=mask, do_sample=False, **length)

    return work


if __name__ == "__main__":
    raise SystemExit(main("routes", run))
