"""The plug-in's own logic, with small stand-ins for vLLM: names, configurations, gates, weights."""

import importlib
import json
import sys
import tomllib
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import l2r
from l2r.engines.vllm import register
from l2r.engines.vllm.architectures import (
    MODELS,
    implied,
    read_our_configurations,
    vllm_name,
)
from l2r.engines.vllm.models import served_class
from l2r.engines.vllm.selecting import Rule, agrees, tell
from l2r.hf.checkpoints import export_remote_code
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap import (
    as_stock_configuration,
    family_selection,
    router_sites,
    stock_architectures,
    swap_routers,
)
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swapped_classes import class_name
from l2r.routers import build_router
from l2r.routers.selection_rule import Selection
from tests.engines.vllm.engine import create_fused_moe_router, stand_in
from tests.hf.families import TINY, tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[3]
GROUPS = {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}
DEEPSEEK = {
    **GROUPS,
    "bias": "gate",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 1.5,
    "renormalize": True,
}
# What vLLM's classes tell their MoE layers (0.32), and settings of the family.
FAMILY = {
    "mixtral": ("mixtral", {"renormalize": True}, {}),
    "qwen3_moe": ("qwen3_moe", {"inside": True, "renormalize": True}, {"norm_topk_prob": True}),
    "qwen3_moe as they are": ("qwen3_moe", {"renormalize": False}, {"norm_topk_prob": False}),
    "olmoe": ("olmoe", {"renormalize": False}, {}),
    "olmoe normalized": ("olmoe", {"renormalize": False}, {"norm_topk_prob": True}),
    "gpt_oss": ("gpt_oss", {"place": "router", "renormalize": True}, {}),
    "glm4_moe": ("glm4_moe", DEEPSEEK, {}),
    "deepseek_v3": (
        "deepseek_v3",
        {**DEEPSEEK, "inside": True, "apply_routed_scale_to_output": True},
        {},
    ),
    # the bias on the block, and a rule that the stand-in lacks, as vLLM's on a CPU
    "deepseek_v3, sigmoids without groups": (
        "deepseek_v3",
        {"bias": "block", "scoring_func": "sigmoid", "routed_scaling_factor": 1.5},
        {"n_group": 1, "topk_group": 1},
    ),
}


def swapped(name, selection="family", layers=None, **sizes):
    model = tiny_model(FAMILIES[name], **sizes)
    swap_routers(model, layers=layers, selection=selection)
    with torch.no_grad():
        for site in router_sites(model):
            for value in site.router.parameters():
                value.add_(torch.randn(value.shape) * 0.2)
    return model


def served(monkeypatch, model, told, load_format="auto", weights=None):
    """vLLM's stand-in with the routers of a model, loaded from its weights, or from others."""
    name = class_name(type(model)) if not type(model).__name__.startswith("L2r") else None
    name = name or type(model).__name__
    stand_in(monkeypatch, told, **{vllm_name(name): "family"})
    served_class.cache_clear()
    config = as_stock_configuration(type(model.config).from_dict(model.config.to_dict()))
    engine = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config),
        load_config=SimpleNamespace(load_format=load_format),
    )
    try:
        torch.set_default_dtype(torch.bfloat16)  # as vLLM builds models
        made = served_class(name)(vllm_config=engine)
    finally:
        torch.set_default_dtype(torch.float32)
    if load_format == "dummy":
        return made
    loaded = made.load_weights((weights or model.state_dict()).items())
    assert {n for n, _ in made.named_parameters() if "mlp" in n} <= loaded
    return made


def by_expert(weights, experts, count):
    return torch.zeros(len(weights), count).scatter(1, experts.long(), weights.float())


def assert_chooses_alike(made, model, scale=1.0):
    hidden = torch.randn(40, model.config.hidden_size)
    for site in router_sites(model):
        own = site.router(hidden)
        count = own.logits.shape[1]
        found = made.model.layers[site.layer].mlp(hidden)
        wanted = by_expert(own.weights, own.indices, count)
        torch.testing.assert_close(by_expert(*found, count) * scale, wanted)


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("selection", ["family", "router"])
def test_vllm_chooses_and_weighs_as_the_checkpoint(name, selection, monkeypatch):
    family, told, sizes = FAMILY[name]
    model = swapped(family, selection, **sizes)
    made = served(monkeypatch, model, told)
    outside = told.get("apply_routed_scale_to_output", False)
    assert_chooses_alike(made, model, scale=1.5 if outside else 1.0)


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_the_kernels_of_vllm_choose_where_they_can(monkeypatch):
    for name, ours in (("olmoe normalized", False), ("deepseek_v3, sigmoids without groups", True)):
        family, told, sizes = FAMILY[name]
        made = served(monkeypatch, swapped(family, **sizes), told)
        settings = made.model.layers[1].mlp.experts.settings
        assert isinstance(settings["custom_routing_function"], Rule) == ours


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_layers_that_were_not_swapped_keep_their_gates(monkeypatch):
    model = swapped("mixtral", layers=[1])
    with torch.no_grad():  # a gate that the stand-in loads by its name
        made = served(monkeypatch, model, {"renormalize": True})
    assert [type(layer.mlp.gate).__name__ for layer in made.model.layers] == [
        "LinearBase", "LogitsGate",
    ]  # fmt: skip
    assert made.model.layers[0].mlp.experts.settings["router_logits_dtype"] is None


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
@pytest.mark.parametrize("second", [None, [1]])
def test_a_second_swap_keeps_the_rule_that_the_first_one_replaced(second, monkeypatch):
    """As in transformers: "family" keeps the rule that is there, here one that normalizes."""
    model = swapped("olmoe", "router")
    swap_routers(model, layers=second)
    assert [swap["selection"] for swap in model.config.l2r_swap] == ["router", "family"]
    assert_chooses_alike(served(monkeypatch, model, {"renormalize": False}), model)


