"""Images of one's own: size, channels, mean and deviation are those of the folder, and are said."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification

import l2r as package
from l2r.files.folder import RunFolder
from l2r.hf.swap import swap_routers
from l2r.routers import RouterConfig
from l2r_lab.training import loop
from l2r_lab.training.pixels import with_pixels
from l2r_lab.training.recipes.load import dump_recipe, load_recipe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "vision.md"
TINY = [
    "model.hidden_size=16",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=16",
    "model.moe_layers=[1]",
    "training.steps=2",
    "training.global_batch=8",
    "training.micro_batch=8",
    "training.log_every=1",
    "evaluation.every=0",
    "evaluation.batch_size=16",
]


def make_images(root, mode="RGB", size=(32, 32), count=10, seed=0):
    """Two classes; returns the bytes of all training images, [n, H, W, C]."""
    rng, kept = np.random.default_rng(seed), []
    for part, share in (("train", count), ("val", 4)):
        for level, name in ((60, "dark"), (170, "light")):
            (root / part / name).mkdir(parents=True)
            for number in range(share):
                channels = len(Image.new(mode, (1, 1)).getbands())
                shift = np.arange(channels) * 20
                pixels = rng.normal(level + shift, 30, (*size[::-1], channels))
                pixels = pixels.clip(0, 255).astype(np.uint8)
                image = Image.fromarray(pixels.squeeze())
                image.save(root / part / name / f"{number}.png")
                if part == "train":
                    kept.append(pixels)
    return np.stack(kept)


@pytest.fixture
def colored(tmp_path):
    return tmp_path / "mine", make_images(tmp_path / "mine")


def train(folder, images, *changes, recipe="demo-vision/l2r-sips"):
    lines = []
    loaded = load_recipe(recipe, [*TINY, f"data.images={images}", *changes])
    result = loop.train(loaded, folder, show_progress=False, report=lines.append)
    assert result.finished
    return RunFolder(folder).read_recipe(), lines


def test_a_folder_of_color_images_is_not_read_as_small_gray_ones(colored, tmp_path):
    images, pixels = colored
    recipe, lines = train(tmp_path / "run", images)
    model, data = recipe["model"], recipe["data"]
    assert (model["image_size"], model["patch_size"], model["num_channels"]) == (32, 8, 3)
    shares = pixels.reshape(-1, 3) / 255
    assert data["mean"] == pytest.approx(shares.mean(0), abs=6e-4)  # three digits
    assert data["deviation"] == pytest.approx(shares.std(0), abs=6e-4)
    (line,) = (line for line in lines if str(images) in line)
    read = "image_size, patch_size, num_channels, mean, deviation from 20 training images"
    assert "32 x 32, color; the model reads 32 x 32, color" in line and read in line
    config = package.load_pretrained(tmp_path / "run").config
    assert (config.image_size, config.num_channels) == (32, 3)


def test_a_value_that_is_set_is_kept_and_what_it_does_is_said(colored, tmp_path):
    images, _ = colored
    changes = ["model.num_channels=1", "model.image_size=16"]
    recipe, lines = train(tmp_path / "run", images, *changes)
    assert (recipe["model"]["image_size"], recipe["model"]["num_channels"]) == (16, 1)
    assert len(recipe["data"]["mean"]) == 1
    (line,) = (line for line in lines if str(images) in line)
    assert "32 x 32, color; the model reads 16 x 16, gray" in line
    assert "(patch_size, mean, deviation from" in line


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.mean=[0.5]", "model.num_channels=3"], "data.mean must have model.num_channels=3"),
        (["data.mean=[0.5]", "data.deviation=[1,1,1]"], "as many numbers as data.deviation"),
        (["model.patch_size=64"], "patch_size=64 is larger than the images, 32 x 32"),
        (["data.mean=[0.5, 0.5]"], "must have 1 or 3 numbers; got"),
        (["model.image_size=31"], "image_size=31 cannot be cut into 4 to 16 patches"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(changes, words, colored, tmp_path):
    with pytest.raises(ValueError, match=words) as caught:
        train(tmp_path / "run", colored[0], *changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "size", "expected"),
    [
        ("L", (28, 28), (28, 7, 1)),  # as fashion-mnist
        ("L", (8, 8), (8, 2, 1)),  # as digits
        ("RGBA", (300, 240), (224, 16, 3)),  # as vit-s
        ("RGB", (13, 20), (12, 3, 3)),  # 13 is prime
    ],
)
def test_sizes_lead_to_the_packaged_recipes_patches(mode, size, expected, tmp_path):
    make_images(tmp_path, mode, size, count=2)
    model = with_pixels(load_recipe("demo-vision/linear", [f"data.images={tmp_path}"])).model
    assert (model.image_size, model.patch_size, model.num_channels) == expected


def test_packaged_values_hold_for_the_images_they_are_for(colored):
    images = f"data.images={colored[0]}"
    for name, values in {
        "demo-vision/linear": (8, 2, 1, (0.305,), (0.376,)),
        "fashion-mnist/linear": (28, 7, 1, (0.286,), (0.353,)),
        "vit-s/linear": (224, 16, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    }.items():
        for changes in ([], [images]) if name.startswith("vit-s") else ([],):
            recipe = load_recipe(name, changes)
            assert with_pixels(recipe) is recipe
            model, data = recipe.model, recipe.data
            sizes = (model.image_size, model.patch_size, model.num_channels)
            assert (*sizes, data.mean, data.deviation) == values
    assert load_recipe("fashion-mnist/linear", [images]).model.num_channels is None


def test_what_is_read_from_digits_is_what_their_recipe_says():
    packaged = load_recipe("demo-vision/linear")
    named = ("model.image_size", "model.patch_size", "model.num_channels")
    named += ("data.mean", "data.deviation")
    read = with_pixels(load_recipe("demo-vision/linear", [f"{name}=null" for name in named]))
    assert read.model == packaged.model
    for name in ("mean", "deviation"):
        # A thousand of 1,438 images, whose means differ by about 0.05.
        expected = getattr(packaged.data, name)
        assert getattr(read.data, name) == pytest.approx(expected, abs=5 * 0.05 / 1000**0.5)


def test_a_run_resumes_with_what_it_read(colored, tmp_path):
    images, _ = colored
    first, _ = train(tmp_path / "run", images)
    Image.new("RGB", (32, 32)).save(images / "train" / "dark" / "more.png")
    again, lines = train(tmp_path / "run", images)
    assert again == first and not any("training images" in line for line in lines)
    recipe = load_recipe(str(tmp_path / "run" / "recipe.yaml"))
    assert yaml.safe_load(dump_recipe(recipe)) == first


def test_image_classifiers_load_and_their_routers_are_swapped(colored, tmp_path):
    train(tmp_path / "run", colored[0])
    model = package.load_pretrained(tmp_path / "run")
    assert type(model).__name__ == "L2rViTForImageClassification" and not model.training
    images = torch.randn(2, 3, 32, 32)
    assert model(pixel_values=images).logits.shape == (2, 2)
    for layers, name in ((None, "all"), ([1], "one")):
        swap_routers(model, RouterConfig.from_dict({"kind": "linear"}), layers=layers)
        model.save_pretrained(tmp_path / name)
        again = package.load_pretrained(tmp_path / name)
        assert again.vit.layers[1].mlp.router.config.kind == "linear"
        assert torch.equal(again(pixel_values=images).logits, model(pixel_values=images).logits)


def test_a_stock_classifier_loads_but_has_no_router_to_swap(l2r, tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTForImageClassification(
        ViTConfig(**sizes, intermediate_size=16, image_size=8, patch_size=4)
    ).save_pretrained(tmp_path / "vit")
    assert type(package.load_pretrained(tmp_path / "vit")).__name__ == "ViTForImageClassification"
    ended = l2r("swap", tmp_path / "vit", "--out", tmp_path / "out")
    assert "'vit' has no router of a supported family" in ended.refusal()


def test_a_model_that_is_neither_is_refused_in_a_short_line(tmp_path):
    from transformers import ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="neither a causal language model nor an image") as caught:
        package.load_pretrained(tmp_path)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "command", [["swap", "{}", "--fit", "--out", "o"], ["export", "{}", "--out", "o"]]
)
def test_commands_for_language_refuse_a_classifier_in_one_line(
    command, l2r, colored, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    train(tmp_path / "run", colored[0])
    ended = l2r(*(part.format(tmp_path / "run") for part in command))
    assert "holds an image classifier, not a language model" in ended.refusal()


@pytest.mark.slow("a chain of commands")
def test_the_commands_of_the_page_go_from_a_folder_to_a_report(l2r, tmp_path, monkeypatch):
    """As they stand there, each training cut to two steps of a small model."""
    section = PAGE.read_text().split("## My own images, from a folder to a report", 1)[1]
    blocks = re.findall(r"```(bash|python)\n(.*?)```", section.split("\n## ", 1)[0], re.S)
    make_images(tmp_path / "my-images", count=8)
    monkeypatch.chdir(tmp_path)
    called = []
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "vision.md", "exec"), {})
            continue
        for line in text.splitlines():
            program, *words = shlex.split(line, comments=True)
            assert program == "l2r"
            small = {"train": TINY, "diagnose": ["--certify", "0"]}.get(words[0], [])
            ended = l2r(*words, *small)
            assert ended.code == 0, (line, ended.err)
            called.append(words[0])
    assert set(called) == {"train", "eval", "diagnose", "report", "swap"}
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()
