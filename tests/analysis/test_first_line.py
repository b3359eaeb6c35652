"""What a command on a checkpoint will take, compared with real tensors and counted products."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from l2r.analysis import Extent, first_line
from l2r.analysis.diagnostics.checks import check_model
from l2r.analysis.first_line import (
    Reads,
    about,
    announce,
    reads_of_check,
    reads_of_diagnosis,
    reads_of_fit,
)
from l2r.hf.checkpoints import Placement
from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import swap_routers
from l2r.kernels.dispatch import implementation
from l2r.routers import L2RConfig
from tests.analysis.diagnostics.models import ours
from tests.hf.families import tiny_model

CPU = Placement("auto", "cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A stock model, a run of ours, a swapped model and an image classifier, and their folders."""
    root = tmp_path_factory.mktemp("first-line")
    swapped = tiny_model(FAMILIES["mixtral"])
    swap_routers(swapped, L2RConfig(rank=2, heads=2))
    config = L2rViTConfig(
        image_size=8, patch_size=4, hidden_size=16, intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_labels=3, router={"kind": "linear"},
    )  # fmt: skip
    torch.manual_seed(0)
    models = {
        "stock": tiny_model(FAMILIES["olmoe"]),
        "run": ours(),
        "swapped": swapped,
        "images": L2rViTForImageClassification(config),
    }
    for name, model in models.items():
        model.eval().save_pretrained(root / name / ("model" if name == "run" else ""))
    return {name: (model, root / name) for name, model in models.items()}


@pytest.fixture
def one_flop_a_second(monkeypatch):
    monkeypatch.setattr(first_line, "product_speed", lambda *_: 1.0)
    monkeypatch.setattr(first_line, "_reading_speed", lambda files: float("inf"))


def said(work, placement=CPU, **options):
    lines = []
    announce(work, placement, lines.append, **options)
    return lines


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "under a minute"),
        (44, "under a minute"),
        (46, "about 1 minute"),
        (7.3 * 60, "about 7 minutes"),
        (23 * 60, "about 20 minutes"),
        (89 * 60, "about 90 minutes"),
        (100 * 60, "about 2 hours"),
        (23.4 * 3600, "about 20 hours"),
        (50 * 3600, "about 2 days"),
    ],
)
def test_a_time_has_one_digit(seconds, words):
    assert about(seconds) == words


@pytest.mark.parametrize("name", ["stock", "run", "swapped", "images"])
def test_the_time_is_that_of_the_products_of_a_forward(folders, one_flop_a_second, name):
    """torch counts the products of a real pass with its weights; each expert sees its own rows."""
    model, folder = folders[name]
    length = None if name == "images" else 24
    inputs = {"pixel_values": torch.randn(1, 3, 8, 8)}
    if length is not None:
        inputs = {"input_ids": torch.randint(3, 60, (1, length))}
    model.set_attn_implementation("eager")
    if name != "images":
        model.set_experts_implementation("eager")
    with torch.no_grad(), implementation("plain"), FlopCounterMode(display=False) as counter:
        model(**inputs)  # the fused router's products are not counted
    flops = counter.get_total_flops()
    if name == "images":  # nor those of our experts on a CPU, which see 4 patches and the class
        chosen = model.config.num_experts_per_tok / model.config.num_experts
        experts = [p for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3]
        flops += 2 * 5 * chosen * sum(p.numel() for p in experts)
    reads = [Reads(6, length, 4), Reads(2, length, 2, times=5), Reads(0, length, 1)]
    seconds = first_line._seconds(folder, reads, CPU)
    assert seconds == pytest.approx(16 * flops)
    (back,) = [Reads(2, length, 2, backward=True)]
    seconds = first_line._seconds(folder, [back], CPU)
    assert seconds == pytest.approx(3 * 2 * flops)


def test_products_are_those_of_active_parameters_and_attention(folders, one_flop_a_second):
    model, folder = folders["stock"]
    config, length = model.config, 24
    matrices = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    embedding = matrices.pop("model.embed_tokens.weight").numel()
    assert embedding
    experts = sum(p.numel() for name, p in matrices.items() if ".experts." in name)
    others = sum(p.numel() for p in matrices.values()) - experts
    active = others + experts * config.num_experts_per_tok / config.num_experts
    attention = config.num_hidden_layers * 2 * length * config.hidden_size
    reads = [Reads(1, length, 1)]
    seconds = first_line._seconds(folder, reads, CPU)
    assert seconds == pytest.approx(2 * length * (active + attention))
    routers = sum(p.numel() for name, p in matrices.items() if name.endswith("mlp.gate.weight"))
    searching = first_line._seconds(folder, reads, CPU, 128) - seconds
    assert routers and searching == pytest.approx(128 * first_line._SEARCH * 2 * routers)


@pytest.fixture
def measured(monkeypatch):
    """The time of small models, too, is worth a measurement."""
    monkeypatch.setattr(first_line, "_SHORT", 0)


