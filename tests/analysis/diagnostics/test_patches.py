"""Patch routing is what the routers say about each patch, and the figure shows it."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from l2r import capture
from l2r.analysis.diagnostics.patches import patch_routing, validation_patches
from l2r.files.arrays import PatchRouting
from l2r.hf.models import L2rViTConfig, L2rViTForImageClassification
from l2r.images.image_input import ImageInput
from l2r.images.image_sources import open_images
from l2r.images.images import CenterCrop, ImageDataset
from l2r.report.patches import compare_patches, patch_figure
from l2r_lab.training.recipes.vision_schema import ImageSection


@pytest.fixture
def model():
    config = L2rViTConfig(
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=48,
        num_hidden_layers=3,
        image_size=16,
        patch_size=4,
        num_labels=3,
        num_experts=5,
        moe_layers=[0, 2],
    )
    return L2rViTForImageClassification(config)


def route(model, images, grid, pixels=None):
    pixels = torch.zeros(images.shape, dtype=torch.uint8) if pixels is None else pixels
    labels = torch.arange(len(images))
    return patch_routing(model, images, grid, pixels=pixels, labels=labels, classes=("a", "b", "c"))


def test_each_patch_has_the_experts_the_router_gives_its_token(model):
    images = torch.randn(3, 3, 16, 16)
    routing = route(model, images, (4, 4))
    assert model.training  # as it was before
    model.eval()
    with torch.no_grad(), capture(model, inputs=True) as record:
        logits = model(images).logits
    assert routing.predictions.tolist() == logits.argmax(1).tolist()
    for layer, name in enumerate(routing.layers):
        tokens = record.inputs[name][0].view(3, 17, 32)
        router = model.get_submodule(name)
        for image, row, column in ((0, 0, 0), (1, 3, 2), (2, 1, 3)):
            with torch.no_grad():
                _, weights, indices = router(tokens[image, 1 + 4 * row + column])
            assert routing.experts[layer, image, row, column].tolist() == indices[0].tolist()
            np.testing.assert_allclose(routing.weights[layer, image, row, column], weights[0], 1e-5)
        with torch.no_grad():
            assert routing.class_token[layer, 2].tolist() == router(tokens[2, 0])[2][0].tolist()


def test_a_wrong_grid_is_refused_in_one_line(model):
    with pytest.raises(ValueError, match="give 10 tokens an image; the model routes 17"):
        route(model, torch.randn(2, 3, 16, 16), (3, 3))


def test_the_figure_paints_every_patch_with_its_expert(model, tmp_path):
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    routing = route(model, pixels / 255, (4, 4), pixels)
    routing.save(tmp_path / "p.npz")
    saved = PatchRouting.read(tmp_path / "p.npz")
    for field in dataclasses.fields(routing):
        assert np.array_equal(getattr(saved, field.name), getattr(routing, field.name))
    figure = patch_figure(saved, images=2)
    heatmaps = [trace for trace in figure.data if trace.type == "heatmap"]
    assert len(heatmaps) == 2 * 2  # images x layers
    assert np.array_equal(heatmaps[1].z, routing.experts[1, 0, ..., 0])
    assert list(heatmaps[0].x) == [1.5, 5.5, 9.5, 13.5]  # centers of 4-pixel patches
    first, weight = routing.experts[0, 1, 2, 3, 0], routing.weights[0, 1, 2, 3, 0]
    assert heatmaps[2].text[2][3].startswith(f"expert {first}: {weight:.3f}<br>expert ")
    titles = [note.text for note in figure.layout.annotations]
    assert titles[:3] == ["image", "layer 0", "layer 2"]
    wrong = [i for i in (0, 1) if routing.predictions[i] != i]
    assert sum("taken for" in title for title in titles) == len(wrong)
    assert len(figure.layout.coloraxis.colorscale) == 2 * 5

    both = compare_patches({"one": saved, "two": saved}, images=2)
    assert [n.text for n in both.layout.annotations[:3]] == ["image", "one", "two"]
    last = [trace.z for trace in both.data if trace.type == "heatmap"]
    assert len(last) == 4
    assert all(np.array_equal(z, routing.experts[1, i // 2, ..., 0]) for i, z in enumerate(last))
    other = dataclasses.replace(saved, images=saved.images[::-1])
    with pytest.raises(ValueError, match="only be compared on the same images"):
        compare_patches({"one": saved, "two": other})


def test_a_wrong_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="cannot read patch routing from"):
        PatchRouting.read(tmp_path / "none.npz")
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match="holds no patch routing: class_token, classes, experts"):
        PatchRouting.read(tmp_path / "other.npz")


def test_images_that_cannot_be_read_show_no_patches(model, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        for number in range(3):
            path = tmp_path / part / "a" / f"{number}.png"
            Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(path)
    (tmp_path / "val" / "a" / "0.png").write_bytes(b"no image")
    dataset = ImageDataset(open_images(str(tmp_path))[1], size=16, channels=3, crop=CenterCrop())
    images = ImageInput(dataset, ImageSection(mean=(0.5,) * 3, deviation=(0.5,) * 3))
    assert validation_patches(model, images, 1) is None  # the first of all
    routing = validation_patches(model, images, 2)  # the first and the last
    assert routing is not None and len(routing.labels) == 1
