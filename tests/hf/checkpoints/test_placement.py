"""Where weights go: dtypes, maps of devices, and checkpoints larger than the free memory."""

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import l2r
from l2r import L2RConfig
from l2r.hf.checkpoints import placement
from l2r.hf.checkpoints.placement import Placement
from l2r.hf.checkpoints.pretrained import load_model
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from tests.hf.families import sample_tokens, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "stock", max_shard_size="40KB")
    return tmp_path / "stock"


@pytest.fixture
def little_memory(monkeypatch, folder):
    """Half of what the weights take is free."""
    size = placement.weight_bytes(folder)
    monkeypatch.setattr(placement, "available_memory", lambda: size // 2)


@torch.no_grad()
def logits(model):
    return model(sample_tokens(), use_cache=False).logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, r"dtype must be one of auto, float32, .*; got 'int8'"),
        ({"device_map": "gpu"}, r"device_map must be one of auto, balanced.*; got 'gpu'"),
        ({"device_map": "{}"}, r"device_map must be one of .*; got '\{\}'"),
        ({"device_map": "[1]"}, r"device_map must be one of"),
        ({"device_map": '{"": "auto"}'}, r"device_map must be one of"),
        ({"device_map": '{"": "meta"}'}, r"device must be auto, cpu, .*; got 'meta'"),
        ({"device_map": '{"": "gpu"}'}, r"device must be .*; got 'gpu'"),
        ({"device": "gpu"}, r"device must be .*; got 'gpu'"),
        ({"device_map": '{"": [1]}'}, r"device must be .*; got '\[1\]'"),
    ],
)
def test_unknown_names_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Placement(**options)


