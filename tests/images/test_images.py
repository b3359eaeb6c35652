"""Image sources and batches: layouts, broken files, and the same images however they are read."""

import gc
import gzip
import multiprocessing
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from l2r.images.image_sources import ImageSource, folder_images, hold_out, open_images, read_idx
from l2r.images.images import CenterCrop, ImageDataset, ImageLoader, RandomCrop, read_ahead
from l2r_lab.vision.pixel_facts import image_facts

UNDO = {  # by EXIF orientation: from the image that is shown to the one that is stored
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def big_endian_tiff(values):
    """A TIFF file of 16 bits of gray, the high byte first."""
    height, width = values.shape
    data = values.astype(">u2").tobytes()
    entries = [  # tag, type (3: 16 bits, on the left), value
        (256, 4, width),
        (257, 4, height),
        (258, 3, 16 << 16),  # bits
        (259, 3, 1 << 16),  # not compressed
        (262, 3, 1 << 16),  # 0 is black
        (273, 4, 8),  # where the pixels begin
        (277, 3, 1 << 16),  # numbers a pixel
        (278, 4, height),
        (279, 4, len(data)),
    ]
    table = b"".join(struct.pack(">HHII", tag, kind, 1, value) for tag, kind, value in entries)
    head = b"MM\0*" + struct.pack(">I", 8 + len(data))
    return head + data + struct.pack(">H", len(entries)) + table + struct.pack(">I", 0)


def write_idx(path, array):
    data = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as stream:
        stream.write(data + array.astype(np.uint8).tobytes())


def photo(seed, size=(60, 40)):
    """Smooth colored image, so that JPEG and scaling change it little."""
    small = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    """ImageFolder layout: 2 classes, 5 + 2 images each, of three formats."""
    for part, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                suffix = (".jpg", ".png", ".JPEG")[number % 3]
                photo(100 * label + number).save(tmp_path / part / name / f"{number}{suffix}")
    return tmp_path


@pytest.fixture
def numbered():
    """40 gray images whose every pixel is the image's own number."""
    pixels = np.repeat(np.arange(40, dtype=np.uint8), 36).reshape(40, 6, 6)
    return ImageSource(pixels, np.arange(40) % 4, tuple("abcd"))


def test_folder_layout_gives_classes_labels_and_files(folder):
    train, validation = open_images(str(folder))
    assert train.classes == validation.classes == ("cat", "dog")
    assert train.labels.tolist() == [0] * 5 + [1] * 5
    assert len(validation.labels) == 4
    with train.open(7) as image:
        assert image.size == (60, 40)
    assert train.name(7).endswith("train/dog/2.JPEG")


def test_validation_classes_keep_the_labels_of_training(folder):
    for path in (folder / "val" / "cat").iterdir():
        path.unlink()
    (folder / "val" / "cat").rmdir()
    _, validation = open_images(str(folder))
    assert validation.labels.tolist() == [1, 1]
    (folder / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match="'zebra', which the training part has not"):
        open_images(str(folder))


def test_plain_folder_holds_out_a_fifth_of_each_class(folder):
    train, validation = open_images(str(folder / "train"))
    assert np.bincount(train.labels).tolist() == [4, 4]
    assert np.bincount(validation.labels).tolist() == [1, 1]


def test_digits_split_is_fixed_stratified_and_disjoint():
    from sklearn.datasets import load_digits

    train, validation = open_images("digits")
    assert len(train.labels) + len(validation.labels) == 1797
    digits = load_digits()
    numbers = [str(number) for number in range(1797)]  # the split alone
    kept, held = hold_out(ImageSource(numbers, digits.target, train.classes))
    assert set(kept.items).isdisjoint(held.items)
    assert np.array_equal(held.labels, validation.labels)
    assert np.all(np.abs(np.bincount(validation.labels) / np.bincount(train.labels) - 0.25) < 0.01)
    expected = digits.images[int(held.items[3])] * 255 / 16
    assert np.abs(np.asarray(validation.open(3)) - expected).max() <= 0.5


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_as_written(tmp_path, suffix):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4), dtype=np.uint8)
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", pixels)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", np.arange(6))
    train, validation = open_images(str(tmp_path))
    assert np.array_equal(np.asarray(validation.open(4)), pixels[4])
    assert train.labels.tolist() == list(range(6))


