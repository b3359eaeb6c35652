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
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from l2r.hf.checkpoints import CheckpointCopy, load_pretrained
from l2r.hf.models import layout_of
from l2r.hf.swap import replace_routers
from l2r.hf.swap.sites import router_sites
from tests.hf.layouts import OPENED, folder_of, sample, save, stored, write
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


def test_what_all_trained_weights_are_cannot_be_packed(l2r, tmp_path, text_folder):
    line = l2r(
        *("swap", folder_of("mxfp4"), "--fit", "--data", text_folder, "--train-steps", "1"),
        *("--out", tmp_path / "new"),
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
