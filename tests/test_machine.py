"""What a run says of the machine it ran on."""

import importlib.metadata

import pytest
import torch

import l2r
from l2r import machine
from l2r.machine import describe_machine, device_name, group_limit, pick_device


def test_versions_of_this_code_and_of_torch_are_their_own_whatever_was_installed(monkeypatch):
    """The metadata of PyPI's torch are without its build, +cu130."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    packages = describe_machine()["packages"]
    assert packages["l2r-moe"] == l2r.__version__ and packages["torch"] == torch.__version__
    assert packages["transformers"] == "0.0.1"


def test_a_processor_is_told_by_its_numbers_and_its_instructions(monkeypatch, tmp_path):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", path)
    told = describe_machine()["instructions"]
    assert told["family"] is None and told["digest"] is None and told["flags"] == []
    text = (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 23\nmodel\t\t: 1\n"
        "model name\t: AMD EPYC\nstepping\t: 2\nflags\t\t: fpu avx2 {}fma\n\n"
        "processor\t: 1\ncpu family\t: 99\nmodel name\t: another\n"
    )
    digests = []
    for extra in ("", "avx512f ", "rdrand "):
        path.write_text(text.format(extra))
        facts = describe_machine()
        told = facts["instructions"]
        assert facts["processor"] == "AMD EPYC" and told["vendor"] == "AuthenticAMD"
        assert (told["family"], told["model"], told["stepping"]) == (23, 1, 2)
        assert told["flags"] == sorted({"avx2", "fma", extra.strip()} - {"", "rdrand"})
        digests.append(told["digest"])
    assert len(set(digests)) == 3


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/box\n", {"box/memory.max": "2000"}, 2000),
        ("0::/box\n", {"memory.max": "3000"}, 3000),
        ("0::/\n", {"memory.max": "max"}, None),
        ("4:memory:/box\n3:cpu:/\n", {"memory/box/memory.limit_in_bytes": "500"}, 500),
        ("4:memory:/a/b\n0::/\n", {"memory/memory.limit_in_bytes": "9", "memory.max": "7"}, 7),
        ("0::/box\n", {}, None),
    ],
)
def test_the_limit_of_a_container_counts_as_memory(groups, files, expected, tmp_path):
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text(text + "\n")
    assert group_limit(tmp_path / "cgroup", tmp_path / "tree") == expected
    assert group_limit(tmp_path / "not here", tmp_path / "tree") is None


def test_the_name_of_a_device_is_checked_without_the_machine_and_plugins_may_name_more(monkeypatch):
    for name in ("auto", "cpu", "cuda", "cuda:1", "mps", "xpu:0"):
        assert device_name(name) == name
    for name in ("gpu", "gpu:0", "meta", "cuda:", "cuda:x", "CPU", ""):
        with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:0; got"):
            device_name(name)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [group])
    assert device_name("npu:0") == "npu:0"
    with pytest.raises(ValueError, match="device must be one of this machine; got 'npu:0'"):
        pick_device("npu:0")
