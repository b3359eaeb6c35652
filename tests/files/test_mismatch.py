"""Sums of a comparison against counts by hand."""

import dataclasses

import numpy as np
import pytest

from l2r.files.mismatch import Mismatch, kind_of

NAN = np.nan


def small(**values):
    """Two sequences of 3 and 2 tokens in two layers of four experts, two chosen."""
    experts = np.tile(np.array([0, 1]), (2, 5, 1))
    other = experts.copy()
    other[0, 0] = [1, 0]  # the same set
    other[0, 1] = [0, 2]
    other[1, 1] = [3, 2]
    other[1, 4] = [0, 3]
    fields = {
        "layers": np.array([0, 2]),
        "remarks": np.array(["", "none"]),
        "lengths": np.array([3, 2]),
        "domain": np.array([0, 1]),
        "domains": np.array(["a", "b"]),
        "pieces": np.array([" word", "12", ",\n"]),
        "tokens": np.array([0, 1, 2, 0, 1]),
        "experts": experts,
        "other_experts": other,
        "gap": np.array([[0.5, 0.1, 0.4, 0.3, 0.2], [1.5, 1.1, 1.4, 1.3, 1.2]]),
        "moved": np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [NAN] * 5]),
        "certified": np.array([[1, 0, 1, 1, 1], [-1] * 5]),
        "own": np.array([0.1, -0.3, NAN, 0.02, NAN]),
        "replayed": np.array([0.01, -0.02, NAN, 0.03, NAN]),
        "kl_own": np.array([0.5, 0.1, 0.0, 0.2, 0.2]),
        "kl_replayed": np.zeros(5),
    }
    return Mismatch(**{**fields, **values})


def test_shares_by_layer_and_in_all():
    result = small()
    first, second = result.by_layer()
    assert first == {
        "layer": 0, "decisions": 5, "changed": 0.2, "kept": 0.9,
        "input_change": pytest.approx(0.3), "certified": 0.8, "certified_changed": 0,
    }  # fmt: skip
    assert second["changed"] == 0.4 and second["kept"] == 0.7
    assert second["certified"] is second["certified_changed"] is second["input_change"] is None
    totals = result.totals()
    assert (totals["decisions_changed"], totals["tokens_changed"]) == (0.3, 0.4)
    assert totals["experts_kept"] == pytest.approx(0.8)
    assert (totals["certified"], totals["certified_decisions"]) == (0.8, 4)
    broken = small(certified=np.array([[1, 1, 1, 1, 1], [-1] * 5]))
    assert broken.totals()["certified_changed"] == broken.by_layer()[0]["certified_changed"] == 1


def test_costs_leave_out_what_is_not_known():
    costs = small().costs()
    assert costs["own"] == {
        "kl": pytest.approx(0.2), "largest": 0.3, "mean": pytest.approx(0.14),
        "large": pytest.approx(2 / 3), "loss": pytest.approx(0.06),
    }  # fmt: skip
    assert costs["replayed"]["large"] == 0 and costs["replayed"]["largest"] == 0.03
    nothing = small(replayed=np.full(5, NAN), kl_replayed=np.full(5, NAN)).costs()
    assert set(nothing["replayed"].values()) == {None}


def test_margins_positions_and_kinds_split_all_tokens():
    result = small()
    margins = result.by_margin()
    assert margins[0]["from"] == 0.1 and margins[-1]["to"] == 1.5
    assert margins[0]["changed"] == 0.5  # 0.1 changed, 0.2 did not
    positions = result.by_position()
    assert [(row["tokens_of"], row["tokens"]) for row in positions] == [
        ("0 to 0", 2), ("1 to 1", 2), ("2 to 2", 1)
    ]  # fmt: skip
    assert [row["changed"] for row in positions] == [0, 1, 0]
    kinds = {row["tokens_of"]: row for row in result.by_kind()}
    assert {name: row["tokens"] for name, row in kinds.items()} == {
        "number": 2, "start of a word": 2, "punctuation and signs": 1
    }  # fmt: skip
    assert kinds["number"]["changed"] == 1 and kinds["number"]["mean"] == 0.3


def test_layers_that_use_all_their_experts_have_no_margins():
    """Their gap is infinite."""
    gap = small().gap.copy()
    gap[1] = np.inf
    rows = small(gap=gap).by_margin()
    assert (rows[0]["from"], rows[-1]["to"]) == (0.1, 0.5)  # the first layer's
    assert small(gap=np.full_like(gap, np.inf)).by_margin() == []


def test_tokens_without_a_route_do_not_count():
    other = small().other_experts.copy()
    other[:, 1] = -1
    result = small(other_experts=other)
    assert result.totals()["tokens"] == 4 and result.totals()["tokens_changed"] == 0.25
    nothing = small(other_experts=np.full_like(other, -1))
    assert nothing.totals()["tokens_changed"] is None and nothing.by_margin() == []


def test_a_file_is_read_back_equal(tmp_path):
    result = small()
    result.save(tmp_path / "mismatch.npz")
    again = Mismatch.read(tmp_path / "mismatch.npz")
    for field in dataclasses.fields(result):
        np.testing.assert_array_equal(getattr(again, field.name), getattr(result, field.name))


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        (" the", "start of a word"), ("ing", "inside of a word"), (" 3.5", "number"),
        ("\n\n", "white space"), ("", "white space"), (" (", "punctuation and signs"),
        ("x1", "inside of a word"), ("_a", "punctuation and signs"),
    ],
)  # fmt: skip
def test_kinds_of_tokens(piece, kind):
    assert kind_of(piece) == kind
