"""save_pretrained after a swap, load_pretrained in another process: the same model."""

import json

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import l2r
from l2r import L2RConfig, Router, XMoEConfig
from l2r.hf.checkpoints import load_causal_lm
from l2r.hf.checkpoints.pretrained import load_pretrained, save_model
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import sample_tokens, tiny_model
from tests.hf.family_check import check_families

CONFIG = L2RConfig(rank=2, heads=4)


def save(folder, name="olmoe", **options):
    model = swap_routers(tiny_model(FAMILIES[name]), CONFIG, **options)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model):
    return model(sample_tokens(), use_cache=False).logits


@pytest.mark.slow("a fresh process")
def test_a_fresh_process_gives_the_same_outputs_after_swap_train_step_and_generation():
    names = ["mixtral", "deepseek_v3", "gpt_oss"]
    results = list(check_families(names))
    assert [result.family for result in results] == names
    for result in results:
        assert result.same_rule and result.swap and result.train_step, result
        assert result.generate and result.reload, result


def test_the_loaded_model_is_of_the_same_class_and_in_evaluation_mode(tmp_path):
    model = save(tmp_path)
    loaded = l2r.load_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert not loaded.training
    assert loaded.config.l2r_swap == model.config.l2r_swap
    assert torch.equal(logits(loaded), logits(model))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    model = swap_routers(tiny_model(FAMILIES["olmoe"]), CONFIG)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.anchors[0] = float("nan")
    with pytest.raises(ValueError, match=r"not finite \(model.layers.1.mlp.gate.anchors"):
        save_model(model, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_fields_of_the_configuration_are_options_of_loading(tmp_path):
    save(tmp_path)
    loaded = l2r.load_pretrained(tmp_path, num_experts_per_tok=3, use_cache=False)
    assert loaded.config.num_experts_per_tok == 3 and not loaded.config.use_cache
    assert loaded.model.layers[0].mlp.gate.top_k == 3


def test_code_that_a_checkpoint_named_for_its_stock_model_is_not_named_by_the_swapped(tmp_path):
    model = tiny_model(FAMILIES["deepseek_v3"])
    model.config.auto_map = {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    swap_routers(model, CONFIG).save_pretrained(tmp_path)
    named = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert not any("modeling_deepseek" in str(place) for place in named.values())
    assert torch.equal(logits(l2r.load_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("name", ["mixtral", "olmoe"])
def test_another_model_of_the_same_configuration_object_stays_stock(name, tmp_path):
    swapped = tiny_model(FAMILIES[name])
    stock = type(swapped)(swapped.config).eval()
    swap_routers(swapped, CONFIG)
    assert all(m.config is not stock.config for m in swapped.modules() if hasattr(m, "config"))
    stock.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(opened) is type(stock)
    for key, value in stock.state_dict().items():
        assert torch.equal(opened.state_dict()[key], value), key


def test_different_routers_in_different_layers_come_back(tmp_path):
    model = save(tmp_path, layers=[1])
    swap_routers(model, XMoEConfig(rank=4), layers=[0], selection="router")
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    kinds = [type(m).__name__ for m in loaded.modules() if isinstance(m, Router)]
    assert kinds == ["XMoERouter", "L2RRouter"]
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    ("first", "second", "entries"),
    [
        ("family", "family", 1),
        ("router", "router", 1),
        ("family", "router", 1),
        ("router", "family", 2),
    ],
)
def test_only_swaps_of_which_something_is_left_are_recorded(first, second, entries, tmp_path):
    """A later swap keeps the selection that it finds: that is left of one by "router"."""
    model = save(tmp_path, "mixtral", selection=first, layers=[0])
    swap_routers(model, CONFIG, selection=first)
    swap_routers(model, XMoEConfig(rank=4), selection=second)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert len(loaded.config.l2r_swap) == entries
    assert torch.equal(logits(loaded), logits(model))


def test_a_second_save_writes_the_same_files(tmp_path):
    save(tmp_path / "a")
    load_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("name", ["deepseek_v3", "ernie4_5_moe", "laguna"])
def test_selection_biases_survive_a_change_of_dtype_before_the_swap(tmp_path, name):
    model = swap_routers(tiny_model(FAMILIES[name]).bfloat16(), CONFIG)
    model.save_pretrained(tmp_path)
    ours, loaded = model.state_dict(), load_pretrained(tmp_path).state_dict()
    biases = [key for key in ours if key.endswith("e_score_correction_bias")]
    assert biases
    for key in biases:
        assert torch.equal(ours[key].float(), loaded[key].float())


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_bfloat16_models_keep_their_router_in_float32(tmp_path, name):
    tiny_model(FAMILIES[name]).save_pretrained(tmp_path / "plain")
    model = load_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    swap_routers(model, CONFIG).save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert loaded.lm_head.weight.dtype == torch.bfloat16
    for router in (m for m in loaded.modules() if isinstance(m, Router)):
        assert {p.dtype for p in router.state_dict().values()} == {torch.float32}
    assert torch.equal(logits(loaded), logits(model))


def test_a_requested_half_precision_spares_the_router(tmp_path):
    save(tmp_path)
    loaded = load_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.layers[0].mlp.gate.anchors.dtype == torch.float32
    assert loaded.lm_head.weight.dtype == torch.bfloat16


def test_unswapped_experts_are_stored_as_the_family_stores_them(tmp_path):
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "plain")
    save(tmp_path / "swapped")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    ours = load_file(tmp_path / "swapped" / "model.safetensors")
    others = {k for k in plain if ".gate." not in k}
    assert others == {k for k in ours if ".gate." not in k}
    assert all(plain[k].numpy().tobytes() == ours[k].numpy().tobytes() for k in others)


def test_ordinary_checkpoints_load(tmp_path):
    model = tiny_model(FAMILIES["mixtral"])
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))


def test_our_own_olmoe_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # refuses HF's extra keywords
    config = L2rOlmoeConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
        router={"kind": "l2r_sips", "rank": 2, "heads": 2},
    )
    model = L2rOlmoeForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))
    swap_routers(model, XMoEConfig(rank=2), layers=[0]).save_pretrained(tmp_path / "part")
    assert torch.equal(logits(load_pretrained(tmp_path / "part")), logits(model))


def test_load_causal_lm_understands_swapped_checkpoints(tmp_path):
    model = save(tmp_path)
    loaded, tokenizer = load_causal_lm(tmp_path)
    assert tokenizer is None
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_weights_that_do_not_fit_are_refused(tmp_path, change):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    key = "model.layers.0.mlp.gate.anchors"
    if change == "missing":
        del weights[key]
    elif change == "unexpected":
        weights["model.layers.0.mlp.gate.other"] = torch.zeros(1)
    else:
        weights[key] = torch.zeros(1, 1, 1)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"gate\.|mismatch"):
        load_pretrained(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot load a language model from"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("layers", [7]), ("selection", "other"), ("router", {"kind": "unknown"})],
)
def test_a_damaged_description_is_refused(tmp_path, field, value):
    save(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["l2r_swap"][0][field] = value
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"layers|selection|unknown router"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("names", [[], ["NoSuchModel"]])
def test_an_unknown_architecture_is_refused(tmp_path, names):
    save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": names}))
    with pytest.raises(ValueError, match=r"cannot load|architectures must name"):
        load_pretrained(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint must be a folder with config\.json"):
        load_pretrained(tmp_path)