def own_model(**changes):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    values = {**sizes, "num_experts": 8, "router": router, **changes}
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**values)).eval()


@pytest.mark.parametrize(
    "router",
    [
        {"kind": "l2r_sips", "heads": 2},
        {"kind": "l2r_sips", "heads": 2, "normalize_weights": True},
        {"kind": "linear", "selection_bias": True},
        {"kind": "sigmoid"},
    ],
    ids=lambda router: "-".join(map(str, router.values())),
)
def test_our_own_model_is_served_with_any_selection(router, monkeypatch):
    model = own_model(router=router)
    with torch.no_grad():
        for name, value in model.named_buffers():
            if name.endswith("correction_bias"):
                value.normal_()
    assert_chooses_alike(served(monkeypatch, model, {"renormalize": False}), model)


def test_logits_are_float32_of_half_precision_states(monkeypatch):
    model = own_model()
    made, hidden = served(monkeypatch, model, {"renormalize": False}), torch.randn(5, 32).bfloat16()
    for layer, ours in zip(made.model.layers, model.model.layers, strict=True):
        logits, nothing = layer.mlp.gate(hidden)
        assert nothing is None and torch.equal(logits, ours.mlp.gate.logits(hidden))
        assert logits.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-05 in vLLM's OlmoeForCausalLM; got"),
        ({"clip_qkv": 8.0}, "clip_qkv must be None"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
    ],
)
def test_what_vllms_class_has_as_a_constant_is_refused(change, line, monkeypatch):
    with pytest.raises(ValueError, match=line):
        served(monkeypatch, own_model(**change), {"renormalize": False})


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_biases_that_vllms_phi_always_has_are_refused_where_there_are_none(monkeypatch):
    with pytest.raises(ValueError, match="lm_head_bias must be True in vLLM's PhiMoEForCausalLM"):
        served(monkeypatch, swapped("phimoe", attention_bias=True), {"renormalize": False})


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_a_bias_that_vllm_does_not_read_is_refused(monkeypatch):
    told = {"renormalize": True, "scoring_func": "sigmoid", **GROUPS}
    with pytest.raises(ValueError, match=r"layers.1.mlp.experts reads no selection bias in vLLM"):
        served(monkeypatch, swapped("deepseek_v3"), told)


def test_a_selection_that_vllm_cannot_be_told_is_refused(monkeypatch):
    stand_in(monkeypatch)
    router = build_router("linear", hidden_size=8, num_experts=8, top_k=2)
    settings = {"num_experts": 8, "top_k": 2, "renormalize": True}
    assert agrees(settings, router, Selection(normalize=True))
    assert not agrees(settings, router, Selection())
    assert tell(settings, router, Selection(), "x")["renormalize"] is False
    factory = sys.modules["vllm.model_executor.layers.fused_moe.router.router_factory"]

    @wraps(create_fused_moe_router)
    def deaf(**settings):
        return create_fused_moe_router(**{**settings, "custom_routing_function": None})

    monkeypatch.setattr(factory, "create_fused_moe_router", deaf)
    with pytest.raises(ValueError, match="x cannot be told to choose as the checkpoint: Selection"):
        tell(settings, router, Selection(gate="sigmoid"), "x")


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_weights_of_routers_are_all_there_and_fit(monkeypatch):
    model = swapped("mixtral")
    weights = model.state_dict()
    name = next(key for key in weights if ".1." in key and ".gate." in key)
    lacking = {key: value for key, value in weights.items() if key != name}
    with pytest.raises(ValueError, match=r"the checkpoint lacks tensors of routers: \[\(1, "):
        served(monkeypatch, model, {"renormalize": True}, weights=lacking)
    made = served(monkeypatch, model, {"renormalize": True})
    wrong = {**weights, name: torch.zeros(3, 5)}
    with pytest.raises(ValueError, match=rf"{name} must have shape \[.*\]; got \[3, 5\]"):
        made.load_weights(wrong.items())
    elsewhere = [("model.layers.1.mlp.gate.weight", torch.zeros(1)), *weights.items()]
    passed = []
    made.l2r_gates.load(made, elsewhere, lambda rest: passed.extend(n for n, _ in rest))
    assert "lm_head.weight" in passed and not [n for n in passed if ".gate.anchors" in n]


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_trainer_passes_its_weights_on_one_by_one(load_format, monkeypatch):
    """As TRL and verl do after each step, the second into an engine that read no checkpoint."""
    made = served(monkeypatch, swapped("mixtral"), {"renormalize": True}, load_format)
    torch.manual_seed(5)
    trained = swapped("mixtral")
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(torch.randn_like(parameter))
    for name, value in trained.state_dict().items():
        made.load_weights([(name, value)])
    assert_chooses_alike(made, trained)


