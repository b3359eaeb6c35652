"""What a run says of the machine it ran on."""

import importlib.metadata

import l2r
from l2r.machine import describe_machine


def test_the_version_of_this_code_is_its_own_whatever_was_installed(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    packages = describe_machine()["packages"]
    assert packages["l2r-moe"] == l2r.__version__ and packages["torch"] == "0.0.1"
