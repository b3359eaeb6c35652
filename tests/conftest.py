"""Shared by all tests: one thread (L2R_TEST_THREADS for more), fixed seeds, small fixtures."""

import gc
import io
import os
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests import shape_checks

shape_checks.install()
settings.register_profile("l2r", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("l2r")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder is not looked for
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as commands do
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are first imported
    os.environ["L2R_GUARD"] = "off"  # each kind of call would be interpreted twice; test_guard.py


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests stay: looking through them for garbage was a quarter of collecting."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(int(os.environ.get("L2R_TEST_THREADS", "1")))
    torch.manual_seed(0)
    shape_checks.begin_test()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No run-time checks of annotations: torch.compile cannot trace them, searches crawl."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Certificates of fewer rounds and a shorter search: as sound, faster, less tight."""
    from l2r.analysis.certificates import rank2_radii
    from l2r.analysis.certificates.attack import find_flip
    from l2r.analysis.diagnostics import model_diagnosis

    monkeypatch.setattr(rank2_radii, "ROUNDS", 12)
    short = partial(find_flip, starts=2, steps=4)
    monkeypatch.setattr(model_diagnosis, "find_flip", short)


class Ended(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line on standard error with which a command refuses what it was given."""
        assert self.code == 2 and "Traceback" not in self.out + self.err, self
        (line,) = (line for line in self.err.splitlines() if line.startswith("error: "))
        return line


@pytest.fixture(scope="session")
def l2r() -> Callable[..., Ended]:
    """``l2r("train", ...)``: a command in this process, as a person types it."""
    from l2r.cli import main

    def run(*args: object) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        return Ended(int(end.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of six small text files each."""
    root = tmp_path_factory.mktemp("text")
    words = {"animals": ["cat", "dog", "bird", "fish"], "numbers": ["one", "two", "three", "four"]}
    for domain, choices in words.items():
        (root / domain).mkdir()
        for number in range(6):
            text = " ".join(choices[(i * (number + 1) + i // 3) % 4] for i in range(900))
            (root / domain / f"{number}.txt").write_text(text)
    return root


@pytest.fixture(scope="session")
def tiny_changes(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Changes that shrink a demo recipe to a model that trains in a second."""
    os.environ["L2R_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    return [
        f"data.corpus={text_folder}",
        "data.vocab_size=300",
        "data.characters_per_domain=30000",
        "data.sequence_length=32",
        "model.hidden_size=32",
        "model.num_hidden_layers=2",
        "model.num_attention_heads=2",
        "model.intermediate_size=16",
        "model.num_experts=8",
        "model.num_experts_per_tok=2",
        "training.steps=6",
        "training.global_batch=8",
        "training.micro_batch=8",
        "training.log_every=1",
        "optimizer.warmup=512",
        "evaluation.every=3",
        "evaluation.batch_size=4",
        "evaluation.max_batches=2",
        "checkpoint.every=2",
    ]