def test_names_of_every_family_and_of_our_own_model():
    names = stock_architectures()
    for kind, stock in ((type(tiny_config(name)), name) for name in FAMILIES):
        if stock in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            model = AutoModelForCausalLM._model_mapping[kind]
            assert names[class_name(model)] == model.__name__
    assert names[L2rOlmoeForCausalLM.__name__] == names["L2rSwappedOlmoeForCausalLM"]


def test_only_families_that_vllm_has_are_registered_and_once(monkeypatch):
    vllm = stand_in(
        monkeypatch,
        MixtralForCausalLM="mixtral",
        PhiMoEForCausalLM="phimoe",
        OlmoeForCausalLM="olmoe",
        MellumForCausalLM="vllm.model_executor.models.transformers",
    )
    settings = sys.modules["vllm.model_executor.models.config"].MODELS_CONFIG_MAP
    settings["MixtralForCausalLM"] = kept = object()
    register()
    register()
    ours = {name: m.path for name, m in vllm.ModelRegistry.models.items() if name[:3] == "L2r"}
    names = ("Mixtral", "Phimoe", "Olmoe", "SwappedOlmoe", "L2rOlmoe")
    assert ours == {f"L2r{n}ForCausalLM": f"{MODELS}:L2r{n}ForCausalLM" for n in names}
    assert settings == {"MixtralForCausalLM": kept, "L2rMixtralForCausalLM": kept}
    module = importlib.import_module(MODELS)
    assert module.L2rMixtralForCausalLM.__module__ == MODELS
    with pytest.raises(AttributeError):
        _ = module.L2rBertForCausalLM


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_a_folder_of_swap_is_read_as_the_familys_configuration(tmp_path, monkeypatch):
    vllm = stand_in(monkeypatch, DeepseekV3ForCausalLM="deepseek_v2")
    register()
    model = swapped("deepseek_v3")
    model.save_pretrained(tmp_path)
    parser = sys.modules["vllm.transformers_utils.config"]._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"]()
    _, config = parser.parse(tmp_path, False)
    assert type(config) is type(tiny_config("deepseek_v3"))
    assert config.model_type == "deepseek_v3" and config.l2r_swap == model.config.l2r_swap
    assert config.architectures == ["L2rDeepseekV3ForCausalLM"]
    assert getattr(config, "auto_map", None) is None
    # transformers' class has these as constants; vLLM reads them, or routes otherwise
    assert (config.topk_method, config.scoring_func) == ("noaux_tc", "sigmoid")
    assert config.initializer_range == model.config.initializer_range  # not the note of the folder
    config.l2r_swap = None
    _, other = parser.parse(tmp_path, True)
    assert other.l2r_swap == model.config.l2r_swap
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**values, "architectures": ["DeepseekV3ForCausalLM"]})  # as version 0.2 wrote
    )
    assert parser.parse(tmp_path, False)[1].architectures == ["L2rDeepseekV3ForCausalLM"]
    del vllm


