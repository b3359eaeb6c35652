"""Layouts that checkpoints of the hub have: what each command answers, the same for all.

A row is a layout, a column a command; the words are how the command's answer begins. The numbers
of each are compared with those of transformers, or of the layout in one file.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap.families import FAMILIES
from tests.cli.test_lossless import add_tokenizer, stored
from tests.hf.families import sample_tokens, tiny_model
from tests.tiers import few

SHARD = "30KB"


def one_file(model, folder):
    model.save_pretrained(folder)


def shards(model, folder):
    model.save_pretrained(folder, max_shard_size=SHARD)
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def fused(model, folder):
    """Experts in one tensor, as transformers holds them."""
    model.save_pretrained(folder, save_original_format=False)


def pickled(model, folder):
    model.save_pretrained(folder)
    tensors = stored(folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickled_shards(model, folder):
    pickled(model, folder)
    tensors = list(torch.load(folder / "pytorch_model.bin").items())
    (folder / "pytorch_model.bin").unlink()
    places, half = {}, len(tensors) // 2
    for number, part in enumerate((tensors[:half], tensors[half:]), start=1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(dict(part), folder / file)
        places |= {name: file for name, _ in part}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def float16(model, folder):
    model.half().save_pretrained(folder)


LAYOUTS = (one_file, shards, fused, pickled, pickled_shards, float16)


@pytest.fixture(
    scope="module",
    params=few(LAYOUTS, (shards, fused), "every layout"),
    ids=lambda layout: layout.__name__,
)
def laid_out(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout") / "moe"
    request.param(tiny_model(FAMILIES["qwen3_moe"]), folder)
    add_tokenizer(folder)
    return folder


def others(model):
    return {n: t for n, t in model.state_dict().items() if ".mlp.gate." not in n}


def test_every_command_answers_for_every_layout(laid_out, l2r, text_folder, tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(laid_out).eval()
    assert torch.equal(
        load_pretrained(laid_out)(sample_tokens()).logits, whole(sample_tokens()).logits
    )
    swapped, fitted, exported = (tmp_path / name for name in ("swapped", "fitted", "exported"))
    sizes = ("--instances", 4, "--length", 16)
    table = {
        "check": ("check", laid_out, "--data", text_folder),
        "diagnose": ("diagnose", laid_out, "--data", text_folder, *sizes, "--out", tmp_path / "d"),
        "mismatch": (
            "mismatch", laid_out, "--against", "bf16", "--data", text_folder, *sizes,
            "--out", tmp_path / "m",
        ),
        "eval": ("eval", laid_out, "--data", text_folder, "--out", tmp_path / "e.json"),
        "swap": ("swap", laid_out, "--out", swapped),
        "swap --fit": ("swap", laid_out, "--fit", "--data", text_folder, "--out", fitted),
        "export": ("export", swapped, "--out", exported),
    }  # fmt: skip
    ended = {name: l2r(*words) for name, words in table.items()}
    findings = [line.split() for line in ended["check"].out.splitlines()]
    faults = [line[1] for line in findings if line and line[0] == "fault"]
    # Of a random model and eight words: experts without tokens, no text that is learned from.
    assert ended["check"].code in (0, 1) and set(faults) <= {"loads:"}, ended["check"].out
    del ended["check"]
    assert {name: (e.code, e.err[-300:]) for name, e in ended.items() if e.code} == {}
    for folder in (swapped, fitted, exported):
        options = {"trust_remote_code": True} if folder is exported else {}
        new = AutoModelForCausalLM.from_pretrained(folder, **options)
        kept = others(whole)
        assert kept.keys() <= new.state_dict().keys()
        assert all(torch.equal(kept[name], others(new)[name]) for name in kept)
