"""The notes on the paper: their numbers are computed, their fields exist, citations find them."""

import re
from pathlib import Path

import pytest
import torch

from l2r.functional import load_balancing_loss
from l2r_lab.training.recipes.load import load_recipe

NOTES = Path(__file__).resolve().parents[2] / "docs" / "paper-notes.md"
SOURCES = NOTES.parents[1] / "src"
VARIANTS = ("paper", "olmoe", "hf", "tutel")


def note(title):
    """Text of the note that begins with this title."""
    (found,) = re.findall(
        rf"^- \*\*{re.escape(title)}.*?(?=^- |^#|\Z)", NOTES.read_text(), re.M | re.S
    )
    return " ".join(found.split())


def test_the_four_forms_of_the_balance_loss_have_the_values_of_the_note():
    even = (torch.arange(8) * 8 + torch.arange(64)[:, None]) % 64
    own = [torch.arange(8 * n, 8 * n + 8) for n in range(8)]
    logits = [torch.full((64, 64), -30.0).index_fill_(1, experts, 0.0) for experts in own]
    balanced, collapsed = (
        [round(float(load_balancing_loss(*given, variant=v)), 3) for v in VARIANTS]
        for given in ((torch.zeros(64, 64), even), (logits, [e.expand(64, 8) for e in own]))
    )
    assert balanced == [8, 1, 8, 1] and collapsed == [64, 8, 8, 8]
    text = note("Eq. 34, four forms")
    assert "`paper` is 8, `olmoe` 1 (over k), `hf` 8, `tutel` 1" in text
    assert "give 64, 8, 8 and 8" in text
    assert "Eq. 34, four forms" in load_balancing_loss.__doc__


def test_numbers_of_tables_3_and_14_follow_from_their_rows():
    assert round((4 * 26.9 + 62.1 + 40.2 + 62.1 + 68.8) / 8, 1) == 42.6
    assert "= 42.6" in note("Table 3, H = 64, Overall")
    error = 100 * (0.25 * 0.75 / 1024) ** 0.5
    assert [round((p - 25) / error, 1) for p in (22.7, 27.6)] == [-1.7, 1.9]
    assert "1.7 standard errors" in note("Table 14, MMLU is at chance")


def test_every_field_that_a_note_names_is_one_of_the_recipe():
    recipe = load_recipe("olmoe-1b-7b/l2r-sips").model_dump()
    sections = "training|optimizer|model|losses|checkpoint|router"
    named = re.findall(rf"`({sections})\.(\w+)`", NOTES.read_text())
    assert len(named) >= 10
    missing = [f"{s}.{name}" for s, name in named if s != "router" and name not in recipe[s]]
    assert not missing


# What the paper leaves open or says twice, and where the decision is changed.
DECIDED = {
    "Table 3, H = 64, Overall": "TASKS_OF",
    "Table 14, the checkpoint": "checkpoint.keep_nearest",
    "Table 14, MMLU is at chance": "l2r report",
    "Table 12, start of the warmup, end of the cosine, clipping": "training.clip_norm",
    "Table 12, rotary base, eps of norms, initial weights": "model.initializer_range",
    "Table 12, precision": "training.precision",
    "Eq. 34, four forms": "losses.balance_variant",
    'Table 12, "dropless"': "MoELayer",
    "Table 15, split of MMLU": "l2r eval --split test",
    "Inference table": "l2r_lab/inference.py",
    "Figures 4 and 9, mean over domains": "validation_loss",
    "Section 3.3, two norms in a row": "router.query_norm: none",
}


@pytest.mark.parametrize("title", DECIDED)
def test_each_decision_has_a_note_with_the_place_to_change_it(title):
    assert f"`{DECIDED[title]}`" in note(title)


def test_code_cites_notes_that_exist():
    cited = [
        title
        for package in ("l2r", "l2r_lab")
        for path in (SOURCES / package).rglob("*.py")
        for title in re.findall(
            r'"([^"]+)" in docs/paper-notes\.md', " ".join(path.read_text().split())
        )
    ]
    assert "Eq. 34, four forms" in cited
    for title in cited:
        assert note(title)
