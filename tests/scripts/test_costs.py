"""The costs of docs/re-run-the-paper.md are the planner's, and nothing else there differs."""

import json
import re

import pytest
import torch

from l2r.files.folder import RunFolder
from l2r_lab.training.checkpoint import save_checkpoint
from l2r_lab.training.ranks import Ranks
from scripts.pages import costs
from scripts.pages.marks import section_of
from tests.commands import command

PAGE = costs.PAGE.read_text("utf-8")


@pytest.fixture(scope="module")
def both():
    return costs.language(), costs.vision()


def test_the_table_on_the_page_is_what_the_planner_says(both, monkeypatch):
    monkeypatch.setattr(costs, "language", lambda: both[0])
    monkeypatch.setattr(costs, "vision", lambda: both[1])
    assert section_of(PAGE, costs.SECTION) == costs.table()


def test_the_table_counts_the_runs_and_takes_the_settings_of_the_page(both):
    assert re.search(rf"{both[0].runs} language runs.* and {both[1].runs} ViT runs", PAGE)
    assert (f"SHARE={costs.SHARE}", f"HOLD_OUT={costs.HOLD_OUT}") == tuple(
        re.search(rf"^{name}=[\d.]+", PAGE, re.M)[0] for name in ("SHARE", "HOLD_OUT")
    )
    assert costs.SUBSET == 200e9 and "SUBSET=200B" in PAGE
    assert f"--nproc-per-node {both[0].gpus}" in PAGE and f"--nproc-per-node {both[1].gpus}" in PAGE


def test_a_checkpoint_is_as_large_as_the_table_counts(tmp_path):
    model = torch.nn.Linear(256, 512, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    run = RunFolder(tmp_path / "run")
    run.create()
    saved = save_checkpoint(run, 1, model, optimizer, Ranks(0, 1, torch.device("cpu")), keep=1)
    held = sum(path.stat().st_size for path in saved.iterdir())
    count = 3 * 4 * 256 * 512  # as costs() counts: weights and two slots
    assert 0 <= held - count < 16_384  # names and the random state


def test_the_page_has_no_other_hours():
    rest = PAGE.replace(section_of(PAGE, costs.SECTION), "").partition("## With one GPU")[0]
    assert not re.search(r"\d\s*(GPU )?hours", rest)


def test_l2r_plan_gives_the_hours_of_a_vit(both):
    done = command(
        "plan", "vit-s/l2r-sips", "--gpus", "4", "--gpu", "a100", "--no-simulate", "--json"
    )
    assert json.loads(done.out)["best"]["hours"] == pytest.approx(both[1].hours)
    first, second = done.err.splitlines()[:2]
    assert first == "vit-s/l2r-sips on 4 a100, steps of 512: counting"
    assert second.startswith("by formula ddp, micro_batch ") and second.endswith("9.5 hours")
