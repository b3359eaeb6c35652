"""accelerate's offload to CPU and disk: the same bits as without, in stock, swapped and own."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from l2r import L2RConfig, XMoEConfig
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.checkpoints.export import export_remote_code
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import LinearSipsConfig
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.tiers import few

SIX = ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe"]
CONFIG = L2RConfig(rank=2, heads=4)


def own():
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=8, router=CONFIG.to_dict())
    return L2rOlmoeForCausalLM(config).eval()


def models():
    """Stock as the control, swapped in three ways, and our own."""
    for name in SIX:
        yield f"stock {name}", tiny_model(FAMILIES[name])
        yield f"swapped {name}", swap_routers(tiny_model(FAMILIES[name]), CONFIG)
    yield "own", own()
    # Ernie's selection bias sits in a module of its own, which the swap carries over.
    yield "stock ernie4_5_moe", tiny_model(FAMILIES["ernie4_5_moe"])
    yield "swapped ernie4_5_moe", swap_routers(tiny_model(FAMILIES["ernie4_5_moe"]), CONFIG)
    for config in (XMoEConfig(), LinearSipsConfig()):
        yield f"{config.kind} in olmoe", swap_routers(tiny_model(FAMILIES["olmoe"]), config)


NAMES = [name for name, _ in models()]
SHOWN = few(NAMES, ("stock deepseek_v3", "swapped mixtral", "own"), "every kind of model")


@pytest.fixture(scope="module")
def made():
    """Each model once; what offloads one takes a copy."""
    return dict(models())


def logits(model):
    with torch.no_grad():
        return model(input_ids=sample_tokens()).logits


def half_on_disk(model, folder):
    """Options with which ``from_pretrained`` leaves every other part of the model on the disk."""
    parts = [f"model.{name}" for name, _ in model.model.named_children() if name != "layers"]
    parts += [f"model.layers.{index}" for index in range(len(model.model.layers))]
    places = {part: ("cpu", "disk")[index % 2] for index, part in enumerate(sorted(parts))}
    return {"device_map": {**places, "lm_head": "cpu"}, "offload_folder": folder / "offload"}


def on_disk(model, folder):
    """The model, saved and opened with the routers of at least one layer on the disk."""
    model.save_pretrained(folder / "saved")
    opened = load_pretrained(folder / "saved", **half_on_disk(model, folder))
    assert any(p.is_meta for name, p in opened.named_parameters() if "layers." in name)
    return opened


@pytest.mark.parametrize("name", SHOWN)
def test_offloaded_logits_are_those_without_offload(name, made, tmp_path):
    expected = logits(made[name])
    offloaded = copy.deepcopy(made[name])
    cpu_offload(offloaded, execution_device=torch.device("cpu"), offload_buffers=True)
    assert all(p.is_meta for p in offloaded.parameters())
    assert torch.equal(logits(offloaded), expected)
    assert torch.equal(logits(offloaded), expected)  # and again, after the tensors went
    offloaded = copy.deepcopy(made[name])
    disk_offload(offloaded, tmp_path / "disk", execution_device=torch.device("cpu"))
    assert torch.equal(logits(offloaded), expected)


@pytest.mark.parametrize("name", SHOWN)
def test_a_checkpoint_opens_with_layers_on_disk(name, made, tmp_path):
    opened = on_disk(made[name], tmp_path)
    assert torch.equal(logits(opened), logits(made[name]))


@pytest.mark.parametrize("name", ["stock olmoe", "swapped olmoe", "own"])
def test_a_checkpoint_larger_than_the_memory_given_opens_by_itself(name, made, tmp_path):
    made[name].save_pretrained(tmp_path / "saved")
    size = sum(p.numel() * p.element_size() for p in made[name].parameters())
    opened = load_pretrained(
        tmp_path / "saved",
        device_map="auto",
        max_memory={"cpu": size // 2},
        offload_folder=tmp_path / "offload",
    )
    assert any(p.is_meta for p in opened.parameters())
    assert torch.equal(logits(opened), logits(made[name]))


@pytest.mark.parametrize("name", [*SIX, "ernie4_5_moe"])
def test_an_offloaded_model_can_be_swapped(name, made, tmp_path):
    stock = made[f"stock {name}"]
    whole = swap_routers(copy.deepcopy(stock), CONFIG)
    offloaded = copy.deepcopy(stock)
    cpu_offload(offloaded, execution_device=torch.device("cpu"), offload_buffers=True)
    for _ in range(2):  # the family's routers by ours, and ours by ours
        swap_routers(offloaded, CONFIG)
        assert torch.equal(logits(offloaded), logits(whole))

    offloaded = on_disk(stock, tmp_path)
    swap_routers(offloaded, CONFIG)
    assert torch.equal(logits(offloaded), logits(whole))
    with pytest.warns(UserWarning, match="offloaded modules"):  # transformers' own
        offloaded.save_pretrained(tmp_path / "swapped")
    assert torch.equal(logits(load_pretrained(tmp_path / "swapped")), logits(whole))


@pytest.mark.parametrize("name", ["swapped olmoe", "swapped mixtral", "own"])
def test_an_exported_checkpoint_opens_with_layers_on_disk(name, made, tmp_path):
    folder = export_remote_code(made[name], tmp_path / "alone")
    # Auto classes would take the class that this process has by itself.
    reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    architecture = get_class_from_dynamic_module(reference, folder)
    alone = architecture.from_pretrained(folder)
    opened = architecture.from_pretrained(folder, **half_on_disk(alone, tmp_path))
    assert any(p.is_meta for p in opened.parameters())
    assert torch.equal(logits(opened), logits(alone))
