"""Swaps and exports file by file: the same folders as those made in memory, to the bit."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor

from l2r import L2RConfig, LinearConfig, XMoEConfig
from l2r.hf.checkpoints.copying import CheckpointCopy
from l2r.hf.checkpoints.export import export_remote_code
from l2r.hf.checkpoints.pretrained import load_pretrained, save_model
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from tests.checkpoints import small_tokenizer
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.tiers import few_families

__all__ = ["small_tokenizer"]

CONFIG = L2RConfig(rank=2, heads=4)


def both(folder, out, config=CONFIG, **options):
    """Folders of one checkpoint, swapped file by file and in memory."""
    on_disk = CheckpointCopy.on_meta(folder)
    replace_routers(on_disk.model, config, **options)
    on_disk.save(out / "by-file", sections=["## How"])
    model = replace_routers(load_pretrained(folder, dtype="auto"), config, **options)
    save_model(model, out / "in-memory", sections=["## How"])
    return out / "by-file", out / "in-memory"


def both_exported(folder, out):
    """Folders of one checkpoint, exported file by file and in memory."""
    on_disk = CheckpointCopy.on_meta(folder)
    how = {"sections": ["## How"], "source": folder}
    export_remote_code(on_disk.model, out / "by-file", write=on_disk.write, **how)
    model = load_pretrained(folder, dtype="auto")
    export_remote_code(model, out / "in-memory", **how)
    return out / "by-file", out / "in-memory"


def bytes_of(folder):
    """Shape, dtype and bytes of every tensor of a folder."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            assert name not in tensors
            bits = tensor.flatten().view(torch.uint8).numpy().tobytes()
            tensors[name] = (tuple(tensor.shape), tensor.dtype, bits)
    return tensors


def assert_same(by_file, in_memory):
    assert bytes_of(by_file) == bytes_of(in_memory)
    texts, others = (
        {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
        - {file.relative_to(folder) for file in folder.glob("*.safetensors")}
        for folder in (in_memory, by_file)
    )
    assert {Path("config.json"), Path("README.md")} <= texts == others
    for name in texts - {Path("config.json")}:
        assert (by_file / name).read_text() == (in_memory / name).read_text(), name
    assert config_of(by_file) == config_of(in_memory)


def config_of(folder):
    """Fields of a config.json; a save in memory notes the dtype in those of parts too."""
    parts = json.loads((folder / "config.json").read_text())
    for part in parts.values():
        if isinstance(part, dict):
            part.pop("dtype", None)
    return parts


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_every_family_is_swapped_as_in_memory(name, tmp_path):
    tiny_model(FAMILIES[name]).save_pretrained(tmp_path / "stock")
    swapped, in_memory = both(tmp_path / "stock", tmp_path)
    assert_same(swapped, in_memory)
    assert_same(*both_exported(swapped, tmp_path / "exported"))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (XMoEConfig(rank=4), {"layers": [1], "selection": "router"}),
        (LinearConfig(), {"layers": [0]}),  # its matrix has the name of the old one's
        (L2RConfig(rank=2, heads=2, selection_bias=True), {"selection": "router"}),
    ],
)
@pytest.mark.parametrize("name", ["mixtral", "glm4_moe"])  # glm4_moe: layer 0 has no router
def test_some_layers_and_other_selections_too(name, config, options, tmp_path):
    if name == "glm4_moe" and "layers" in options:
        options = options | {"layers": [1]}
    tiny_model(FAMILIES[name]).save_pretrained(tmp_path / "stock")
    assert_same(*both(tmp_path / "stock", tmp_path, config, **options))


