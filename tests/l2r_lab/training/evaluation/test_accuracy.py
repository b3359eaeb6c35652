"""Top-1 and top-5 accuracy against counting by hand."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from l2r.images.image_sources import ImageSource
from l2r.images.images import CenterCrop, ImageDataset, sample_indices
from l2r_lab.training.evaluation.accuracy import evaluate_accuracy


class Table(torch.nn.Module):
    """A classifier that knows its logits by the value of the first pixel."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, x):
        assert not self.training
        return SimpleNamespace(logits=self.logits[(x[:, 0, 0, 0] * 255).round().long()])


class Broken(ImageSource):
    def open(self, index):
        if index in (3, 4):
            return Image.open(BytesIO(b"no image"))
        return super().open(index)


def dataset(labels, kind=ImageSource):
    pixels = np.repeat(np.arange(len(labels), dtype=np.uint8), 16).reshape(-1, 4, 4)
    source = kind(pixels, np.asarray(labels), tuple(f"c{i}" for i in range(max(labels) + 1)))
    return ImageDataset(source, size=4, channels=1, crop=CenterCrop(share=1.0))


def evaluate(model, data, **options):
    return evaluate_accuracy(model, data, mean=[0.0], deviation=[1.0], **options)


def by_hand(logits, labels):
    first = five = 0
    loss = 0.0
    for row, label in zip(logits.double().numpy(), labels, strict=True):
        order = sorted(range(len(row)), key=lambda c: -row[c])
        first += order[0] == label
        five += label in order[:5]
        loss += np.log(np.exp(row).sum()) - row[label]
    return first / len(labels), five / len(labels), loss / len(labels)


def test_accuracy_and_loss_equal_counting_by_hand():
    labels = (np.arange(50) * 7 % 12).tolist()
    logits = torch.randn(50, 12)
    found = evaluate(Table(logits), dataset(labels), batch_size=8)
    expected = by_hand(logits, labels)
    assert (found.top1, found.top5) == expected[:2]
    assert found.loss == pytest.approx(expected[2], abs=1e-5)
    assert found.images == 50 and found.skipped == ()


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_count_nowhere(workers):
    labels = [0, 1, 2, 3, 4, 5, 0, 1]
    logits = torch.randn(8, 6)
    found = evaluate(Table(logits), dataset(labels, Broken), batch_size=3, workers=workers)
    kept = [0, 1, 2, 5, 6, 7]
    expected = by_hand(logits[kept], [labels[i] for i in kept])
    assert (found.top1, found.top5, found.images) == (*expected[:2], 6)
    assert found.skipped == ("image 3", "image 4")


def test_a_sample_is_fixed_and_drawn_from_everywhere():
    data = dataset([i // 40 for i in range(240)])
    chosen = sample_indices(data, 60)
    assert np.array_equal(chosen, sample_indices(data, 60)) and len(set(chosen.tolist())) == 60
    assert len(set(data.source.labels[chosen].tolist())) == 6
    assert evaluate(Table(torch.randn(240, 6)), data, max_images=60).images == 60
    for options in ({"max_images": 0}, {"max_images": -5}, {"batch_size": -1}):
        with pytest.raises(ValueError, match=rf"must be >= 1; got {next(iter(options.values()))}"):
            evaluate(Table(torch.randn(240, 6)), data, **options)


def test_the_models_mode_comes_back_and_progress_is_told():
    model, told = Table(torch.randn(10, 3)).train(), []
    found = evaluate(
        model,
        dataset([0, 1, 2] * 3 + [0]),
        batch_size=4,
        progress=lambda n, of: told.append((n, of)),
    )
    assert model.training
    assert told == [(4, 10), (8, 10), (10, 10)]
    assert found.top5 == 1.0  # three classes


def test_too_few_classes_and_nothing_readable_are_clear():
    with pytest.raises(ValueError, match=r"the model has 2 classes; got an image of class 'c2'"):
        evaluate(Table(torch.randn(3, 2)), dataset([0, 1, 2]))

    class Unreadable(ImageSource):
        def open(self, index):
            return Image.open(BytesIO(b"no image"))

    with pytest.raises(ValueError, match=r"none of 3 images can be read, e\.g\. image 0"):
        evaluate(Table(torch.randn(3, 3)), dataset([0, 1, 2], Unreadable))