def test_broken_idx_files_are_refused_in_one_line(tmp_path):
    good = tmp_path / "a-ubyte"
    write_idx(good, np.zeros((3, 2, 2)))
    cut = tmp_path / "b-ubyte"
    cut.write_bytes(good.read_bytes()[:-1])
    with pytest.raises(ValueError, match="must hold 12 bytes of data; got 11"):
        read_idx(cut)
    cut.write_bytes(b"GIF89a")
    with pytest.raises(ValueError, match="is not an idx file of bytes"):
        read_idx(cut)
    bad_gzip = tmp_path / "c-ubyte.gz"
    bad_gzip.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot read"):
        read_idx(bad_gzip)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "digit",
            "images must be 'digits', .* a folder with train/.* got 'digit', .*data.images=FOLDER",
        ),
        ("{root}/empty", "must hold a folder per class with images"),
        ("{root}/partial", "must hold a file like t10k-images"),
    ],
)
def test_wrong_sources_are_refused_in_one_line(tmp_path, name, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "partial").mkdir()
    write_idx(tmp_path / "partial" / "train-images-idx3-ubyte", np.zeros((2, 2, 2)))
    write_idx(tmp_path / "partial" / "train-labels-idx1-ubyte", np.zeros(2))
    with pytest.raises(ValueError, match=words):
        open_images(name.format(root=tmp_path))


def test_missing_fashion_mnist_says_what_to_do(monkeypatch):
    monkeypatch.setattr("l2r.images.image_sources.FASHION_MNIST_FOLDER", Path("/nowhere"))
    with pytest.raises(ValueError, match="install Debian's dataset-fashion-mnist"):
        open_images("fashion-mnist")