@pytest.mark.parametrize("config", [CONFIG, LinearConfig()])
def test_shards_keep_their_files_and_the_index_says_where_everything_is(config, tmp_path):
    stock = tmp_path / "stock"
    tiny_model(FAMILIES["deepseek_v3"]).bfloat16().save_pretrained(stock, max_shard_size="20KB")
    new, expected = both(stock, tmp_path, config)
    assert bytes_of(new).keys() == bytes_of(expected).keys()
    files = sorted(file.name for file in stock.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(file.name for file in new.glob("*.safetensors"))
    index = json.loads((new / "model.safetensors.index.json").read_text())
    for file in files:
        names = {name for name, place in index["weight_map"].items() if place == file}
        assert names == load_file(new / file).keys()
    sizes = [len(bits) for _, _, bits in bytes_of(new).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    old = json.loads((stock / "model.safetensors.index.json").read_text())
    numbers = [sum(math.prod(s) for s, *_ in bytes_of(f).values()) for f in (stock, new)]
    totals = [part["metadata"]["total_parameters"] for part in (old, index)]
    assert totals[1] - totals[0] == numbers[1] - numbers[0]
    ours, theirs = load_pretrained(new).state_dict(), load_pretrained(expected).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.slow("three swaps, written twice")
def test_a_swapped_checkpoint_and_one_of_ours_are_swapped_again(tmp_path):
    first, _ = both(_stock(tmp_path), tmp_path / "first")
    assert_same(*both(first, tmp_path / "again", XMoEConfig(rank=4), layers=[1]))
    router = {"kind": "l2r_sips", "rank": 2, "heads": 2}
    own = L2rOlmoeForCausalLM(L2rOlmoeConfig(**TINY, num_experts=8, router=router))
    own.save_pretrained(tmp_path / "run" / "model")
    assert_same(*both(tmp_path / "run", tmp_path / "own"))
    assert_same(*both_exported(tmp_path / "run", tmp_path / "exported"))


def test_generation_settings_and_logits_are_those_of_the_swap_in_memory(tmp_path):
    model = tiny_model(FAMILIES["olmoe"])
    model.generation_config.update(do_sample=True, temperature=0.3)
    model.save_pretrained(tmp_path / "stock")
    new, expected = both(tmp_path / "stock", tmp_path)
    assert_same(new, expected)
    assert load_pretrained(new).generation_config.temperature == 0.3
    ids = sample_tokens()
    assert torch.equal(load_pretrained(new)(ids).logits, load_pretrained(expected)(ids).logits)


def test_no_weights_but_the_routers_are_in_memory(tmp_path):
    on_disk = CheckpointCopy.on_meta(_stock(tmp_path))
    kept = [name for name, p in on_disk.model.named_parameters() if not p.is_meta]
    assert kept == [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]


def test_a_person_is_told_which_file_is_copied(tmp_path):
    stock = tmp_path / "stock"
    tiny_model(FAMILIES["olmoe"]).save_pretrained(stock, max_shard_size="40KB")
    copy = CheckpointCopy.on_meta(stock)
    replace_routers(copy.model, CONFIG)
    seen = []
    copy.save(tmp_path / "new", report=lambda *now: seen.append(now))
    files = sorted(file.name for file in stock.glob("*.safetensors"))
    assert seen == [(n, len(files), name) for n, name in enumerate([*files, ""])]


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_tensors_are_the_same_in_safetensors(tmp_path, l2r, shards):
    tiny_model(FAMILIES["olmoe"]).bfloat16().save_pretrained(tmp_path / "stock")
    pickled = tmp_path / "pickled"
    shutil.copytree(tmp_path / "stock", pickled)
    tensors = list(load_file(pickled / "model.safetensors").items())
    (pickled / "model.safetensors").unlink()
    if shards == 1:
        torch.save(dict(tensors), pickled / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-0000{n}-of-00003.bin" for n in (1, 2, 3)]
        routers = [pair for pair in tensors if ".gate." in pair[0]]
        others = [pair for pair in tensors if ".gate." not in pair[0]]
        thirds = (routers[::2] + others[::3], routers[1::2] + others[1::3], others[2::3])
        parts = dict(zip(files, map(dict, thirds), strict=True))  # none of routers in the last
        for file, part in parts.items():
            torch.save(part, pickled / file)
        places = {name: file for file, part in parts.items() for name in part}
        index = pickled / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    folders = [tmp_path / "from-pickled", tmp_path / "from-files"]
    for folder, out in zip((pickled, tmp_path / "stock"), folders, strict=True):
        assert l2r("swap", folder, "rank=2", "heads=4", "--out", out).code == 0
    assert bytes_of(folders[0]) == bytes_of(folders[1])
    assert len(list(folders[0].glob("model*.safetensors"))) == shards
    ids = sample_tokens()
    logits = [load_pretrained(folder)(ids).logits for folder in folders]
    assert torch.equal(*logits)


@pytest.mark.parametrize("damage", ["nan", "missing", "elsewhere"])
def test_damage_is_refused_in_one_line_and_nothing_is_written(damage, tmp_path, l2r):
    stock = tmp_path / "stock"
    tiny_model(FAMILIES["olmoe"]).save_pretrained(stock, max_shard_size="40KB")
    index = stock / "model.safetensors.index.json"
    places = json.loads(index.read_text())
    name = "model.layers.1.self_attn.q_proj.weight"
    file = stock / places["weight_map"][name]
    tensors = load_file(file)
    if damage == "nan":
        tensors[name][0, 0] = float("nan")
    elif damage == "missing":
        del tensors[name]
    else:
        (tmp_path / "other.safetensors").write_bytes(file.read_bytes())
        file.unlink()
        places["weight_map"] = {
            key: "../other.safetensors" if place == file.name else place
            for key, place in places["weight_map"].items()
        }
        index.write_text(json.dumps(places))
    if damage != "elsewhere":
        save_file(tensors, file, metadata={"format": "pt"})
    line = l2r("swap", stock, "rank=2", "--out", tmp_path / "new").refusal()
    assert {"nan": "not finite", "missing": name, "elsewhere": "other.safetensors"}[damage] in line
    assert not (tmp_path / "new").exists()


def _stock(tmp_path):
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


PROCESSOR = """
from transformers import ProcessorMixin
class OtherProcessor(ProcessorMixin):
    @classmethod
    def from_pretrained(cls, folder, **options):
        return cls.__name__
"""


def test_code_of_a_tokenizer_and_a_processor_that_the_configuration_names_is_kept(
    l2r, tmp_path, small_tokenizer
):
    """Entries of auto_map and their file, through a swap, a swap again and an export.

    transformers 5.24 reads that of the processor; older ones that of the tokenizer too.
    """
    old, new, again, exported = (tmp_path / name for name in ("old", "new", "again", "exported"))
    tiny_model(FAMILIES["mixtral"]).save_pretrained(old)
    small_tokenizer.save_pretrained(old)
    (old / "processing_other.py").write_text(PROCESSOR)
    names = {
        "AutoTokenizer": [None, "tokenization_other.OtherTokenizer"],
        "AutoProcessor": "processing_other.OtherProcessor",
    }
    values = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps({**values, "auto_map": names}))
    assert l2r("swap", old, "rank=2", "heads=4", "--out", new).code == 0
    assert l2r("swap", new, "rank=4", "heads=2", "--out", again).code == 0
    assert l2r("export", again, "--out", exported).code == 0
    for folder in (old, new, again, exported):
        found = json.loads((folder / "config.json").read_text())["auto_map"]
        assert {name: found[name] for name in names} == names
        assert (folder / "processing_other.py").read_text() == PROCESSOR
        opened = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
        assert opened == "OtherProcessor"
        assert load_pretrained(folder).can_generate()  # by no code of the folder
    card = (new / "README.md").read_text()
    assert "pip install 'l2r-moe[lm]'" in card and "trust_remote_code" not in card


def test_code_of_a_tokenizer_stays_named_after_a_swap_in_memory(tmp_path):
    tokenizers = {"AutoTokenizer": [None, "tokenization_other.OtherTokenizer"]}
    model = tiny_model(FAMILIES["mixtral"])
    model.config.auto_map = {"AutoConfig": "configuration_other.Other", **tokenizers}
    replace_routers(model, CONFIG)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        named = json.loads((folder / "config.json").read_text())["auto_map"]
        assert named["AutoTokenizer"] == tokenizers["AutoTokenizer"]
        assert "l2r-moe" in named["AutoConfig"]
        model = load_pretrained(folder)
        assert model.config.auto_map == tokenizers
