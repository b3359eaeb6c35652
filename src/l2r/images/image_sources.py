"""Sources of images: arrays (digits, idx files) and folders of image files.

``open_images`` gives the training and the validation part of one source.
"""

import gzip
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, UInt8
from PIL import ExifTags, Image

from l2r.errors import InputError
from l2r.text import epoch_order

# Debian's package dataset-fashion-mnist puts its files here; --data DIR names any other place.
FASHION_MNIST_FOLDER = Path("/usr/share/datasets/fashion-mnist")
IMAGE_SUFFIXES = frozenset(
    {
        ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".avif", ".ppm",
        ".tif", ".tiff",
    }
)  # fmt: skip
# What reading an image raises; SyntaxError is pillow's for a broken PNG chunk.
UNREADABLE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)
SIDEWAYS = frozenset(  # transposes that exchange width and height
    {
        Image.Transpose.TRANSPOSE,
        Image.Transpose.TRANSVERSE,
        Image.Transpose.ROTATE_90,
        Image.Transpose.ROTATE_270,
    }
)
_TURNS = {  # by the orientation that EXIF gives
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ALPHA = frozenset({"RGBA", "RGBa", "LA", "La", "PA"})
_HELD_OUT = 0.2  # of each class, where the source has no validation part
_IDX_BYTE = 0x08
_MAX_IDX_BYTES = 1 << 32  # bytes, all of them in memory: 90 times Fashion-MNIST


@dataclass(frozen=True)
class ImageSource:
    """Labeled images that are opened one by one.

    items: the file of each image, or its bytes, [H, W] gray or [H, W, 3] color.
    """

    items: Sequence[str | UInt8[np.ndarray, "H W *C"]] | UInt8[np.ndarray, "n H W *C"]
    labels: Int[np.ndarray, " n"]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.items) != len(self.labels):
            raise ValueError(f"got {len(self.items)} images and {len(self.labels)} labels")

    def open(self, index: int) -> Image.Image:
        """Image as stored; raises OSError or ValueError when it cannot be read."""
        item = self.items[index]
        return Image.open(item) if isinstance(item, str) else Image.fromarray(item)

    def name(self, index: int) -> str:
        """Name of the image in messages."""
        item = self.items[index]
        return item if isinstance(item, str) else f"image {index}"

    def subset(self, indices: Int[np.ndarray, " m"]) -> "ImageSource":
        """Select images, in the order of ``indices``."""
        return ImageSource([self.items[i] for i in indices], self.labels[indices], self.classes)


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Transpose that turns the stored image into the shown one, by the camera's EXIF.

    None where the two are equal; pillow turns TIFF by itself.
    """
    if "exif" not in image.info:
        return None
    return _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))


def shown_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of the image that is shown."""
    width, height = image.size
    return (height, width) if turn_of(image) in SIDEWAYS else (width, height)


def in_bytes(image: Image.Image) -> Image.Image:
    """Gray of 16 bits scaled to 8, which pillow would cut at 255; transparency over white.

    Other images are returned as they are.
    Raises ValueError for numbers of 32 bits, which have no range that is known.
    """
    if image.mode in ("I", "F"):
        raise InputError(f"pixels must have 8 or 16 bits; got pillow's mode {image.mode!r}")
    if image.mode in _ALPHA or "transparency" in image.info:
        drawn = image.convert("RGBA")
        over = Image.alpha_composite(Image.new("RGBA", drawn.size, "white"), drawn)
        return over.convert("L" if image.mode in ("LA", "La", "L", "1") else "RGB")
    if not image.mode.startswith("I;16"):
        return image
    return Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))


def open_images(source: str) -> tuple[ImageSource, ImageSource]:
    """Training and validation images.

    ``source``: "digits" (scikit-learn's 1797 digits), "fashion-mnist" (idx files where Debian
    puts them), or a folder: with idx files (train-* and t10k-*, gzipped or not), with train/ and
    val/ in ImageFolder layout, or with one sub-folder per class. Without a validation part, a
    fifth of each class is held out, always the same images.

    Raises ValueError when there is no such source or it is not in one of these layouts.
    """
    if source == "digits":
        return hold_out(_digits())
    if source == "fashion-mnist":
        if not FASHION_MNIST_FOLDER.is_dir():
            raise InputError(
                f"Fashion-MNIST is not in {FASHION_MNIST_FOLDER}; give the folder of its idx files "
                "instead of 'fashion-mnist', or install Debian's dataset-fashion-mnist"
            )
        return _idx_pair(FASHION_MNIST_FOLDER)
    root = Path(source).expanduser()
    if not root.is_dir():
        raise InputError(
            f"images must be 'digits', 'fashion-mnist' or a folder with train/ and val/, in each a "
            f"sub-folder per class; got {source!r}, which is no folder: name one in the recipe, "
            f"data.images=FOLDER, or by --data FOLDER"
        )
    if any(root.glob("*-ubyte*")):
        return _idx_pair(root)
    if not (root / "train").is_dir():
        return hold_out(folder_images(root))
    train = folder_images(root / "train")
    for name in ("val", "validation", "test"):
        if (root / name).is_dir():
            return train, folder_images(root / name, train.classes)
    return hold_out(train)