@pytest.mark.parametrize("options", [{"device_map": '{"": 99}'}, {"device": "cuda:99"}])
def test_a_device_that_is_not_here_is_refused_before_weights_are_read(options, tmp_path):
    placement = Placement(**options)
    for ask in (placement.here, lambda: placement.options(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=r"device must be .*; got 'cuda:99'"):
            ask()


def test_dtypes_are_as_asked_and_routers_stay_in_float32(folder, tmp_path):
    model = replace_routers(load_model(folder, placement=Placement("bfloat16"))[0], L2RConfig())
    model.save_pretrained(tmp_path / "half")
    for dtype, expected in {"auto": torch.bfloat16, "float16": torch.float16}.items():
        loaded, _ = load_model(tmp_path / "half", placement=Placement(dtype))
        assert loaded.lm_head.weight.dtype == expected
        assert loaded.model.layers[0].mlp.gate.anchors.dtype == torch.float32


def test_a_checkpoint_that_fits_is_placed_whole(folder):
    assert set(Placement().options(folder)) == {"dtype"}
    model, _ = load_model(folder, placement=Placement())
    assert not any(p.is_meta for p in model.parameters())


def test_what_fits_is_a_matter_of_the_dtype_that_is_loaded(folder, tmp_path, monkeypatch):
    model, _ = load_model(folder, placement=Placement("bfloat16"))
    model.save_pretrained(tmp_path / "half")
    halves = 2 * sum(value.numel() for value in model.state_dict().values())
    for dtype, factor in {"auto": 1, "bfloat16": 1, "float32": 2, "float64": 4}.items():
        assert placement.weight_bytes(tmp_path / "half", dtype) == factor * halves
    monkeypatch.setattr(placement, "available_memory", lambda: 2 * halves)  # 0.7 of it for weights
    too_large = {d: Placement(d).is_too_large(tmp_path / "half") for d in ("auto", "float32")}
    assert too_large == {"auto": False, "float32": True}


def test_files_that_are_not_read_do_not_count_and_pickled_ones_do(tmp_path):
    values = {"a": torch.zeros(8), "codes": torch.zeros(8, dtype=torch.int8)}
    save_file(values, tmp_path / "model.safetensors")
    save_file(values, tmp_path / "consolidated.safetensors")
    assert placement.weight_bytes(tmp_path) == 8 * 4 + 8
    assert placement.weight_bytes(tmp_path, "bfloat16") == 8 * 2 + 8
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    torch.save(values, pickled / "pytorch_model.bin")
    size = (pickled / "pytorch_model.bin").stat().st_size
    assert placement.weight_bytes(pickled) == size > 8 * 4


def test_a_map_sends_layers_to_disk_in_a_folder_that_goes_with_the_model(folder):
    names = '"model.embed_tokens", "model.norm", "model.rotary_emb", "model.layers.0", "lm_head"'
    places = ", ".join(f'{name}: "cpu"' for name in names.split(", "))
    model, _ = load_model(
        folder, placement=Placement(device_map=f'{{{places}, "model.layers.1": "disk"}}')
    )
    assert all(p.is_meta for p in model.model.layers[1].parameters())
    assert torch.equal(logits(model), logits(l2r.load_pretrained(folder)))
    offloaded = {
        Path(hook.weights_map.dataset.save_folder)
        for module in model.modules()
        if (hook := getattr(module, "_hf_hook", None)) and getattr(hook, "weights_map", None)
    }
    (used,) = offloaded
    assert used.is_dir()
    del model
    gc.collect()
    assert not used.exists()


def test_a_checkpoint_larger_than_memory_is_written_as_one_that_fits(
    folder, little_memory, l2r, tmp_path, monkeypatch
):
    """In another dtype; as stored it goes file by file (test_copying.py)."""
    swapped, other = tmp_path / "swapped", ("--dtype", "bfloat16", "--out")
    ended = l2r("swap", folder, "rank=2", "heads=4", "--out", swapped)
    assert ended.code == 0 and "disk" not in ended.err, ended
    ended = l2r("export", swapped, *other, tmp_path / "by-disk")
    assert ended.code == 0, ended
    assert "layers stay on disk until they run" in ended.err
    monkeypatch.undo()
    ended = l2r("export", swapped, *other, tmp_path / "in-memory")
    assert ended.code == 0 and "disk" not in ended.err, ended
    parts = []
    for name in ("by-disk", "in-memory"):
        tensors = {}
        for file in (tmp_path / name).glob("*.safetensors"):
            tensors |= load_file(file)
        parts.append(tensors)
    assert parts[0].keys() == parts[1].keys()
    assert all(torch.equal(parts[0][key], parts[1][key]) for key in parts[0])


@pytest.mark.usefixtures("coarse")
@pytest.mark.slow("two diagnoses of a whole model")
def test_a_checkpoint_larger_than_memory_is_diagnosed_as_one_that_fits(
    folder, little_memory, l2r, tmp_path, monkeypatch
):
    documents = {"one": [list(range(2, 42))] * 8, "two": [list(range(20, 60))] * 8}
    identity = TokenizerIdentity(name="numbers", vocab_size=64, eos_token_id=0, sha256="0" * 64)
    write_token_files(tmp_path / "tokens", documents, tokenizer=identity)
    asked = (
        *("--data", tmp_path / "tokens", "--instances", "4", "--length", "16", "--sample", "32"),
        *("--certify", "2", "--text-tokens", "0", "--device", "cpu", "--json"),
    )
    by_disk = l2r("diagnose", folder, *asked, "--out", tmp_path / "by-disk")
    assert by_disk.code == 0, by_disk
    assert "layers stay on disk until they run" in by_disk.err
    monkeypatch.undo()
    whole = l2r("diagnose", folder, *asked, "--out", tmp_path / "whole")
    assert whole.code == 0 and "disk" not in whole.err, whole
    (by_disk_numbers,), (whole_numbers,) = json.loads(by_disk.out), json.loads(whole.out)
    for name in ("found_top1", "tightness_top1", "found_topk", "tightness_topk"):
        # the search's float64 products sum in an order that follows where weights lie in memory
        value = by_disk_numbers.pop(name)
        assert value == pytest.approx(whole_numbers.pop(name), rel=1e-9)
    assert by_disk_numbers == whole_numbers
