"""Shared by all tests: one thread (L2R_TEST_THREADS for more), fixed seeds, small fixtures."""

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import quick, shape_checks
from tests.commands import Ended, command

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of a program that is not installed; begin with the longest.

    The rehearsal takes minutes: at the end one process would wait for it, or both would do it.
    """
    items.sort(key=lambda item: "rehearsed" not in getattr(item, "fixturenames", ()))
    for item in items:
        for mark in item.iter_markers("tool"):
            if find_spec(mark.args[0]) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}: make tools-test"))


@pytest.fixture(autouse=True)
def _one_thread_and_seed() -> None:
    torch.set_num_threads(int(os.environ.get("L2R_TEST_THREADS", "1")))
    torch.manual_seed(0)
    shape_checks.begin_test()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No run-time checks of annotations; see tests/quick.py."""
    with quick.unchecked():
        yield


@pytest.fixture
def coarse() -> Iterator[None]:
    """Coarse certificates; see tests/quick.py."""
    with quick.coarse():
        yield


@pytest.fixture(scope="session")
def l2r() -> Callable[..., Ended]:
    """``l2r("train", ...)``: a command in this process, as a person types it."""
    return command


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
