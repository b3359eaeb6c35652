"""Validation data of a run as a subject: as many items as there are, in batches of one size."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from l2r.analysis.diagnostics.routing_gain import sample_evenly
from l2r.images.image_sources import open_images
from l2r.images.images import CenterCrop, ImageDataset
from l2r.text.manifest import TokenizerIdentity
from l2r.text.rows import balanced_rows
from l2r.text.token_writer import write_token_files
from l2r.text.tokens import TokenDataset
from l2r_lab.training import loop
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.run_inputs import open_run, validation_subject

ROWS, SIZE = 23, 8


@pytest.fixture
def text(tmp_path):
    """A task that validates on 23 rows."""
    identity = TokenizerIdentity("tiny", 200, eos_token_id=0)
    write_token_files(tmp_path, {"one": [[1] * (5 * ROWS - 1)]}, tokenizer=identity)
    dataset = TokenDataset(tmp_path, 5)
    assert len(dataset) == ROWS
    return SimpleNamespace(validation=dataset, choose_rows=balanced_rows)


def batches(subject, size=SIZE):
    return list(subject.batches(size, torch.device("cpu")))


@pytest.mark.parametrize(("asked", "expected"), [(16, 16), (ROWS, ROWS), (1_000_000, ROWS)])
def test_items_are_the_rows_that_exist_and_the_gain_takes_its_share_of_them(text, asked, expected):
    subject = validation_subject(None, text, load_recipe("demo/linear"), asked)
    assert subject.items == sum(len(batch["input_ids"]) for batch in batches(subject)) == expected
    few = sample_evenly(batches(subject), subject.items, 12, SIZE)
    assert sum(len(batch["input_ids"]) for batch in few) >= expected // 2


def test_no_batch_has_more_rows_than_was_asked(text):
    subject = validation_subject(None, text, load_recipe("demo/linear"), ROWS)
    assert [len(batch["input_ids"]) for batch in batches(subject)] == [8, 8, 7]
    assert [len(batch["input_ids"]) for batch in batches(subject, 2 * ROWS)] == [ROWS]


@pytest.mark.parametrize(("asked", "expected"), [(3, 3), (1_000_000, 4)])
def test_items_are_the_images_that_exist(tmp_path, asked, expected):
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(2):
                pixels = np.full((8, 8), number, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    dataset = ImageDataset(open_images(str(tmp_path))[1], size=8, channels=1, crop=CenterCrop())
    recipe = load_recipe("demo-vision/linear")
    task = SimpleNamespace(validation=dataset, recipe=recipe)
    subject = validation_subject(None, task, recipe, asked)
    assert subject.items == sum(len(batch["targets"]) for batch in batches(subject)) == expected


def test_a_run_is_not_opened_on_text_that_its_tokenizer_was_not_made_of(
    text_folder, tiny_changes, tmp_path
):
    own = shutil.copytree(text_folder, tmp_path / "own")
    changes = [*tiny_changes, f"data.corpus={own}", "training.steps=1"]
    recipe = load_recipe("demo/linear", changes)
    loop.train(recipe, tmp_path / "run", show_progress=False)
    assert open_run(tmp_path / "run", recipe).items == 8  # max_batches * batch_size
    (own / "animals" / "more.txt").write_text("wolf bear " * 300)
    with pytest.raises(ValueError, match="has changed since the run began"):
        open_run(tmp_path / "run", recipe)
