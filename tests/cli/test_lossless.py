"""Commands that write a folder from another: everything of it but the routers, or a refusal."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3OmniMoeThinkerForConditionalGeneration,
)

from l2r.hf.checkpoints import copying, load_pretrained
from l2r.hf.models.stored_bytes import stored_tensors
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from tests.hf.families import tiny_model
from tests.hf.omni import omni
from tests.hf.swap.test_composite_models import qwen
from tests.tiers import FAMILIES as FEW
from tests.tiers import few

WORDS = ["cat", "dog", "bird", "fish", "one", "two", "three", "four"]
METHODS = {
    "mxfp4": "Mxfp4Config(dequantize=True)",
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "compressed-tensors": "CompressedTensorsConfig(dequantize=True)",
    "bitsandbytes": "dequantize(torch.bfloat16)",
    "torchao": "take the checkpoint that it was quantized from",
    "gptq": "take the checkpoint that it was quantized from",
    "awq": "take the checkpoint that it was quantized from",
}


def add_tokenizer(folder):
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(folder)


def words(command, folder, text):
    """A command on a folder, with a fit that takes a moment."""
    name, *options = command.split()
    sizes = ("--data", text, "--updates", 0, "--tokens", 600, "--held-out", 300, "--length", 32)
    more = sizes if "--fit" in options else ()
    return (name, folder, *options, *more)


def stored(folder):
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def add(folder, **more):
    """Tensors besides those that a model of transformers saved."""
    tensors = stored(folder) | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def assert_kept(old, new):
    """Every tensor of the old folder but the routers', byte for byte."""
    before, after = stored(old), stored(new)
    others = [name for name in before if ".mlp.gate." not in name]
    assert len(others) > 10 and set(others) <= set(after)
    for name in others:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny OLMoE in bf16."""
    folder = tmp_path_factory.mktemp("plain") / "plain-moe"
    tiny_model(FAMILIES["olmoe"]).bfloat16().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    """A tiny DeepSeek-V3 with the block of layer 61, which transformers leaves aside."""
    folder = tmp_path_factory.mktemp("mtp") / "mtp-moe"
    tiny_model(FAMILIES["deepseek_v3"]).save_pretrained(folder)
    block = {
        name.replace(".1.", ".61.", 1): t for name, t in stored(folder).items() if ".1." in name
    }
    block = {name: t.clone() for name, t in block.items() if name.startswith("model.layers.61.")}
    add(folder, **block, **{"model.layers.61.eh_proj.weight": torch.randn(32, 64)})
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapper") / "sees-moe"
    qwen().save_pretrained(folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture
def refusal(l2r, tmp_path):
    """The line of a command that leaves nothing behind: on bad input, or with ``bug`` on ours."""

    def run(command, *arguments, bug=False):
        out = tmp_path / "models" / "out"
        ended = l2r(command, *arguments, "--out", out)
        assert not out.exists() and not any(tmp_path.rglob(".out*"))
        return ended.bug() if bug else ended.refusal()

    return run


@pytest.mark.parametrize("name", few(FAMILIES, (*FEW, "unlimited_ocr"), "every family"))
def test_a_swapped_folder_opens_with_every_tensor_that_stays(l2r, tmp_path, name):
    """Also where a part of a wrapper, by its class, has a table of its own for experts."""
    stock, swapped = tmp_path / "stock", tmp_path / "swapped"
    tiny_model(FAMILIES[name]).half().save_pretrained(stock)
    code, _, err = l2r("swap", stock, "--out", swapped)
    assert code == 0, err
    old, new = (load_pretrained(folder, dtype="auto") for folder in (stock, swapped))
    routers, tensors = {site.path for site in router_sites(new)}, new.state_dict()
    for path, value in old.state_dict().items():
        if not path.startswith(tuple(routers)):
            assert torch.equal(value, tensors[path]), path


@pytest.mark.parametrize("command", ["swap --fit --train-steps 1", "export --dtype bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_packed_weights_are_not_written_whole_and_the_line_says_the_way(
    plain, text_folder, tmp_path, refusal, method, command
):
    folder = tmp_path / "small-moe"
    shutil.copytree(plain, folder)
    set_config(folder, quantization_config={"quant_method": method})
    line = refusal(*words(command, folder, text_folder))
    assert f"{folder} is quantized ({method})" in line and METHODS[method] in line


def test_quantization_of_a_part_counts_and_an_empty_entry_does_not(
    plain, l2r, tmp_path, text_folder, refusal
):
    folder, command = tmp_path / "small-moe", "swap --fit --train-steps 1"
    shutil.copytree(plain, folder)
    set_config(folder, text_config={"quantization_config": {"load_in_4bit": True}})
    assert "is quantized (bitsandbytes)" in refusal(*words(command, folder, text_folder))
    set_config(folder, text_config=None, quantization_config=None)
    assert l2r("swap", folder, "--out", tmp_path / "new").code == 0
    assert_kept(folder, tmp_path / "new")


@pytest.mark.parametrize("command", ["swap", "swap --fit", "export"])
def test_a_base_with_an_adapter_beside_it_is_refused(
    plain, text_folder, tmp_path, refusal, command
):
    folder = tmp_path / "small-moe"
    shutil.copytree(plain, folder)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    line = refusal(*words(command, folder, text_folder))
    assert "it holds an adapter beside the weights" in line and "merge_and_unload" in line


def test_a_wrapper_is_swapped_whole(wrapper, l2r, tmp_path):
    """Every byte of its vision tower and of all else."""
    new = tmp_path / "new"
    ended = l2r("swap", wrapper, "--out", new)
    assert ended.code == 0, ended.err
    assert_kept(wrapper, new)
    before, after = (json.loads((f / "config.json").read_text()) for f in (wrapper, new))
    assert after["vision_config"] | before["vision_config"] == after["vision_config"]
    assert any("visual" in name for name in stored(new))
    assert l2r("export", new, "--out", tmp_path / "export").code == 0
    assert_kept(wrapper, tmp_path / "export")


@pytest.mark.parametrize("command", ["swap", "swap --fit"])
def test_a_part_of_a_wrapper_is_refused_by_what_it_lacks(text_folder, refusal, tmp_path, command):
    folder = tmp_path / "speaks-moe"
    omni().save_pretrained(folder)
    add_tokenizer(folder)
    line = refusal(*words(command, folder, text_folder))
    part = "Qwen3OmniMoeThinkerForConditionalGeneration"
    assert f"{folder} is a wrapper, and {part} is one part of it" in line
    assert "talker_config" in line and f"{part}.from_pretrained" in line


def test_a_copy_of_the_part_is_swapped_as_the_line_says(l2r, tmp_path):
    folder, copy, new = (tmp_path / name for name in ("speaks-moe", "copy", "new"))
    omni().save_pretrained(folder)
    Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder).save_pretrained(copy)
    assert l2r("swap", copy, "--out", new).code == 0
    assert_kept(copy, new)


def test_a_whole_wrapper_that_was_swapped_is_swapped_again(l2r, tmp_path):
    from l2r import swap_routers

    first, again = tmp_path / "first", tmp_path / "again"
    swap_routers(qwen()).save_pretrained(first)
    assert l2r("swap", first, "rank=2", "--out", again).code == 0
    assert_kept(first, again)
    assert "vision_config" in json.loads((again / "config.json").read_text())


def test_tensors_that_transformers_leaves_aside_are_kept_file_by_file(mtp, l2r, tmp_path):
    assert l2r("swap", mtp, "--out", tmp_path / "new").code == 0
    assert_kept(mtp, tmp_path / "new")
    assert "model.layers.61.eh_proj.weight" in stored(tmp_path / "new")
    assert l2r("export", tmp_path / "new", "--out", tmp_path / "export").code == 0
    assert_kept(mtp, tmp_path / "export")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_block_after_the_last_layer_is_left_aside_and_kept_at_any_depth(
    family, l2r, tmp_path, refusal
):
    """transformers knows the depth of the published checkpoints alone, 61 of DeepSeek-V3."""
    folder, new = tmp_path / "short-moe", tmp_path / "new"
    model = tiny_model(FAMILIES[family])
    depth = model.config.num_hidden_layers
    model.save_pretrained(folder)
    last = {n: t for n, t in stored(folder).items() if f".{depth - 1}." in n}
    block = {n.replace(f".{depth - 1}.", f".{depth}.", 1): t.clone() for n, t in last.items()}
    add(folder, **block)
    with pytest.raises(ValueError, match="not in the model"):  # a layer that config.json lacks
        load_pretrained(folder)
    add(folder, **block, **{f"model.layers.{depth}.eh_proj.weight": torch.randn(32, 64)})
    ids = torch.arange(8)[None]
    wanted = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
    assert torch.equal(load_pretrained(folder)(ids).logits, wanted)
    assert l2r("swap", folder, "--out", new).code == 0
    assert_kept(folder, new)
    assert load_pretrained(new)(ids).logits.shape == wanted.shape
    assert "leaves aside" in refusal("export", new, "--dtype", "bfloat16")
    set_config(folder, num_nextn_predict_layers=0)
    with pytest.raises(ValueError, match="not in the model"):
        load_pretrained(folder)


def test_a_fit_keeps_them_and_where_all_weights_are_trained_they_are_refused_before_it(
    mtp, text_folder, monkeypatch, refusal, l2r, tmp_path
):
    new = tmp_path / "new"
    assert l2r(*words("swap --fit", mtp, text_folder), "--out", new).code == 0
    assert_kept(mtp, new)
    monkeypatch.setattr("l2r.fitting.upcycle", None)  # no fit begins
    line = refusal(*words("swap --fit --train-steps 1", mtp, text_folder))
    assert f"{mtp} holds tensors that transformers leaves aside (model.layers.61.eh_proj" in line
    aside = [name for name in stored(mtp) if ".61." in name]
    assert f"and {len(aside) - 3} more" in line and "without --train-steps" in line


def test_an_export_of_the_loaded_model_without_them_is_refused_too(mtp, l2r, tmp_path, refusal):
    assert l2r("swap", mtp, "--out", tmp_path / "new").code == 0
    line = refusal("export", tmp_path / "new", "--dtype", "bfloat16")
    assert "leaves aside (model.layers.61.eh_proj.weight" in line


def test_an_mtp_block_outside_the_layers_is_kept_of_pickled_weights_too(tmp_path, l2r):
    folder = tmp_path / "next-moe"
    tiny_model(FAMILIES["qwen3_next"]).save_pretrained(folder)
    add(folder, **{"mtp.fc.weight": torch.randn(32, 64)})
    shutil.copytree(folder, tmp_path / "pickled")
    torch.save(stored(folder), tmp_path / "pickled" / "pytorch_model.bin")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    for source, out in ((folder, tmp_path / "new"), (tmp_path / "pickled", tmp_path / "other")):
        assert l2r("swap", source, "--out", out).code == 0
        assert_kept(folder, out)


def test_a_measurement_that_writes_nothing_is_not_refused(mtp, text_folder, l2r):
    ended = l2r(*words("swap --fit", mtp, text_folder))
    assert ended.code == 0, ended


def test_a_link_to_another_folder_is_refused_for_a_copy_before_the_load_and_measured(
    plain, text_folder, l2r, tmp_path, refusal, monkeypatch
):
    folder = tmp_path / "linked-moe"
    shutil.copytree(plain, folder)
    (tmp_path / "terms").write_text("mine")
    (folder / "LICENSE").symlink_to(tmp_path / "terms")
    assert l2r(*words("swap --fit", folder, text_folder)).code == 0
    monkeypatch.setattr("l2r.hf.checkpoints.load_model", lambda *_, **__: pytest.fail("loaded"))
    line = refusal(*words("swap --fit", folder, text_folder), "--out", tmp_path / "new")
    assert "LICENSE is a link to" in line


@pytest.mark.parametrize("command", ["swap", "swap --fit", "swap --fit --dtype bfloat16"])
def test_a_wider_tensor_is_kept_and_rounded_only_by_training_it(
    plain, text_folder, l2r, tmp_path, refusal, command
):
    folder, new = tmp_path / "wide-moe", tmp_path / "new"
    shutil.copytree(plain, folder)
    wide = torch.rand(32) + 1
    add(folder, **{"model.norm.weight": wide})
    assert l2r(*words(command, folder, text_folder), "--out", new).code == 0
    assert torch.equal(stored(new)["model.norm.weight"], wide)
    if command == "swap":
        line = refusal(*words("swap --fit --train-steps 1", folder, text_folder))
        assert "wider dtype than the model's (model.norm.weight)" in line
        assert "--dtype float32" in line


def test_buffers_of_older_checkpoints_that_the_model_makes_anew_are_no_loss(
    plain, text_folder, l2r, tmp_path
):
    folder = tmp_path / "old-moe"
    shutil.copytree(plain, folder)
    add(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    ended = l2r(*words("swap --fit", folder, text_folder), "--out", tmp_path / "new")
    assert ended.code == 0, ended


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("swap", "are unchanged, compared byte by byte"),
        ("swap --fit --dtype float32", "are unchanged, compared byte by byte"),
        ("swap --fit --train-steps 1", "were trained with them for 1 steps."),
        ("swap --fit --train-steps 1 --dtype float32", "for 1 steps and stored in float32."),
    ],
)
def test_the_card_says_unchanged_where_nothing_else_was_changed(
    plain, l2r, tmp_path, text_folder, options, said
):
    new = tmp_path / "new"
    assert l2r(*words(options, plain, text_folder), "--out", new).code == 0
    assert said in (new / "README.md").read_text()
    assert load_pretrained(new)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_tensor_that_is_not_written_as_it_was_is_named_and_nothing_stays(
    plain, tmp_path, monkeypatch, refusal, damage
):
    name, sharded = "model.layers.1.self_attn.q_proj.weight", tmp_path / "sharded"
    load_pretrained(plain, dtype="auto").save_pretrained(sharded, max_shard_size="20KB")

    whole = copying.write_tensors

    def write(file, tensors, metadata):
        other = dict(tensors)
        if name in other:
            other[name] = torch.zeros(32, 32, dtype=torch.bfloat16)
            if damage == "gone":
                del other[name]
        whole(file, other, metadata)

    monkeypatch.setattr(copying, "write_tensors", write)
    monkeypatch.setattr(copying, "copy_file", lambda old, new: write(new, *stored_tensors(old)))
    line = refusal("swap", sharded, bug=True)
    assert f"would differ from {sharded} besides the routers: {name}" in line


@pytest.mark.parametrize("field", ["rope_theta", "quantization_config"])
def test_a_field_that_is_not_written_as_it_was_is_named_too(plain, monkeypatch, refusal, field):
    whole = copying._config
    monkeypatch.setattr(copying, "_config", lambda *given: {**whole(*given), field: 7})
    assert f"besides the routers: {field}" in refusal("swap", plain, bug=True)


def test_a_tied_matrix_that_is_stored_twice_is_written_twice(l2r, tmp_path):
    folder = tmp_path / "tied-moe"
    tiny_model(FAMILIES["olmoe"], tie_word_embeddings=True).save_pretrained(folder)
    tied = stored(folder)["model.embed_tokens.weight"]
    torch.save(stored(folder) | {"lm_head.weight": tied}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert l2r("swap", folder, "rank=2", "--out", tmp_path / "new").code == 0
    new = load_pretrained(tmp_path / "new")
    assert torch.equal(new.lm_head.weight, tied)
    assert torch.equal(stored(tmp_path / "new")["lm_head.weight"], tied)
