"""Images of a checkpoint as batches, some of them unreadable."""

import numpy as np
import pytest
import torch
from PIL import Image

from l2r.training.data.image_sources import open_images
from l2r.training.data.images import CenterCrop, ImageDataset
from l2r.training.image_input import ImageInput
from l2r.training.recipes.vision_schema import ImageSection


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


def test_no_readable_image_is_refused_in_one_line(images):
    with pytest.raises(ValueError, match=r"none of 3 images can be read, e\.g\. .*\.png"):
        list(images(0, 1, 2).batches(3, 2, torch.device("cpu")))
