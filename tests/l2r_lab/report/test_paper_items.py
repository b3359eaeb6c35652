"""Items of the paper's page that refuse what is not what the paper's table has."""

from types import SimpleNamespace

import pytest

from l2r_lab.report.paper_items import items_of_runs
from tests.report.runs import made_run

WHOLE = {"top1": 0.8, "top5": 0.9, "images": 100, "averaged": False}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, None),
        ({"data": None, "limit": None}, None),
        ({"data": "elsewhere"}, "made with --data: run l2r eval"),
        ({"limit": 10}, "made with --limit: run l2r eval"),
        ({"averaged": True}, "all be of averaged weights or none"),
    ],
)
def test_table_5_is_of_whole_validation_sets_alike(other, message, tmp_path):
    asked = []

    def images(router):
        run = made_run(tmp_path / f"{len(asked)}")
        asked.append(router)
        run.write_json(run.evaluation, {**WHOLE, **(other if len(asked) == 2 else {})})
        return run

    (item,) = (item for item in items_of_runs() if item.name == "Table 5")
    if message is None:
        assert len(item.make(SimpleNamespace(images=images)).rows) == len(asked) > 1
    else:
        with pytest.raises(ValueError, match=message):
            item.make(SimpleNamespace(images=images))