def test_an_epoch_shows_every_image_once_and_ranks_share_a_batch(numbered):
    dataset = ImageDataset(numbered, size=6, channels=1, crop=CenterCrop(share=1.0), seed=5)
    steps = [dataset[dataset.places(step, 8)] for step in range(5)]
    seen = [int(v) for batch in steps for v in batch.pixels[:, 0, 0, 0]]
    assert sorted(seen) == list(range(40))
    assert seen != sorted(seen)
    for step in range(5):
        parts = [dataset[dataset.places(step, 8, rank=r, world_size=2)] for r in range(2)]
        joined = np.concatenate([part.pixels.numpy() for part in parts])
        assert np.array_equal(joined, steps[step].pixels.numpy())
        assert [p for part in parts for p in part.positions] == list(range(8 * step, 8 * step + 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_do_not_depend_on_workers_or_on_the_steps_before(folder, workers):
    train, _ = open_images(str(folder))
    dataset = ImageDataset(train, size=24, crop=RandomCrop(), seed=1)
    expected = [dataset[dataset.places(step, 4)] for step in range(4)]
    loader = ImageLoader(dataset, batch_size=4, workers=workers)
    for step in (0, 1, 2, 3, 1, 2):  # a resumed run asks for an earlier step
        got = loader.batch(step)
        assert np.array_equal(got.pixels.numpy(), expected[step].pixels.numpy())
        assert got.labels.tolist() == expected[step].labels.tolist()


def test_workers_end_with_their_loader_and_do_not_wait_for_the_collection_of_garbage(folder):
    train, _ = open_images(str(folder))
    loader = ImageLoader(ImageDataset(train, size=24, crop=RandomCrop()), batch_size=4, workers=1)
    gc.disable()
    try:
        loader.batch(0)
        assert multiprocessing.active_children()
        del loader
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


LOCK = threading.Lock()


class Locked:
    """A data set whose items need a lock, as those that log, decode or tokenize do."""

    def __getitem__(self, place):
        with LOCK:
            return place


def test_workers_do_not_wait_for_a_lock_of_another_thread():
    batches = []
    read = threading.Thread(
        target=lambda: batches.extend(read_ahead(Locked(), [1, 2, 3], 1)), daemon=True
    )
    with LOCK:
        read.start()
        read.join(100)
    assert batches == [1, 2, 3]


def test_crops_differ_between_epochs_and_seeds(folder):
    train, _ = open_images(str(folder))

    def crops(seed):
        dataset = ImageDataset(train, size=24, crop=RandomCrop(), seed=seed)
        found = {}
        for step in range(2):
            batch = dataset[dataset.places(step, 10)]
            order = np.argsort(batch.pixels.float().mean(dim=(1, 2, 3)).numpy())
            found[step] = batch.pixels[order]
        return found

    first, other = crops(0), crops(1)
    assert not np.array_equal(first[0].numpy(), first[1].numpy())
    assert not np.array_equal(first[0].numpy(), other[0].numpy())


def test_random_crops_keep_to_their_ranges():
    crop = RandomCrop(scale=(0.2, 0.5), aspect=(0.5, 2.0))
    draws = np.random.default_rng(0).random((300, crop.draws))
    boxes = np.array([crop.box(80, 60, d) for d in draws])
    wide, tall = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 80 and boxes[:, 3].max() <= 60
    share = wide * tall / 4800
    assert share.min() > 0.18 and share.max() < 0.52
    assert share.min() < 0.23 and share.max() > 0.46
    assert (wide / tall).min() > 0.47 and (wide / tall).max() < 2.1
    assert crop.box(1000, 4, draws[0]) == (496, 0, 504, 4)  # nothing fits: the middle


def test_center_crop_equals_pillow_by_hand(folder):
    train, _ = open_images(str(folder))
    dataset = ImageDataset(train, size=32, crop=CenterCrop(share=0.875))
    got = dataset.rows(np.array([1])).pixels[0].numpy()
    with train.open(1) as image:
        box = (12.5, 2.5, 47.5, 37.5)
        expected = image.convert("RGB").resize((32, 32), Image.Resampling.BICUBIC, box=box)
    assert np.array_equal(got, np.asarray(expected).transpose(2, 0, 1))


def test_fast_jpeg_decoding_stays_close_to_full_decoding(tmp_path):
    (tmp_path / "a").mkdir()
    photo(3, size=(512, 384)).save(tmp_path / "a" / "x.jpg", quality=95)
    photo(3, size=(512, 384)).save(tmp_path / "a" / "y.png")
    source = folder_images(tmp_path)
    batch = ImageDataset(source, size=32, crop=CenterCrop()).rows(np.array([0, 1]))
    with source.open(0) as image:
        image.draft("RGB", (96, 72))
        assert image.size[0] < 512  # pillow really decodes at a smaller scale
    jpeg, png = batch.pixels.float().numpy()
    assert np.abs(jpeg - png).mean() < 2.0


def test_corrupt_images_are_named_and_replaced_in_training(folder):
    broken = folder / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    (folder / "train" / "cat" / "2.JPEG").write_bytes(b"not an image")
    train, _ = open_images(str(folder))
    dataset = ImageDataset(train, size=24, crop=CenterCrop())
    batch = dataset[dataset.places(0, 10)]
    assert batch.pixels.shape == (10, 3, 24, 24)
    assert {name.split("/")[-1] for name in batch.skipped} == {"1.png", "2.JPEG"}
    clean = dataset.rows(np.array([3]))
    replaced = dataset.rows(np.array([1]), np.array([0]))  # image 3 takes the place of 1 and 2
    assert np.array_equal(replaced.pixels.numpy(), clean.pixels.numpy())
    assert replaced.labels.tolist() == [0]
    assert len(replaced.skipped) == 2


def test_corrupt_images_are_left_out_of_evaluation(folder):
    (folder / "val" / "dog" / "0.jpg").write_bytes(b"")
    _, validation = open_images(str(folder))
    batch = ImageDataset(validation, size=24, crop=CenterCrop()).rows(np.arange(4))
    assert batch.labels.tolist() == [0, 0, 1]
    assert batch.positions.tolist() == [0, 1, 3]
    assert [name.split("/")[-2:] for name in batch.skipped] == [["dog", "0.jpg"]]


def test_nothing_readable_is_one_clear_line(folder):
    for path in (folder / "train").rglob("*.*"):
        path.write_bytes(b"x")
    dataset = ImageDataset(open_images(str(folder))[0], size=8, crop=CenterCrop())
    with pytest.raises(ValueError, match="10 images in a row are unreadable"):
        dataset[dataset.places(0, 2)]


def test_gray_and_transparent_images_become_the_wanted_mode(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(tmp_path / "a" / "0.png")
    Image.new("L", (20, 20), 7).save(tmp_path / "a" / "1.png")
    source = folder_images(tmp_path)
    color = ImageDataset(source, size=8, crop=CenterCrop()).rows(np.arange(2)).pixels
    assert color.shape == (2, 3, 8, 8)
    assert color[1].unique().tolist() == [7]
    gray = ImageDataset(source, size=8, channels=1, crop=CenterCrop()).rows(np.arange(2)).pixels
    assert gray.shape == (2, 1, 8, 8)
    assert gray[0].unique().tolist() == [255]  # all transparent, over white


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["deep.png", "deep.tif"])
def test_sixteen_bits_of_gray_are_scaled_not_cut_at_255(tmp_path, channels, name):
    values = np.arange(16, dtype=np.uint16).reshape(4, 4) * 17 * 257  # 0 to 65535
    (tmp_path / "a").mkdir()
    Image.fromarray(values).save(tmp_path / "a" / name)
    images = ImageDataset(
        folder_images(tmp_path), size=4, channels=channels, crop=CenterCrop(share=1.0)
    )
    pixels = images.rows(np.array([0])).pixels
    assert (pixels == torch.arange(16, dtype=torch.uint8).view(4, 4) * 17).all()


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_pixels_without_a_known_range_are_unreadable_not_black_or_white(tmp_path, dtype):
    (tmp_path / "a").mkdir()
    Image.fromarray(np.ones((4, 4), dtype=dtype)).save(tmp_path / "a" / "x.tif")
    images = ImageDataset(folder_images(tmp_path), size=4, crop=CenterCrop())
    assert images.rows(np.array([0])).skipped == (f"{tmp_path}/a/x.tif",)


def test_a_hidden_folder_is_no_class_and_a_class_without_images_is_named(folder):
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    train, _ = open_images(str(folder))
    assert ".ipynb_checkpoints" not in train.classes
    (folder / "train" / "heic").mkdir()
    (folder / "train" / "heic" / "1.heic").write_bytes(b"of another kind")
    with pytest.raises(ValueError, match=r"heic must hold images \(\.avif"):
        open_images(str(folder))


@pytest.mark.parametrize("name", ["phone.jpg", "phone.png", "phone.webp", "phone.tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_read_as_it_is_shown(tmp_path, name, orientation):
    """Cameras store the sensor's rows, and in EXIF how to turn them."""
    (tmp_path / "a").mkdir()
    shown = Image.new("RGB", (48, 64), (64, 64, 64))  # no overshoot that would be cut
    shown.paste((192, 192, 192), (0, 0, 24, 24))  # at the top on the left
    stored, exif = shown.transpose(UNDO[orientation]) if orientation > 1 else shown, Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / "a" / name, exif=exif)
    source = folder_images(tmp_path)
    facts = image_facts(source)
    assert (facts.width, facts.height) == (48, 64)
    images = ImageDataset(source, size=32, crop=CenterCrop(share=1.0))
    with Image.open(tmp_path / "a" / name) as image:
        box = (0, 8, 48, 56)
        upright = ImageOps.exif_transpose(image).convert("RGB")
        expected = np.asarray(upright.resize((32, 32), Image.Resampling.BICUBIC, box=box))
    got = images.rows(np.array([0])).pixels[0].permute(1, 2, 0).numpy()
    # Columns and rows are rounded in turn, in another order: half a step each, the first by weights
    # of 1.25 together.
    assert np.abs(got.astype(int) - expected).max() <= 2


def test_a_crop_of_a_turned_photo_has_the_aspect_that_was_asked_for(tmp_path):
    """Twice as wide as tall, as shown: all of it is the white half."""
    (tmp_path / "a").mkdir()
    shown = Image.new("RGB", (40, 80), (0, 0, 0))
    shown.paste((255, 255, 255), (0, 30, 40, 50))
    exif = Image.Exif()
    exif[0x0112] = 6
    shown.transpose(UNDO[6]).save(tmp_path / "a" / "x.png", exif=exif)
    crop = RandomCrop(scale=(0.25, 0.25), aspect=(2.0, 2.0))
    images = ImageDataset(folder_images(tmp_path), size=8, crop=crop)
    pixels = images.rows(np.zeros(20, dtype=int), np.arange(20)).pixels.float() / 255
    # The crop is 20 rows of 80 and all columns: no row of it mixes white and black.
    assert (pixels.std(dim=3) < 0.01).all()


def test_sixteen_bits_of_gray_are_gray_in_any_order_of_bytes(tmp_path):
    values = np.arange(16, dtype=np.uint16).reshape(4, 4) * 17 * 257
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "deep.tif"
    path.write_bytes(big_endian_tiff(values))
    source = folder_images(tmp_path)
    with source.open(0) as image:
        assert image.mode == "I;16B"
    assert not image_facts(source).color
    images = ImageDataset(source, size=4, channels=1, crop=CenterCrop(share=1.0))
    expected = torch.arange(16, dtype=torch.uint8).view(4, 4) * 17
    assert (images.rows(np.array([0])).pixels == expected).all()