def test_nothing_is_measured_for_what_is_short_on_any_machine(folders, monkeypatch):
    model, folder = folders["stock"]
    monkeypatch.setattr(first_line, "_seconds", lambda *_, **__: 420.0)
    reads = [Reads(2, 16, 2, times=3), Reads(1, 16, 1, backward=True)]
    (line,) = said([(folder, reads)])
    assert line.endswith(" of weights, 32 tokens, under a minute")
    assert said([(folder, [Reads(10**6, 256, 8)])])[0].endswith(", about 7 minutes")
    row = {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}
    with FlopCounterMode(display=False) as counter:
        model(**row)
    flops = counter.get_total_flops() * (2 * 3 + 3)
    assert flops / first_line._SLOW < first_line._at_most(folder, reads, 0) < 30
    assert first_line._at_most(folder, reads, 5) > first_line._at_most(folder, reads, 0)


@pytest.mark.usefixtures("measured")
def test_weights_are_those_of_the_files_and_of_memory_where_it_differs(folders, monkeypatch):
    model, folder = folders["stock"]
    size = sum(t.nbytes for t in model.state_dict().values())
    monkeypatch.setattr(first_line, "_seconds", lambda *_, **__: 420.0)
    work = [(folder, [Reads(32, 256, 8)])]
    assert said(work) == [f"{size / 1e6:.1f} MB of weights, 8,192 tokens, about 7 minutes"]
    (line,) = said(work, Placement("bfloat16", "cpu"))
    assert f" MB of weights ({size / 2e6:.1f} MB in bfloat16), 8,192 tokens, " in line
    (line,) = said([*work, *work])
    assert line == f"{2 * size / 1e6:.1f} MB of weights, 16,384 tokens, about 10 minutes"
    assert said(work, tokens=7)[0].split(", ")[1] == "7 tokens"
    _, images = folders["images"]
    assert said([(images, [Reads(5, None, 5)])])[0].split(", ")[1] == "5 images"


@pytest.mark.usefixtures("measured")
def test_what_cannot_be_told_is_left_out(folders, tmp_path):
    model, _ = folders["stock"]
    model.save_pretrained(tmp_path / "broken")
    config = json.loads((tmp_path / "broken" / "config.json").read_text())
    (tmp_path / "broken" / "config.json").write_text(json.dumps({**config, "model_type": "none"}))
    (line,) = said([(tmp_path / "broken", [Reads(2, 16, 2)])])
    assert line.endswith(" of weights, 32 tokens")
    (tmp_path / "broken" / "model.safetensors").unlink()
    assert said([(tmp_path / "broken", [Reads(2, 16, 2)])]) == ["32 tokens"]
    assert said([(tmp_path / "broken", [])]) == []
    (line,) = said([(folders["stock"][1], [])])
    assert line.endswith(" of weights")


@pytest.mark.usefixtures("measured")
def test_weights_on_disk_are_read_again_in_every_pass(folders, monkeypatch):
    model, folder = folders["stock"]
    size = sum(t.nbytes for t in model.state_dict().values())
    monkeypatch.setattr(first_line, "product_speed", lambda *_: float("inf"))
    monkeypatch.setattr(first_line, "_reading_speed", lambda files: 1.0)
    reads = [Reads(6, 16, 4, times=3)]  # two batches
    assert first_line._seconds(folder, reads, CPU) == size
    monkeypatch.setattr("l2r.hf.checkpoints.placement.available_memory", lambda: 1000)
    seconds = first_line._seconds(folder, reads, CPU)
    assert seconds == size + 6 * (size - 700)
    for places in ('{"model": "cpu", "lm_head": "disk"}',):
        here = Placement("auto", "cpu", places)
        assert "minute" not in said([(folder, reads)], here)[0]


@pytest.mark.parametrize("name", ["stock", "images"])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_check_reads_what_is_said(folders, name, rows):
    """Tokens or images of every forward pass, and those with gradients."""
    model, _ = folders[name]
    length = None if name == "images" else 80
    read = [0, 0]

    def count(module, args, options):
        values = next(v for v in (*args, *options.values()) if isinstance(v, torch.Tensor))
        read[torch.is_grad_enabled()] += len(values) if length is None else values.numel()

    batch = {"pixel_values": torch.randn(rows, 3, 8, 8)}
    if length is not None:
        batch = {"input_ids": torch.randint(3, 60, (rows, length))}
    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    check_model(model, batch)
    hook.remove()
    reads = reads_of_check(rows, length)
    assert read == [
        sum(r.rows * (r.length or 1) * r.times for r in reads if r.backward == backward)
        for backward in (False, True)
    ]


def test_reads_of_a_diagnosis_and_of_a_fit_follow_the_options(folders):
    _, images = folders["images"]
    extent = Extent(8, gain=16)
    first, gain = reads_of_diagnosis(images, 3000, 256, extent)
    assert (first.rows, first.length, gain.rows) == (3000, None, 2048)
    _, stock = folders["stock"]
    first, gain = reads_of_diagnosis(stock, 64, 256, extent, [Path("1"), Path("2")])
    assert (first.times, gain.rows, gain.times) == (3, 16, 3)
    text, held_out, trained = reads_of_fit(2000, 500, 100, 8, updates=0, train_steps=0)
    assert (text.times, held_out.times, trained.rows) == (0, 3, 0)
