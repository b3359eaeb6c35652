"""swap, swap --fit and export of every layout: other routers, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import deserialize
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from l2r.hf.checkpoints import CheckpointCopy, load_pretrained
from l2r.hf.models import layout_of
from l2r.hf.swap import replace_routers
from l2r.hf.swap.sites import router_sites
from tests.hf.layouts import OPENED, copy_of, folder_of, sample, save, set_config, stored, write
from tests.tiers import few

FAST = ("mxfp4", "fp8_deepseek", "nf4_gate")
ROUTERS = ("model_type", "architectures", "l2r_swap", "auto_map")
NOTED = ("initializer_range", "tie_word_embeddings")  # or the value of one under l2r_, beside


def raw(folder):
    """dtype, shape and bytes of every tensor, as the library reads the files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in deserialize(file.read_bytes()):
            found[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    return found


def assert_only_routers_differ(old, new):
    """Every tensor, every field and every other file but those of routers."""
    before, after = raw(old), raw(new)
    gates = [name for name in before if ".mlp.gate." in name or ".mlp.router." in name]
    kept = [n for n in before if n not in gates or n.endswith("e_score_correction_bias")]
    assert gates and len(kept) > 10
    assert [name for name in kept if after.get(name) != before[name]] == []
    others = after.keys() - {*kept}
    assert others and all(".mlp.gate." in name or ".mlp.router." in name for name in others)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (old, new)]
    for field, value in configs[0].items():
        kept = configs[1].get(f"l2r_{field}" if field in NOTED else field, configs[1].get(field))
        assert field in ROUTERS or kept == value, field
    own = ("config.json", "README.md")
    for file in filter(Path.is_file, old.iterdir()):
        if file.name not in own and file.suffix != ".safetensors":
            assert (new / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("name", few(OPENED, FAST, "every layout"))
def test_a_swap_and_an_export_change_routers_and_nothing_else(l2r, tmp_path, name):
    folder, new, exported = folder_of(name), tmp_path / "new", tmp_path / "exported"
    ended = l2r("swap", folder, "rank=4", "heads=2", "--out", new)
    assert ended.code == 0, ended.err
    assert_only_routers_differ(folder, new)
    name = layout_of(folder).name
    assert f"{name} weights, copied as they are" in ended.err.splitlines()
    assert "compared byte by byte" in ended.err
    assert "unchanged, compared byte by byte" in (new / "README.md").read_text()
    ended = l2r("export", new, "--out", exported)
    assert ended.code == 0 and f"{name} weights, copied as they are" in ended.err.splitlines()
    assert raw(exported) == raw(new)
    assert_only_routers_differ(folder, exported)
    ids, code = sample(), {"trust_remote_code": True, "dtype": "auto"}
    plain = AutoModelForCausalLM.from_pretrained(exported, **code)
    assert torch.equal(plain(ids).logits, load_pretrained(new, dtype="auto")(ids).logits)


@pytest.mark.parametrize("name", few(OPENED, ("fp8",), "a fit of every layout"))
def test_a_fit_changes_routers_and_nothing_else(l2r, tmp_path, text_folder, name):
    folder, new = folder_of(name), tmp_path / "new"
    sizes = ("--tokens", "2000", "--held-out", "500", "--length", "32")
    ended = l2r(
        "swap", folder, "rank=4", "heads=2", "--fit", "--data", text_folder, *sizes, "--out", new
    )
    assert ended.code == 0, ended.err
    assert_only_routers_differ(folder, new)
    # what was measured is what the folder gives
    assert load_pretrained(new, dtype="auto")(sample()).logits.isfinite().all()


@pytest.mark.parametrize("name", few(OPENED, FAST, "every layout"))
def test_with_the_old_routers_put_back_logits_are_the_sources(l2r, tmp_path, name):
    folder, new = folder_of(name), tmp_path / "new"
    assert l2r("swap", folder, "rank=4", "heads=2", "--out", new).code == 0
    source, ids = load_pretrained(folder, dtype="auto"), sample()
    model = load_pretrained(new, dtype="auto")
    assert not torch.equal(model(ids).logits, source(ids).logits)
    for old, site in zip(router_sites(source), router_sites(model), strict=True):
        model.set_submodule(site.path, old.router)
    assert torch.equal(model(ids).logits, source(ids).logits)


@pytest.fixture(scope="module")
def sees(tmp_path_factory):
    """A wrapper with a vision tower, a block that transformers leaves aside, and other files."""
    folder = tmp_path_factory.mktemp("wrapper") / "sees"
    text = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    text |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 32}
    text |= {"shared_expert_intermediate_size": 32, "linear_num_value_heads": 2}
    text |= {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    text |= {"layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    vision |= {"out_hidden_size": 64, "patch_size": 8, "num_position_embeddings": 16}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, image_token_id=508)
    save(Qwen3_5MoeForConditionalGeneration(config).bfloat16(), folder)
    write(folder, stored(folder) | {"mtp.fc.weight": torch.randn(64, 128).bfloat16()})
    for name in ("preprocessor_config.json", "chat_template.json", "recipe.yaml", "LICENSE"):
        (folder / name).write_text('{"size": 8}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return folder


@pytest.mark.parametrize("fit", [False, True])
def test_a_wrapper_keeps_its_tower_its_processors_and_its_templates(
    l2r, tmp_path, text_folder, sees, fit
):
    new, exported = tmp_path / "new", tmp_path / "exported"
    sizes = ("--tokens", "800", "--held-out", "200", "--length", "32")
    more = ("--fit", "--data", text_folder, *sizes) if fit else ()
    assert l2r("swap", sees, "rank=4", "heads=2", *more, "--out", new).code == 0
    assert l2r("export", new, "--out", exported).code == 0
    template = Path("additional_chat_templates", "tools.jinja")
    for folder in (new, exported):
        assert_only_routers_differ(sees, folder)
        assert (folder / template).read_bytes() == (sees / template).read_bytes()
        config = json.loads((folder / "config.json").read_text())
        assert config["vision_config"]["depth"] == 1
    opened = load_pretrained(new)
    assert isinstance(opened, Qwen3_5MoeForConditionalGeneration) and opened.model.visual
    plain = AutoModelForImageTextToText.from_pretrained(exported, trust_remote_code=True)
    assert torch.equal(
        plain.model.visual.patch_embed.proj.weight, opened.model.visual.patch_embed.proj.weight
    )


@pytest.mark.parametrize("out", [(), ("--out", "new")])
def test_what_all_trained_weights_are_cannot_be_packed(l2r, text_folder, out):
    line = l2r(
        *("swap", folder_of("mxfp4"), "--fit", "--data", text_folder, "--train-steps", "1"), *out
    ).refusal()
    assert "is quantized (mxfp4)" in line and "Mxfp4Config(dequantize=True)" in line


@pytest.mark.parametrize("option", [("--dtype", "float32"), ("--device", "cpu")])
def test_without_a_fit_nothing_is_computed_so_no_dtype_is_taken(l2r, tmp_path, option):
    line = l2r("swap", folder_of("fp8"), *option, "--out", tmp_path / "new").refusal()
    assert option[0].removeprefix("--") in line and "give --fit too" in line


def test_codes_that_torch_has_no_dtype_for_are_copied_too(tmp_path):
    """e8m0 scales, six-bit floats: what the next quantizer brings."""
    folder = tmp_path / "stock"
    shutil.copytree(folder_of("fp8"), folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    end = max(entry["data_offsets"][1] for n, entry in header.items() if n != "__metadata__")
    header["model.layers.0.extra"] = {
        "dtype": "F8_E8M0",
        "shape": [3],
        "data_offsets": [end, end + 3],
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :] + b"\1\2\3")
    copy = CheckpointCopy.on_meta(folder)
    replace_routers(copy.model)
    copy.save(tmp_path / "new")
    assert raw(tmp_path / "new")["model.layers.0.extra"][2] == b"\1\2\3"


def damaged(folder, change):
    file = folder / "model.safetensors"
    tensors = stored(folder)
    if change == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    elif change == "no norm":
        write(folder, {n: t for n, t in tensors.items() if n != "model.norm.weight"})
    else:
        set_config(folder, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("cut", "model.safetensors cannot be read"),
        ("no norm", "weights are missing (model.norm.weight)"),
        ({"vocab_size": 1000}, "of another shape (lm_head.weight is [512, 128] in the files"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"initializer_range": None}, "initializer_range"),
    ],
)
def test_a_damaged_quantized_folder_is_refused_in_one_line(l2r, tmp_path, change, said):
    folder = copy_of("fp8", tmp_path / "stock")
    damaged(folder, change)
    assert said in l2r("swap", folder, "--out", tmp_path / "new").refusal()
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


@pytest.mark.parametrize("metadata", [[1], {"total_parameters": "12"}, {"note": float("inf")}])
def test_what_stands_in_an_index_and_numbers_that_are_none_are_kept(l2r, tmp_path, metadata):
    folder, new = copy_of("fp8", tmp_path / "stock"), tmp_path / "new"
    set_config(folder, note=float("nan"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(stored(folder), "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    assert l2r("swap", folder, "rank=4", "--out", new).code == 0
    found = json.loads((new / index.name).read_text())
    assert found["metadata"]["total_size"] == sum(len(bits) for _, _, bits in raw(new).values())
    assert set(found["weight_map"]) == set(raw(new))


def test_a_quantized_folder_with_tied_embeddings_misses_nothing(l2r, tmp_path):
    folder, new = copy_of("fp8", tmp_path / "stock"), tmp_path / "new"
    tensors = {n: t for n, t in stored(folder).items() if n != "lm_head.weight"}
    write(folder, tensors, tie_word_embeddings=True)
    assert l2r("swap", folder, "rank=4", "heads=2", "--out", new).code == 0
    assert_only_routers_differ(folder, new)
    model = load_pretrained(new, dtype="auto")
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_the_parameters_that_an_index_counts_are_those_of_the_copy(l2r, tmp_path):
    """Codes and scales are counted as whoever wrote the index did: the difference is ours."""
    folder, new = copy_of("fp8", tmp_path / "stock"), tmp_path / "new"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(stored(folder), "model-00001-of-00001.safetensors")
    metadata = {"total_parameters": 10**6}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": metadata, "weight_map": places}))
    assert l2r("swap", folder, "rank=4", "heads=2", "--out", new).code == 0
    before, after = stored(folder), stored(new)
    new_numbers = sum(tensor.numel() for name, tensor in after.items() if name not in before)
    old_numbers = sum(tensor.numel() for name, tensor in before.items() if name not in after)
    assert new_numbers != old_numbers > 0
    found = json.loads((new / index.name).read_text())
    assert found["metadata"]["total_parameters"] == 10**6 + new_numbers - old_numbers


def test_pickled_codes_of_files_with_any_name_are_kept(l2r, tmp_path):
    folder, pickled, new = folder_of("fp8"), copy_of("fp8", tmp_path / "bin"), tmp_path / "new"
    tensors = stored(folder)
    (pickled / "model.safetensors").unlink()
    names = ("weights a.bin", "pytorch_model-3.bin")
    parts = {name: dict(list(tensors.items())[n::2]) for n, name in enumerate(names)}
    for name, part in parts.items():
        torch.save(part, pickled / name)
    places = {n: name for name, part in parts.items() for n in part}
    index = pickled / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert l2r("swap", pickled, "rank=4", "heads=2", "--out", new).code == 0
    assert_only_routers_differ(folder, new)
    assert {f.name for f in new.glob("*.safetensors")} == {
        "weights a.safetensors", "model-3.safetensors",
    }  # fmt: skip
    assert load_pretrained(new, dtype="auto")(sample()).logits.isfinite().all()


def test_an_exported_folder_that_is_swapped_names_the_package_and_no_code(l2r, tmp_path):
    first, exported, new = tmp_path / "first", tmp_path / "exported", tmp_path / "new"
    assert l2r("swap", folder_of("mxfp4"), "rank=4", "heads=2", "--out", first).code == 0
    assert l2r("export", first, "--out", exported).code == 0
    ended = l2r("swap", exported, "rank=2", "heads=2", "--out", new)
    assert ended.code == 0 and "trust_remote_code" not in ended.err + ended.out
    maps = [json.loads((f / "config.json").read_text())["auto_map"] for f in (first, new)]
    assert maps[0] == maps[1] and "l2r-moe" in str(maps[1])


@pytest.mark.parametrize("settings", [None, {}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_a_tokenizer_is_copied_as_it_is(l2r, tmp_path, settings):
    folder, new, exported = copy_of("fp8", tmp_path / "stock"), tmp_path / "new", tmp_path / "out"
    (folder / "tokenizer_config.json").unlink()
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert l2r("swap", folder, "rank=4", "heads=2", "--out", new).code == 0
    assert l2r("export", new, "--out", exported).code == 0
    for file in folder.glob("tokenizer*.json"):
        assert (new / file.name).read_bytes() == file.read_bytes()
    assert (new / "tokenizer_config.json").exists() == (settings is not None)
    assert (exported / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    ids = [
        AutoTokenizer.from_pretrained(f)("The router").input_ids for f in (folder, new, exported)
    ]
    assert ids[0] == ids[1] == ids[2]
