"""Which number stands in which column, and that no table of one seed marks a winner."""

import ast
from pathlib import Path

import numpy as np
import pytest

import l2r.report
from l2r.files.diagnosis import USAGE, Diagnosis
from l2r.files.folder import RunFolder
from l2r.report.diagnosis import _GROUPS, checkpoint_tables
from l2r.report.references import COUNTS
from l2r_lab.report.comparison import comparison_table
from tests.report.runs import bold, made_run


def test_every_column_of_the_comparison(tmp_path):
    fields = {
        "margin / spread": "scale_free_margin",
        "stability": "stability",
        "top-k overlap": "topk_overlap",
        "load entropy": "entropy",
        "routing gain": "routing_gain",
    }
    raw = {"mean margin": "mean_margin", "low-margin rate": "low_margin_rate"}
    for name, size in (("low", 1), ("high", 2)):
        run = made_run(
            tmp_path / name,
            router_parameters=size,
            validation=lambda step, size=size: {
                "ce/code": 2.0 + size, "ce/mean": 3.0 + size, "top1": size / 4, "top5": size / 3,
            },
        )  # fmt: skip
        for record in run.read_metrics("train")[-2:]:
            run.append_metrics({**record, "balance": record["balance"] + size})
        numbers = dict.fromkeys((*fields.values(), *raw.values()), 0.1 * size)
        arrays = {f"0.{kind}": np.ones(2) for kind in USAGE}
        Diagnosis({}, [{"name": "gate", **numbers}], arrays).save(run.path)
    table = comparison_table([RunFolder(tmp_path / name) for name in ("low", "high")])
    others = {
        "router",
        "steps",
        "CE code",
        "CE mean",
        "balance loss",
        "router params",
        "top1",
        "top5",
    }
    assert {*others, *fields, *raw, "top1", "top5", "experts ever first"} == set(table.columns)
    assert bold(table) == {}  # a row is one seed, and one seed ranks nothing
    values = dict(zip(table.columns, table.rows[1], strict=True))
    for column in {**fields, **raw}:
        assert values[column] == pytest.approx(0.2)


def test_a_column_shows_the_number_it_is_named_after():
    """Every number has another value, so that none can stand under the name of another."""
    names = {column: field for _, group, _ in _GROUPS for column, field in group.items()}
    assert len(set(names.values())) == len(names)
    layer = {field: float(n) for n, field in enumerate(names.values())}
    tables = checkpoint_tables({"a": Diagnosis({}, [layer], {})})
    shown = {c: v for table in tables for c, v in table.records()[0].items() if c != "checkpoint"}
    counts = {field: str(int(layer[field])) for field in COUNTS if field in layer}
    assert shown == {column: {**layer, **counts}[field] for column, field in names.items()}
    described = {
        "stability": "stability", "top-k overlap": "topk_overlap", "load entropy": "entropy",
        "max / mean": "max_over_mean", "MaxVio": "maxvio", "dead experts": "dead_experts",
        "ever first": "first_experts",
        "top-1 radius": "certified_top1", "top-k radius": "certified_topk",
        "top-1 at noise norm": "certified_share_top1", "cross-entropy": "cross_entropy",
        "margin / spread": "scale_free_margin", "routing gain": "routing_gain",
        "cosine variance": "cosine_variance", "load cv": "cv",
    }  # fmt: skip
    assert described.items() <= names.items()


def test_no_other_table_prints_a_best_value():
    """Accuracies over several seeds alone."""
    marking = set()
    source = Path(l2r.report.__file__).parents[2]
    for path in source.glob("l2r*/report/*.py"):
        if path.name == "tables.py":  # where the word is of the language, not a direction
            continue
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        marking |= {path.name for call in calls for word in call.keywords if word.arg == "best"}
    assert marking == {"paper_tables.py"}
