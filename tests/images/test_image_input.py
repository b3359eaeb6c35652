"""Images of a checkpoint as batches, some of them unreadable."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from l2r.images.image_input import ImageInput, open_image_input
from l2r.images.image_sources import open_images
from l2r.images.images import CenterCrop, ImageDataset
from l2r_lab.training.recipes.vision_schema import ImageSection


@pytest.fixture
def images(tmp_path):
    """``images(*unreadable)``: three images, of which those with these numbers are no images."""

    def make(*unreadable):
        for part in ("train", "val"):
            (tmp_path / part / "a").mkdir(parents=True)
            for number in range(3):
                path = tmp_path / part / "a" / f"{number}.png"
                Image.fromarray(np.zeros((8, 8), dtype=np.uint8)).save(path)
                if number in unreadable:
                    path.write_bytes(b"no image")
        dataset = ImageDataset(open_images(str(tmp_path))[1], size=8, channels=1, crop=CenterCrop())
        return ImageInput(dataset, ImageSection(mean=(0.5,), deviation=(0.5,)))

    return make


@pytest.mark.parametrize("unreadable", [0, 2])
def test_a_batch_of_which_no_image_can_be_read_is_left_out(images, unreadable):
    batches = list(images(unreadable).batches(3, 1, torch.device("cpu")))
    assert [batch["targets"].tolist() for batch in batches] == [[0], [0]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("unreadable", [0, 2])
def test_images_that_are_left_out_are_counted_and_named_once(images, size, unreadable):
    lines = []
    batches = list(images(unreadable).batches(3, size, torch.device("cpu"), lines.append))
    assert sum(len(batch["targets"]) for batch in batches) == 2
    (line,) = lines
    assert line.startswith("left out 1 of 3 images, which cannot be read, e.g. ")
    assert line.endswith(f"{unreadable}.png")


def test_what_is_left_out_is_said_to_a_reader_of_the_only_batch(images):
    """``l2r check`` takes no more."""
    lines = []
    next(images(0).batches(3, 3, torch.device("cpu"), lines.append))
    assert len(lines) == 1


def test_of_readable_images_nothing_is_said(images):
    lines = []
    assert len(list(images().batches(3, 2, torch.device("cpu"), lines.append))) == 2
    assert lines == []


def test_no_readable_image_is_refused_in_one_line(images):
    with pytest.raises(ValueError, match=r"none of 3 images can be read, e\.g\. .*\.png"):
        list(images(0, 1, 2).batches(3, 2, torch.device("cpu")))


def class_folders(root, *classes):
    for shade, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(5):
            pixels = np.full((8, 8), 50 * shade, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return str(root)


def config_of(*names):
    id2label = dict(enumerate(names))
    return SimpleNamespace(num_channels=1, image_size=8, num_labels=len(names), id2label=id2label)


def test_classes_of_other_images_are_matched_with_the_model_s_by_name(tmp_path):
    data = class_folders(tmp_path / "images", "bee", "cat")
    dataset = open_image_input(tmp_path, config_of("ant", "cat", "bee"), data).dataset
    labels = {
        Path(dataset.source.name(i)).parent.name: int(dataset.source.labels[i]) for i in (0, 1)
    }
    assert labels == {"bee": 2, "cat": 1}
    assert dataset.classes == ("ant", "cat", "bee")


@pytest.mark.parametrize("names", [("ant", "bee", "cat"), ("dog", "bee"), ("x", "y", "z")])
def test_a_class_that_the_model_does_not_know_is_named(tmp_path, names):
    data = class_folders(tmp_path / "images", "bee", "cow")
    with pytest.raises(ValueError, match=r"class '(bee|cow)', which the model has not"):
        open_image_input(tmp_path, config_of(*names), data)


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1"), ("tench", "goldfish")])
def test_a_model_that_names_its_classes_otherwise_takes_as_many_in_order(tmp_path, names):
    data = class_folders(tmp_path / "images", "n01440764", "n01443537")
    dataset = open_image_input(tmp_path, config_of(*names), data).dataset
    assert dataset.source.labels.tolist() == [0, 1]
