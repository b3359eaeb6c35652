"""A version newer than those tried is a warning, one older than supported a refusal."""

import re
import runpy
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import l2r.hf
from l2r.engines.engine import ENGINES, require
from l2r.imports import MissingExtraError, check_extra
from l2r.versions import TRIED, check_version

ROOT = Path(__file__).resolve().parents[1]
NEWER = "is newer than the versions that l2r was tried with"


@pytest.mark.parametrize("package", TRIED)
def test_what_was_tried_passes_in_silence_and_only_an_older_one_stops(package):
    oldest, end, _ = TRIED[package]
    for tried in (oldest, f"{oldest}.0", f"{oldest}.7+cpu", f"{oldest}.0.dev0"):
        check_version(package, tried)  # a warning would be an error here
    for newer in (end, f"{end}.0", f"{end}.0rc1", "99.0.0+cu130", "dev"):
        with pytest.warns(UserWarning, match=re.escape(f"{package} {newer} {NEWER}")):
            check_version(package, newer)
    for older in ("0.1", "0.1.0", "0.1.dev3+g123"):
        with pytest.raises(ImportError) as error:
            check_version(package, older)
        assert str(error.value) == f"{package} must be {oldest} or newer; got {older}"


def test_numbers_are_compared_and_not_text():
    check_version("transformers", "5.20.0")
    for older in ("5.2", "5.9.10", "4.57.1"):
        with pytest.raises(ImportError, match=r"must be 5\.19 or newer"):
            check_version("transformers", older)
    with pytest.warns(UserWarning, match="newer"):
        check_version("transformers", "5.100")


def test_extras_start_at_the_oldest_and_end_nowhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, (oldest, _, extra) in TRIED.items():
        if extra:
            assert extras[extra][0] == f"{package}>={oldest}"
    assert f"transformers>={TRIED['transformers'].oldest}" in extras["vision"]
    assert [line for extra in extras.values() for line in extra if "<" in line] == []


def test_pins_are_versions_that_were_tried():
    pins = (ROOT / "constraints.txt").read_text()
    check_version("transformers", re.search(r"^transformers==(.+)$", pins, re.M)[1])
    engines = (ROOT / "constraints-engines.txt").read_text()
    assert [f"{name}<{TRIED[name].end}" in engines.splitlines() for name in ENGINES] == [True] * 3


def test_language_models_ask_for_the_version_of_transformers(monkeypatch):
    def importing(found):
        monkeypatch.setattr(metadata, "version", lambda name: found)
        runpy.run_path(l2r.hf.__file__)

    importing("5.19.0")
    with pytest.warns(UserWarning, match=f"transformers 5.30.0 {NEWER}"):
        importing("5.30.0")
    with pytest.raises(MissingExtraError) as error:  # exit code 2 of every command
        importing("5.18.2")
    assert str(error.value) == (
        "transformers must be 5.19 or newer; got 5.18.2: pip install -U 'l2r-moe[lm]'"
    )


def test_a_package_that_is_missing_is_left_to_the_import(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    check_extra("lm")
    for package in ENGINES:
        with pytest.raises(ImportError) as error:
            require(package)
        oldest, _, extra = TRIED[package]
        assert str(error.value) == (
            f"l2r needs {package}>={oldest}; none is installed: pip install 'l2r-moe[{extra}]'"
        )


@pytest.mark.parametrize("package", ENGINES)
def test_engines_ask_before_they_are_imported(package, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda name: "99.0")
    with pytest.warns(UserWarning, match=f"{package} 99.0 {NEWER}"):
        require(package)
    monkeypatch.setattr(metadata, "version", lambda name: "0.1")
    with pytest.raises(ImportError, match=f"{package} must be .* or newer; got 0.1"):
        require(package)


def test_vllm_is_told_in_its_log_and_keeps_its_own_models(monkeypatch, caplog):
    from l2r.engines.vllm import register
    from tests.engines.vllm.engine import stand_in

    vllm = stand_in(monkeypatch, OlmoeForCausalLM="olmoe")
    vllm.__version__ = "0.31.2"
    register()
    assert caplog.messages == ["vllm must be 0.32 or newer; got 0.31.2; l2r registers nothing"]
    assert list(vllm.ModelRegistry.models) == ["OlmoeForCausalLM"]
    vllm.__version__ = "0.40.1"
    with pytest.warns(UserWarning, match=f"vllm 0.40.1 {NEWER}"):
        register()
    assert "L2rOlmoeForCausalLM" in vllm.ModelRegistry.models
