"""A model that was swapped in memory: saved with all that its folder has, or refused."""

import copy
import json
import pickle
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from l2r import L2RConfig, swap_routers
from l2r.hf.models.lossless import check_save
from l2r.hf.swap import replace_routers
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import sample_tokens, tiny_model
from tests.hf.swap.test_composite_models import qwen

CONFIG = L2RConfig(rank=2, heads=4)
ASIDE = {"model.layers.61.eh_proj.weight": torch.ones(32, 64)}


def add(folder, **more):
    tensors = load_file(folder / "model.safetensors") | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def set_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture(scope="module")
def mtp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp")
    tiny_model(FAMILIES["deepseek_v3"]).save_pretrained(folder)
    add(folder, **ASIDE)
    return folder


@pytest.fixture
def plain(tmp_path):
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def assert_refused(model, out, words):
    """By a save and an upload, before anything is made."""
    for save in (model.save_pretrained, model.push_to_hub):
        with pytest.raises(ValueError, match=words):
            save(str(out))
    assert not out.exists()


def test_a_swap_warns_of_tensors_that_are_left_aside_and_the_save_is_refused(mtp, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(mtp)
    with pytest.warns(UserWarning, match=r"save_pretrained refuses this model: .*61\.eh_proj"):
        swap_routers(model, CONFIG)
    assert model(sample_tokens()).logits.isfinite().all()
    words = r"L2rDeepseekV3ForCausalLM: its folder holds tensors .* \(model\.layers\.61\.eh_proj"
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_refused(one, tmp_path / "out", words)
    assert_refused(replace_routers(model, CONFIG, layers=[1]), tmp_path / "out", words)


def test_a_copy_without_them_is_saved_as_the_line_says(mtp, tmp_path):
    AutoModelForCausalLM.from_pretrained(mtp).save_pretrained(tmp_path / "copy")
    swapped = swap_routers(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"), CONFIG)
    swapped.save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_a_block_behind_the_last_layer_counts_and_layers_left_out_by_choice_do_not(plain, tmp_path):
    """transformers reports both as unexpected."""
    swap_routers(AutoModelForCausalLM.from_pretrained(plain, num_hidden_layers=1)).save_pretrained(
        tmp_path / "one"
    )
    add(plain, **{"model.layers.2.eh_proj.weight": torch.ones(32, 64)})
    model = replace_routers(AutoModelForCausalLM.from_pretrained(plain), CONFIG)
    assert_refused(model, tmp_path / "out", r"\(model\.layers\.2\.eh_proj\.weight\)")


def test_another_head_is_another_model(mtp, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(mtp, num_labels=3)
    swap_routers(model, CONFIG).save_pretrained(tmp_path / "new")
    assert (tmp_path / "new" / "model.safetensors").is_file()


def test_a_part_of_a_wrapper_is_refused_and_the_whole_is_saved(tmp_path):
    folder = tmp_path / "sees"
    qwen().save_pretrained(folder)
    part = replace_routers(AutoModelForCausalLM.from_pretrained(folder), CONFIG)
    assert_refused(part, tmp_path / "out", "is a wrapper, .* vision_config would be lost")
    whole = swap_routers(AutoModelForImageTextToText.from_pretrained(folder), CONFIG)
    whole.save_pretrained(tmp_path / "new")
    assert load_file(tmp_path / "new" / "model.safetensors").keys() >= {
        name for name in load_file(folder / "model.safetensors") if ".mlp.gate." not in name
    }
    add(folder, **{"mtp.fc.weight": torch.ones(32, 64)})
    whole = replace_routers(AutoModelForImageTextToText.from_pretrained(folder), CONFIG)
    assert_refused(whole, tmp_path / "out", r"leaves aside \(mtp\.fc\.weight\)")


def test_weights_that_transformers_unpacked_at_loading_are_refused(plain, tmp_path):
    """On a CPU it does so for fp8 and MXFP4 by itself."""
    model = AutoModelForCausalLM.from_pretrained(plain)
    set_config(plain, quantization_config={"quant_method": "fp8"})
    replace_routers(model, CONFIG)
    assert_refused(model, tmp_path / "out", r"folder is quantized \(fp8\).*FineGrainedFP8Config")


@pytest.mark.parametrize(
    ("method", "as_in_memory"),
    [("bitsandbytes", True), ("torchao", True), ("gptq", False), ("compressed-tensors", False)],
)
def test_weights_that_were_loaded_packed_are_refused_where_transformers_cannot_write_them(
    plain, tmp_path, method, as_in_memory
):
    model = swap_routers(AutoModelForCausalLM.from_pretrained(plain), CONFIG)
    config = SimpleNamespace(quant_method=method)
    model.hf_quantizer = SimpleNamespace(pre_quantized=True, quantization_config=config)
    assert_refused(model, tmp_path / "out", rf"loaded packed \({method}\)")
    if as_in_memory:
        check_save(model, save_original_format=False)
    else:
        with pytest.raises(ValueError, match="loaded packed"):
            check_save(model, save_original_format=False)
    model.hf_quantizer.pre_quantized = False  # transformers quantized a folder of whole weights
    check_save(model)


def test_whole_weights_from_a_bitsandbytes_folder_are_the_users_choice(plain, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(plain)  # as after model.dequantize()
    set_config(plain, quantization_config=BitsAndBytesConfig(load_in_8bit=True).to_dict())
    add(plain, **{"model.layers.0.self_attn.q_proj.SCB": torch.ones(32)})
    swap_routers(model, CONFIG).save_pretrained(tmp_path / "new")


def test_an_adapter_on_the_model_is_refused_and_one_that_comes_later_is_saved(mtp, tmp_path):
    """transformers sets the attribute, and then writes adapters alone."""
    model = AutoModelForCausalLM.from_pretrained(mtp)
    model._hf_peft_config_loaded = True
    replace_routers(model, CONFIG)
    assert_refused(model, tmp_path / "out", "it carries an adapter, which alone would be written")
    later = replace_routers(AutoModelForCausalLM.from_pretrained(mtp), CONFIG)
    later._hf_peft_config_loaded = True
    check_save(later)


def test_an_adapter_beside_the_weights_counts_where_transformers_cannot_read_it(
    plain, tmp_path, monkeypatch
):
    monkeypatch.setattr("l2r.hf.models.lossless.is_peft_available", lambda: False)
    model = AutoModelForCausalLM.from_pretrained(plain)
    (plain / "adapter_config.json").write_text("{}")
    replace_routers(model, CONFIG)
    assert_refused(model, tmp_path / "out", "holds an adapter beside the weights")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT's
def test_inside_pefts_model_the_same_holds_after_the_merge(mtp, plain, tmp_path):
    for folder in (mtp, plain):
        lora = LoraConfig(r=2, target_modules=["o_proj"])
        wrapped = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora)
        merged = replace_routers(wrapped, CONFIG).merge_and_unload()
        if folder == plain:
            merged.save_pretrained(tmp_path / "new")
        else:
            assert_refused(merged, tmp_path / "out", "leaves aside")


def test_a_folder_of_the_hub_is_looked_up_in_the_cache(mtp, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "l2r.hf.models.lossless.try_to_load_from_cache",
        lambda name, file, **options: str(mtp / file) if name == "some/moe" else None,
    )
    model = AutoModelForCausalLM.from_pretrained(mtp)
    model.name_or_path = model.config.name_or_path = "some/moe"
    replace_routers(model, CONFIG)
    assert_refused(model, tmp_path / "out", "leaves aside")
    other = AutoModelForCausalLM.from_pretrained(mtp)
    other.name_or_path = other.config.name_or_path = "not there"
    swap_routers(other, CONFIG).save_pretrained(tmp_path / "new")


@pytest.mark.parametrize("place", ["cache_dir", "subfolder", "relative path"])
def test_a_folder_is_found_again_wherever_it_was_opened(mtp, place, tmp_path, monkeypatch):
    """A cache of one's own, a part of a folder, and a path after a change of the directory."""
    commit = "0" * 40
    repository = tmp_path / "cache" / "models--some--moe"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(mtp, snapshot / "part")
    shutil.copytree(mtp, snapshot, dirs_exist_ok=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.chdir(repository)
    opened = {
        "cache_dir": ("some/moe", {"cache_dir": tmp_path / "cache", "local_files_only": True}),
        "subfolder": (snapshot, {"subfolder": "part"}),
        "relative path": (f"snapshots/{commit}", {}),
    }
    if place == "subfolder":
        (snapshot / "config.json").unlink()
    name, options = opened[place]
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="refuses this model: its folder holds tensors"):
        swap_routers(model, CONFIG)
    assert_refused(model, tmp_path / "out", "leaves aside")
