"""What dev/tools.md claims of TRL and Lightning, each of one stock model: make tools-test."""

from importlib import import_module
from importlib.util import find_spec

import pytest

from scripts.others.tools.subjects import Subject

FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")  # that TRL can train


def rows(tool):
    """Claims in the order of the table, with a family each; none where it is not installed."""
    if find_spec(tool) is None:
        return [pytest.param(None, "", id="not installed")]
    found = import_module(f"scripts.others.tools.with_{tool}").ROWS
    return [
        pytest.param(row, FAMILIES[n % len(FAMILIES)], id=row.claim) for n, row in enumerate(found)
    ]


@pytest.mark.tool("trl")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "family"), rows("trl"))
def test_trl(row, family):
    row.check(Subject("stock", family))


@pytest.mark.tool("lightning")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("row", "family"), rows("lightning"))
def test_lightning(row, family):
    row.check(Subject("stock", family))
