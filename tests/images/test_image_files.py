"""Files of pictures as people have them: transparency, suffixes, and what systems put beside."""

import numpy as np
import pytest
from PIL import Image, features

from l2r.images.image_sources import folder_images
from l2r.images.images import CenterCrop, ImageDataset


def pixels_of(folder):
    dataset = ImageDataset(folder_images(folder), size=32, crop=CenterCrop(share=1.0))
    batch = dataset.rows(np.arange(len(dataset.source.items)))
    assert not batch.skipped
    return batch.pixels


@pytest.mark.parametrize("kind", ["RGBA", "LA", "palette"])
def test_a_drawing_in_the_alpha_channel_is_seen_over_white(kind, tmp_path):
    """A black square on a transparent ground that is black below: as a viewer shows it."""
    for name, left in (("left", 2), ("right", 18)):
        (tmp_path / name).mkdir()
        alpha = np.zeros((32, 32), np.uint8)
        alpha[8:24, left : left + 12] = 255
        if kind == "palette":
            image = Image.fromarray((alpha == 0).astype(np.uint8), "P")
            image.putpalette([0, 0, 0, 0, 0, 0])
            image.save(tmp_path / name / "icon.png", transparency=1)
        else:
            channels = [np.zeros_like(alpha)] * (len(kind) - 1)
            Image.fromarray(np.stack([*channels, alpha], -1), kind).save(
                tmp_path / name / "icon.png"
            )
    one, other = pixels_of(tmp_path)
    assert not one.equal(other)
    shown = one.float()
    assert shown.max() > shown.min() and (one == other).sum() > 0
    ground = one.flatten(1)[:, 0] if one.shape[0] in (1, 3) else one.flatten(0, 1)[0]
    assert (ground == one.max()).all()  # white


def test_pictures_of_every_suffix_are_read_and_a_systems_own_files_are_not(tmp_path):
    kinds = {".jpg": "JPEG", ".jfif": "JPEG", ".gif": "GIF", ".png": "PNG", ".webp": "WEBP"}
    if features.check("avif"):
        kinds[".avif"] = "AVIF"
    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        for suffix, kind in kinds.items():
            Image.new("RGB", (32, 32), (90, 100, 50)).save(tmp_path / name / f"a{suffix}", kind)
            (tmp_path / name / f"._a{suffix}").write_bytes(b"\x00\x05\x16\x07")
    assert len(pixels_of(tmp_path)) == 2 * len(kinds)