def test_fields_of_vllm_that_a_file_of_transformers_lacks_follow_from_it():
    """Sliding layers of MiMo-V2-Flash have twice the key heads, and vLLM has a field for them."""
    config = tiny_config("mimo_v2_flash", sliding_window=7)
    fields = implied(config)
    layer = AutoModelForCausalLM.from_config(config).model.layers[1].self_attn
    assert fields["hybrid_layer_pattern"] == [0, 1] and fields["moe_layer_freq"] == [0, 1]
    assert fields["swa_num_key_value_heads"] * config.head_dim == layer.k_proj.out_features
    assert fields["swa_num_attention_heads"] * config.v_head_dim == layer.o_proj.in_features
    assert fields["sliding_window_size"] == layer.sliding_window == 7
    assert (fields["rope_theta"], fields["swa_rope_theta"]) == (5_000_000.0, 10_000.0)
    config.rope_parameters["sliding_attention"]["partial_rotary_factor"] = 1.0
    with pytest.raises(ValueError, match="must have one partial_rotary_factor in vLLM's class"):
        implied(config)
    config = tiny_config("hy_v3", num_hidden_layers=3, mlp_layer_types=["dense", *["sparse"] * 2])
    assert implied(config)["first_k_dense_replace"] == 1
    assert implied(config)["expert_hidden_dim"] == config.moe_intermediate_size
    config.mlp_layer_types = ["sparse", "dense", "sparse"]
    with pytest.raises(ValueError, match="mlp_layer_types must begin with the dense"):
        implied(config)
    assert implied(tiny_config("mixtral")) == {}


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_a_family_that_vllm_lacks_is_refused_in_a_line_or_left_to_its_code(tmp_path, monkeypatch):
    stand_in(monkeypatch)
    read_our_configurations()
    parser = sys.modules["vllm.transformers_utils.config"]._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"]()
    model = swapped("mixtral")
    model.save_pretrained(tmp_path / "swapped")
    with pytest.raises(ValueError) as error:
        parser.parse(tmp_path / "swapped", True)
    assert str(error.value) == (
        "vLLM 0.32.0 has no class of its own for MixtralForCausalLM: "
        f"l2r export {tmp_path / 'swapped'} --out NEW; vllm serve NEW --trust-remote-code"
    )
    export_remote_code(model, tmp_path / "exported")
    with pytest.raises(ValueError, match="Transformers backend with --trust-remote-code"):
        parser.parse(tmp_path / "exported", False)
    assert parser.parse(tmp_path / "exported", True)[1].read_by == "vLLM"


@pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
def test_a_family_whose_class_in_vllm_chooses_other_experts_is_refused(tmp_path, monkeypatch):
    """Laguna: 150 of 168 choices from equal hidden states, measured in results/engines/vllm.md."""
    vllm = stand_in(
        monkeypatch,
        LagunaForCausalLM="laguna",
        LongcatFlashForCausalLM="longcat_flash",
        MixtralForCausalLM="mixtral",
    )
    register()
    assert "L2rMixtralForCausalLM" in vllm.ModelRegistry.models
    assert "L2rLagunaForCausalLM" not in vllm.ModelRegistry.models
    assert "L2rLongcatFlashForCausalLM" not in vllm.ModelRegistry.models
    parser = sys.modules["vllm.transformers_utils.config"]._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("longcat_flash"))
    swap_routers(model)
    model.config.auto_map = {"AutoConfig": "l2r_code/modeling_l2r.X"}
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"without weights in LongcatFlash.*: use l2r serve"):
        parser.parse(tmp_path, True)
    swapped("laguna").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="chooses other experts in its own class of LagunaForCaus"):
        parser.parse(tmp_path, True)


def test_a_family_that_vllms_transformers_lacks_and_a_wrapper_are_named(tmp_path, monkeypatch):
    """Neither vLLM's class nor the folder's code can be built: an export would not help."""
    stand_in(monkeypatch)
    register()
    parser = sys.modules["vllm.transformers_utils.config"]._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"]()
    values = {"model_type": "l2r_newer_moe", "architectures": ["L2rNewerMoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    for trust in (False, True):
        with pytest.raises(ValueError, match=r"transformers 5\.\S+ has no newer_moe; .* is one"):
            parser.parse(tmp_path, trust)
    wrapper = "Qwen3VLMoeForConditionalGeneration"
    values = {"model_type": "l2r_qwen3_vl_moe", "architectures": [f"L2r{wrapper}"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"serves causal language models; .* is a {wrapper}"):
        parser.parse(tmp_path, True)


def test_a_folder_of_others_is_read_by_vllm_alone(tmp_path, monkeypatch):
    stand_in(monkeypatch, MixtralForCausalLM="mixtral")
    register()
    tiny_config("mixtral").save_pretrained(tmp_path)
    parser = sys.modules["vllm.transformers_utils.config"]._CONFIG_FORMAT_TO_CONFIG_PARSER["hf"]()
    assert parser.parse(tmp_path, False)[1].read_by == "vLLM"


def test_the_selection_of_a_family_is_that_of_its_models():
    for name in ("mixtral", "deepseek_v3", "ernie4_5_moe", "qwen2_moe"):
        model = tiny_model(FAMILIES[name])
        assert family_selection(model.config) == router_sites(model)[0].selection
    with pytest.raises(ValueError, match="model_type must be that of a family of l2r; got 'llama'"):
        family_selection(SimpleNamespace(model_type="llama"))


def test_vllm_finds_our_plug_in_which_imports_without_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["l2r"].split(":")
    assert getattr(importlib.import_module(module), name) is register
    assert "vllm" not in sys.modules and l2r.__version__
