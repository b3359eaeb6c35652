"""The vision task in the shared loop: it learns, resumes to the same bits, and keeps an average."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import ViTConfig, ViTForImageClassification

from l2r import capture
from l2r.files.folder import RunFolder
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.hf.checkpoints import load_image_classifier
from l2r.hf.models.card import CARD
from l2r.images.images import CenterCrop, ImageDataset
from l2r.text.shuffling import batch_indices
from l2r_lab.training import loop
from l2r_lab.training.average import WeightAverage
from l2r_lab.training.evaluation.accuracy import evaluate_accuracy
from l2r_lab.training.objective import auxiliary_losses
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.vision import VisionTask
from l2r_lab.vision.augmentation import augment
from tests.processes import command, on_ranks
from tests.tiers import few

RECIPES = {kind: f"demo-vision/{kind.replace('_', '-')}" for kind in PAPER_ROUTERS}
TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=32",
    "model.moe_layers=[1]",
    "training.steps=6",
    "training.global_batch=16",
    "training.micro_batch=16",
    "training.log_every=1",
    "optimizer.warmup=32",
    "evaluation.every=3",
    "evaluation.batch_size=16",
    "evaluation.max_batches=2",
    "checkpoint.every=2",
]
MIXED = [
    "data.augmentation.flip=0.5",
    "data.augmentation.randaugment=2",
    "data.augmentation.erasing=0.5",
    "data.augmentation.mixup=0.8",
    "data.augmentation.cutmix=1.0",
]
ONE = Ranks(0, 1, torch.device("cpu"))
# Weights after six steps of Adam at the rate 2e-3. Some have no gradient but rounding (the bias of
# the keys), which Adam scales up: a hundredth of what the steps may move them. A wrong mean or
# statistic moves weights by as much as the steps do.
SAME = 1e-2 * 6 * 2e-3


def recipe(*changes, kind="l2r_sips"):
    return load_recipe(RECIPES[kind], [*TINY, *changes])


def run(folder, *changes, **options):
    return loop.train(recipe(*changes), folder, show_progress=False, **options)


def weights(folder, name="model"):
    return load_file(Path(folder) / name / "model.safetensors")


def records(folder):
    kept = RunFolder(folder).read_metrics()
    return [{k: v for k, v in r.items() if k != "per_second"} for r in kept]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision") / "run"
    assert run(folder, *MIXED, "training.ema_decay=0.9").finished
    return folder


@pytest.mark.parametrize("kind", few(PAPER_ROUTERS, ("l2r_sips",), "trainings"))
def test_every_router_overfits_one_batch(kind):
    task = VisionTask(recipe("data.augmentation.label_smoothing=0.0", kind=kind), print)
    torch.manual_seed(0)
    model = task.build_model().train()
    batch = task.micro_batches(0, ONE)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(100):
        # A constant rate this large keeps throwing some routers out of the minimum again, at steps
        # that depend on the last bit of a sum.
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 100)
        with capture(model) as captured:
            loss = task.loss(model, batch)
        extra, _ = auxiliary_losses(captured, task.recipe.losses)
        optimizer.zero_grad()
        (loss + extra).backward()
        optimizer.step()
    blind = torch.special.entr(batch["targets"].mean(0)).sum()  # without a look at the images
    assert loss < 0.1 * blind


def test_the_seed_of_the_recipe_draws_images_and_augmentations():
    for seed in (0, 5):
        loaded = recipe(*MIXED, f"seed={seed}")
        task = VisionTask(loaded, print)
        (batch,) = task.micro_batches(1, ONE)
        order = batch_indices(len(task.train), 1, 16, seed=seed)
        chosen = task.train.rows(order, np.arange(16, 32))
        crops = ImageDataset(
            task.train.source, size=8, channels=1, crop=task.train.crop, seed=seed
        ).rows(order, np.arange(16, 32))
        assert torch.equal(chosen.pixels, crops.pixels)
        pixels, targets = augment(
            crops.pixels,
            crops.labels,
            crops.positions,
            classes=10,
            **loaded.data.augmentation.model_dump(),
            mean=(0.305,),
            deviation=(0.376,),
            seed=seed,
        )
        assert torch.equal(batch["pixel_values"], pixels)
        assert torch.equal(batch["targets"], targets)


def test_a_run_writes_accuracy_and_image_counts(unbroken):
    folder = RunFolder(unbroken)
    validation = folder.read_metrics("validation")
    assert [r["step"] for r in validation] == [3, 6]
    fields = {"ce", "top1", "top5", "evaluated", "skipped", "ema/top1", "ema/ce"}
    assert fields <= set(validation[-1])
    assert validation[-1]["evaluated"] == 32 and validation[-1]["skipped"] == 0
    assert folder.read_metrics("train")[-1]["images"] == 6 * 16
    facts = folder.read_json(folder.environment)
    assert facts["data"]["train_images"] == 1438 and facts["router"] == "l2r_sips"


def test_exported_models_have_the_recorded_accuracy(unbroken):
    folder = RunFolder(unbroken)
    task = VisionTask(recipe(), print)
    last = folder.read_metrics("validation")[-1]
    for averaged, prefix in ((False, ""), (True, "ema/")):
        model = load_image_classifier(unbroken, averaged=averaged)
        found = task.validate(model, torch.device("cpu"))
        assert found["top1"] == last[f"{prefix}top1"]
        assert found["ce"] == pytest.approx(last[f"{prefix}ce"], abs=1e-6)
        card = (folder.averaged_model if averaged else folder.model) / CARD
        assert ("moving average" in card.read_text()) == averaged
    assert model.config.id2label[7] == "7"


@pytest.mark.slow("trainings that die")
@pytest.mark.parametrize(("after", "workers"), [(1, 0), (3, 2), (5, 0)])
def test_a_run_that_dies_resumes_to_the_same_bits(after, workers, unbroken, tmp_path):
    def dying(step):
        if step == after:
            raise RuntimeError("the machine is gone")

    changes = [*MIXED, "training.ema_decay=0.9"]
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path / "run", *changes, on_step=dying)
    saved = (tmp_path / "run" / "recipe.yaml").read_text()
    (tmp_path / "run" / "recipe.yaml").write_text(
        saved.replace("workers: 0", f"workers: {workers}")
    )
    torch.manual_seed(1234)
    assert run(tmp_path / "run", *changes, f"data.workers={workers}").finished
    for name in ("model", "model-ema"):
        one, two = weights(unbroken, name), weights(tmp_path / "run", name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[n], two[n]) for n in one), name
    assert records(unbroken) == records(tmp_path / "run")


@pytest.mark.slow("whole trainings")
def test_accumulation_does_not_change_training(tmp_path):
    # RMSNorm, since BatchNorm's statistics are those of a micro-batch.
    changes = [*MIXED, "losses.balance_scope=step", "router.query_norm=rmsnorm"]
    run(tmp_path / "whole", *changes)
    run(tmp_path / "parts", *changes, "training.micro_batch=4")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], atol=SAME, rtol=0)


def test_activation_checkpointing_changes_nothing(tmp_path):
    """Running statistics of the query norm included: the second forward must not count."""
    run(tmp_path / "plain", "training.steps=3")
    run(tmp_path / "saving", "training.steps=3", "training.activation_checkpointing=true")
    plain, saving = weights(tmp_path / "plain"), weights(tmp_path / "saving")
    assert any("running_mean" in name for name in plain)
    for name in plain:
        torch.testing.assert_close(plain[name], saving[name], atol=SAME, rtol=0)


@pytest.mark.slow("a whole training")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_equal_one(parallel, tmp_path):
    changes = [*MIXED, "losses.balance_scope=step", "training.ema_decay=0.9"]
    one, two = tmp_path / "one", tmp_path / "two"
    run(one, *changes)
    train = ["train", RECIPES["l2r_sips"], *TINY, *changes, f"training.parallel={parallel}"]
    train += ["training.micro_batch=8", "--out", two]
    on_ranks(2, tmp_path / "output", command, *train)
    for name in ("model", "model-ema"):
        first, second = weights(one, name), weights(two, name)
        for key in first:
            torch.testing.assert_close(first[key], second[key], atol=SAME, rtol=0)
    for a, b in zip(records(one), records(two), strict=True):
        assert a["ce"] == pytest.approx(b["ce"], rel=16 * 2**-24)  # a mean over 16 images


def test_the_average_is_the_running_mean_of_the_weights():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    average = WeightAverage(model, 0.6)
    expected = model[0].weight.detach().double().clone()
    for step in range(12):
        with torch.no_grad():
            model[0].weight.add_(torch.randn(2, 3))
        model(torch.randn(8, 3))
        average.update(model, step)
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model[0].weight.detach().double()
    own, running = model[0].weight.detach().clone(), model[1].running_mean.clone()
    with average.applied(model):
        torch.testing.assert_close(model[0].weight.double(), expected, atol=1e-5, rtol=0)
        assert torch.equal(model[1].running_mean, running)
    assert torch.equal(model[0].weight, own)
    torch.testing.assert_close(average.parameters["0.weight"].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.slow("a whole training")
def test_training_learns(tmp_path):
    changes = ["training.steps=120", "training.global_batch=64", "training.micro_batch=64"]
    changes += ["evaluation.every=0", "checkpoint.every=0", "evaluation.max_batches=30"]
    run(tmp_path / "run", *changes, "optimizer.lr=0.005", "training.log_every=40")
    last = RunFolder(tmp_path / "run").read_metrics("validation")[-1]
    for name, chance in (("top1", 0.1), ("top5", 0.5)):  # five deviations of a guess above it
        assert last[name] > chance + 5 * (chance * (1 - chance) / last["evaluated"]) ** 0.5


@pytest.fixture
def folder(tmp_path):
    """Two classes of dark and bright images; one file of either part is broken."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("val", 6)):
        for name, level in (("dark", 40), ("bright", 200)):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.normal(level, 20, (12, 10, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number:02}.png")
    for part in ("train", "val"):
        (tmp_path / part / "dark" / "03.png").write_bytes(b"broken")
    return tmp_path


@pytest.mark.slow("whole trainings")
def test_an_image_folder_trains_and_broken_files_are_named_and_counted(folder, tmp_path):
    lines = []
    changes = [
        f"data.images={folder}",
        "model.image_size=8",
        "model.patch_size=2",
        "model.num_channels=3",
        "data.mean=[0.5,0.5,0.5]",
        "data.deviation=[0.3,0.3,0.3]",
        "training.steps=20",
        "optimizer.lr=0.005",
    ]
    loop.train(recipe(*changes), tmp_path / "run", show_progress=False, report=lines.append)
    last = RunFolder(tmp_path / "run").read_metrics("validation")[-1]
    assert last["top1"] == 1.0 and last["evaluated"] == 11 and last["skipped"] == 1
    assert {line for line in lines if "03.png" in line} == {
        f"skipped unreadable image {folder}/{part}/dark/03.png ({count} so far)"
        for part, count in (("train", 1), ("val", 2))
    }
    # A model of one data set on another: too many classes is one clear line.
    model = load_image_classifier(tmp_path / "run")
    digits = ImageDataset(
        VisionTask(recipe(), print).validation.source, size=8, crop=CenterCrop(share=1.0)
    )
    with pytest.raises(ValueError, match="the model has 2 classes; got an image of class"):
        evaluate_accuracy(model, digits, mean=[0.5] * 3, deviation=[0.3] * 3)


def test_a_dense_vit_is_upcycled_by_the_recipe(tmp_path):
    changes = ["model.num_labels=10", f"model.dense={tmp_path}"]
    section = recipe("model.num_labels=10").model.model_dump()
    sizes = {k: v for k, v in section.items() if k in ViTConfig.__dataclass_fields__}
    dense = ViTForImageClassification(ViTConfig(**sizes, num_labels=10))
    dense.save_pretrained(tmp_path)
    model = VisionTask(recipe(*changes), print).build_model()
    first, second = dense.vit.layers[1].mlp.fc2.weight, model.vit.layers[1].mlp.experts.down_proj
    assert all(torch.equal(first, expert) for expert in second)
    assert torch.equal(dense.classifier.weight, model.classifier.weight)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.num_labels=7"], "model.num_labels must be the number of classes of the data, 10"),
        (
            ["data.images=imagenet"],
            "a folder with train/ and val/.* got 'imagenet', .* data.images=FOLDER, or by --data",
        ),
        (
            ["data.augmentation.mixup=0.8", "training.micro_batch=1"],
            "training.micro_batch must be even",
        ),
        (["model.num_channels=3"], "data.mean must have model.num_channels=3 numbers"),
        (["model.moe_layers=[5]"], "moe_layers must be below num_hidden_layers=2"),
        (["model.patch_size=3"], "image_size must be a multiple of patch_size; got 8 and 3"),
        (["data.crop_scale=[1.0,0.5]"], "crop_scale must ascend"),
        (["data.augmentation.mixpu=1"], "unknown field data.augmentation.mixpu .*'mixup'"),
        (["training.tokens=5"], "training.tokens is for language"),
        (["task=visoin"], "task must be language or vision; got 'visoin'"),
    ],
)
def test_bad_recipes_are_refused_in_one_line(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words) as caught:
        run(tmp_path / "run", *changes)
    assert "\n" not in str(caught.value)
