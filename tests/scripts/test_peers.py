"""Transformers' own tests as a judge: what a stock model passes and ours does not is named."""

import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

from l2r.hf.swap.families import TABLE
from scripts.others.peers import cases
from scripts.others.peers.__main__ import HERE
from scripts.others.peers.download import tools_of_tests, transformers_tests
from scripts.others.peers.results import Outcome, faults, markdown, run_class

SIBLINGS = {"Stock": None, "Ours": "Stock"}


def test_a_test_that_ours_skips_and_stock_passes_is_named():
    stock = Outcome(passed={"saved", "mapped", "loaded"}, failed={"odd"}, skipped={"other"})
    ours = Outcome(passed={"saved"}, failed={"odd", "loaded"}, skipped={"mapped", "other"})
    lines = markdown({"Stock": stock, "Ours": ours}, SIBLINGS, {}, "5.0").splitlines()
    assert "| Stock | 5 | 3 | 1 | 1 | 0 | 0 |  |" in lines
    assert "| Ours | 5 | 1 | 2 | 2 | 0 | 0 | loaded, mapped |" in lines


def test_what_was_not_run_is_said():
    text = markdown({"Stock": Outcome(passed={"saved"})}, SIBLINGS, {}, "5")
    assert "- Not run this time: Ours." in text.splitlines()


def test_a_test_that_ours_fails_and_stock_skips_is_named():
    suites = {"Stock": Outcome(skipped={"mapped"}), "Ours": Outcome(failed={"mapped"})}
    assert "| Ours | 1 | 0 | 1 | 0 | 0 | 0 | mapped |" in markdown(suites, SIBLINGS, {}, "5")


def test_a_test_that_ours_passes_and_stock_skips_is_no_fault():
    suites = {"Stock": Outcome(skipped={"mapped"}), "Ours": Outcome(passed={"mapped"})}
    assert "| Ours | 1 | 1 | 0 | 0 | 0 | 0 | none |" in markdown(suites, SIBLINGS, {}, "5")


def test_an_exclusion_has_its_reason_and_is_a_fault_once_the_test_passes():
    stock, ours = Outcome(passed={"saved", "loaded"}), Outcome(passed={"saved"}, failed={"loaded"})
    reasons = {"loaded": "it has no file"}
    assert faults(ours, stock, reasons) == []
    assert faults(ours, stock, {**reasons, "saved": "no"}) == ["saved (excluded)"]
    text = markdown(
        {"Stock": stock, "Ours": ours},
        SIBLINGS,
        {},
        "5",
        lambda name: reasons if name == "Ours" else {},
    )
    assert "| Ours | 2 | 1 | 1 | 0 | 1 | 0 | none |" in text
    assert "- Excluded: `loaded` of Ours: it has no file." in text


def test_every_rule_has_a_family_that_is_judged():
    """But those of which transformers has no causal language model."""
    judged = {family.rule for family in TABLE if family.model_type in cases.FAMILIES}
    others = {family.model_type for family in TABLE if family.rule not in judged}
    assert others == {"mistral4", "mistral_large4", "openai_privacy_filter", "muse_spark"}
    for each in cases.EXCLUDED:
        assert any(re.fullmatch(each.subjects, name) for name in cases.SUBJECTS), each
        assert len(each.reason) > 20
    assert set(cases.CI_CASES) <= set(cases.SUBJECTS)


@pytest.fixture(scope="module")
def suites():
    """Transformers' tests, from its source distribution, in a folder that is kept."""
    cache = Path(tempfile.gettempdir()) / "l2r-peers"
    cache.mkdir(exist_ok=True)
    try:
        with FileLock(cache / "lock"):
            source = transformers_tests(cache, HERE / "absent")
            return cache, [source, tools_of_tests(cache)]
    except subprocess.CalledProcessError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"pip cannot fetch the source distribution of transformers: {error}")


@pytest.mark.slow("processes of minutes")
@pytest.mark.parametrize("family", cases.IN_CI)
def test_a_model_passes_what_its_stock_sibling_passes(suites, family):
    """Swapped; one family recorded and replayed too."""
    cache, path = suites
    outcomes = {
        name: run_class(
            HERE / "hf_suites.py",
            name,
            report=cache / f"ci-{name}.xml",
            path=path,
            cwd=path[0],
            without=cases.NOT_IN_CI,
        )
        for name in cases.CI_CASES
        if name.endswith(f"_{family}")
    }
    stock = outcomes.pop(f"Stock_{family}")
    assert len(stock.passed) > 90 and outcomes  # else it is another suite
    for name, outcome in outcomes.items():
        assert faults(outcome, stock, cases.excluded(name)) == [], name