def folder_images(root: Path, classes: Sequence[str] | None = None) -> ImageSource:
    """Files below one folder per class, the ImageFolder and ImageNet layout.

    classes: names that get labels 0, 1, ..., e.g. those of the training part; by default the
    sub-folders in order of their names, hidden ones left out. Raises ValueError for a missing
    folder, one without images, a class that is not in ``classes``, or one of no images.
    """
    if not root.is_dir():
        raise InputError(f"image folder must exist; got {root}")
    shown = (entry for entry in os.scandir(root) if not entry.name.startswith("."))
    folders = sorted(entry.name for entry in shown if entry.is_dir())
    given, classes = classes is not None, tuple(folders if classes is None else classes)
    paths: list[str] = []
    labels: list[int] = []
    for name in folders:
        if name not in classes:
            raise InputError(f"{root} has the class {name!r}, which the training part has not")
        files = sorted(_image_files(root / name))
        paths += files
        labels += [classes.index(name)] * len(files)
    suffixes = " ".join(sorted(IMAGE_SUFFIXES))
    if not paths:
        raise InputError(f"{root} must hold a folder per class with images ({suffixes})")
    empty = sorted(set(range(len(classes))) - set(labels))
    if empty and not given:  # a model would get a class that it never sees
        raise InputError(f"{root / classes[empty[0]]} must hold images ({suffixes})")
    return ImageSource(paths, np.array(labels, dtype=np.int64), classes)


def hold_out(source: ImageSource) -> tuple[ImageSource, ImageSource]:
    """Training part and a fifth of each class for validation, the same on every machine."""
    order = epoch_order(len(source.labels), 0, 0)
    held = np.zeros(len(source.labels), dtype=bool)
    for label in range(len(source.classes)):
        members = order[source.labels[order] == label]
        held[members[: round(len(members) * _HELD_OUT)]] = True
    if not held.any():
        raise InputError("too few images to hold some out; give a folder with train/ and val/")
    return source.subset(np.flatnonzero(~held)), source.subset(np.flatnonzero(held))


def read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Array of an idx file of bytes, gzipped or not. Raises ValueError for anything else."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            head = stream.read(4)
            dimensions = head[3] if len(head) > 3 else 0
            sizes = stream.read(4 * dimensions)
            if head[:3] != bytes([0, 0, _IDX_BYTE]) or len(sizes) < 4 * dimensions:
                raise InputError(f"{path} is not an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", sizes)
            count = math.prod(shape)
            if count > _MAX_IDX_BYTES:
                raise InputError(
                    f"{path} must hold at most {_MAX_IDX_BYTES} bytes; it says {count} bytes"
                )
            values = np.frombuffer(stream.read(count + 1), dtype=np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if values.size != count:
        got = "more" if values.size > count else values.size
        raise InputError(f"{path} must hold {count} bytes of data; got {got}")
    return values.reshape(shape)


def _digits() -> ImageSource:
    from sklearn.datasets import load_digits

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8)
    return ImageSource(pixels, data.target, tuple(str(name) for name in data.target_names))


def _idx_pair(root: Path) -> tuple[ImageSource, ImageSource]:
    parts = []
    for part in ("train", "t10k"):
        pixels = read_idx(_only(root, f"{part}-images*-ubyte*"))
        labels = read_idx(_only(root, f"{part}-labels*-ubyte*")).astype(np.int64)
        parts.append((pixels, labels))
    classes = tuple(map(str, range(max(int(labels.max()) for _, labels in parts) + 1)))
    train, validation = (ImageSource(*part, classes) for part in parts)
    return train, validation


def _only(root: Path, pattern: str) -> Path:
    paths = sorted(root.glob(pattern))
    if not paths:
        raise InputError(f"{root} must hold a file like {pattern}")
    return paths[0]


def _image_files(folder: Path) -> list[str]:
    # os.walk and strings: a Path for each of a million files would take minutes.
    return [
        f"{parent}/{name}"
        for parent, _, names in os.walk(folder)
        for name in names
        if name[name.rfind(".") :].lower() in IMAGE_SUFFIXES and not name.startswith(".")
    ]
