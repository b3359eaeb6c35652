"""swap_routers: the family's rules stay, only the scoring changes."""

import copy
import dataclasses
import pickle
import runpy
import sys

import jaxtyping
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2r import L2RConfig, LinearConfig, Router, XMoEConfig, build_router, capture
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.models.version_names import checkpoint_activations
from l2r.hf.swap import families, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites, select_sites
from l2r.hf.swap.swap import unfitted_sites
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.hf.family_check import compiles, generates, keeps_rule
from tests.tiers import few_families

MAIN = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
CONFIG = L2RConfig(rank=2, heads=4)


def swapped(name: str, **options: object) -> nn.Module:
    return swap_routers(tiny_model(FAMILIES[name]), CONFIG, **options)


def own_olmoe() -> L2rOlmoeForCausalLM:
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, num_experts=4, router={"kind": "linear"}))


def test_there_are_at_least_twenty_families():
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("warm", [False, True])
def test_router_logits_of_our_own_olmoe_are_recorded_once_after_a_swap(warm):
    model = own_olmoe().eval()
    if warm:
        model(sample_tokens(), output_router_logits=True)
    swap_routers(model, CONFIG)
    assert len(model(sample_tokens(), output_router_logits=True).router_logits) == 2


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_a_linear_router_with_the_old_weights_gives_the_old_outputs(name):
    assert keeps_rule(tiny_model(FAMILIES[name]))


def test_the_family_rule_is_what_makes_outputs_equal():
    # DeepSeek-V3 scores with sigmoids, a bias and groups: softmax top-k is something else.
    model = tiny_model(FAMILIES["deepseek_v3"])
    weight = model.model.layers[1].mlp.gate.weight.detach().clone()
    expected = model(sample_tokens()).logits
    swap_routers(model, LinearConfig(), selection="router")
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.copy_(weight)
    assert not torch.allclose(model(sample_tokens()).logits, expected, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
def test_a_router_that_trains_otherwise_starts_in_the_mode_of_the_model(training):
    model = tiny_model(FAMILIES["mixtral"]).train(training)
    swap_routers(model, L2RConfig(rank=2, heads=4, query_norm="batchnorm"))
    averages = {n: v.clone() for n, v in model.named_buffers() if "running" in n}
    assert averages
    model(sample_tokens())
    moved = {n for n, v in model.named_buffers() if n in averages and not v.equal(averages[n])}
    assert moved == (set(averages) if training else set())


@pytest.mark.parametrize("name", MAIN)
def test_capture_sees_the_weights_and_indices_that_the_experts_get(name):
    model = swapped(name)
    seen = []
    experts = {p.rpartition(".")[0] + ".experts" for p in _routers(model)}
    for path in experts:
        hook = lambda module, args: seen.append(args[1:3])  # noqa: E731
        model.get_submodule(path).register_forward_pre_hook(hook)
    with capture(model) as record:
        model(sample_tokens())
    outputs = [call for calls in record.outputs.values() for call in calls]
    assert len(outputs) == len(seen) == len(experts)
    for output, (indices, weights) in zip(outputs, seen, strict=True):
        assert torch.equal(output.indices, indices)
        assert torch.equal(output.weights, weights)


@pytest.mark.parametrize("name", MAIN)
def test_other_weights_stay_byte_identical(name):
    model = tiny_model(FAMILIES[name])
    before = {k: v.clone() for k, v in model.state_dict().items()}
    routers = [site.path for site in router_sites(model)]
    swap_routers(model, CONFIG)
    after = model.state_dict()
    kept = [k for k in before if not any(k.startswith(f"{p}.") for p in routers)]
    kept += [k for k in before if k.endswith("e_score_correction_bias")]
    assert kept
    for key in kept:
        assert before[key].numpy().tobytes() == after[key].numpy().tobytes(), key


def test_swapping_does_not_advance_the_global_random_state():
    model = tiny_model(FAMILIES["olmoe"])
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    swap_routers(model, CONFIG)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", MAIN)
def test_router_logits_are_recorded_once_and_are_ours(name, warm):
    model = tiny_model(FAMILIES[name])
    flags = {"output_router_logits": True, "output_hidden_states": True}
    if warm:  # transformers installs its hooks on first use
        model(sample_tokens(), **flags)
    swap_routers(model, CONFIG)
    with capture(model) as record:
        output = model(sample_tokens(), **flags)
    assert len(output.hidden_states) == TINY["num_hidden_layers"] + 1
    assert len(output.router_logits) == len(record.outputs)
    for recorded, ours in zip(output.router_logits, record.logits(), strict=True):
        assert torch.equal(recorded, ours)


def test_our_losses_reach_the_routers_through_capture():
    model = swapped("mixtral")
    with capture(model) as record:
        model(sample_tokens())
    loss = load_balancing_loss(record.logits(), record.indices()) + router_z_loss(record.logits())
    loss.backward()
    for path in _routers(model):
        assert model.get_submodule(path).anchors.grad.abs().sum() > 0


def test_layers_are_selectable_and_the_rest_keeps_its_router():
    model = tiny_model(FAMILIES["olmoe"])
    swap_routers(model, CONFIG, layers=[1])
    assert list(_routers(model)) == ["model.layers.1.mlp.gate"]
    assert type(model.model.layers[0].mlp.gate).__name__ == "OlmoeTopKRouter"
    output = model(sample_tokens(), output_router_logits=True)
    assert len(output.router_logits) == 2
    swap_routers(model, XMoEConfig(rank=4), layers=[0])
    assert len(_routers(model)) == 2
    assert [entry["layers"] for entry in model.config.l2r_swap] == [[1], [0]]


def test_two_routers_of_one_layer_are_both_selected():
    router = build_router("linear", hidden_size=8, num_experts=4, top_k=2)
    pair = torch.nn.ModuleDict({"first": router, "second": copy.deepcopy(router)})
    model = torch.nn.ModuleList([pair, copy.deepcopy(pair)])
    paths = [site.path for site in select_sites(model, layers=[1, 1])]
    assert paths == ["1.first", "1.second"]


def test_a_layer_without_a_router_is_refused():
    with pytest.raises(ValueError, match=r"layers must name layers .* \(1\); got 0"):
        swapped("deepseek_v3", layers=[0])


@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen3_moe", "gpt_oss", "granitemoe"])
def test_a_swapped_softmax_family_takes_the_fused_path(name, monkeypatch):
    from l2r.kernels import dispatch

    if name in families.REFUSED:
        pytest.skip(families.REFUSED[name])
    model, routes, route = swapped(name), [], dispatch.route

    def spy(*args, **kwargs):
        routes.append(kwargs["normalize"])
        return route(*args, **kwargs)

    monkeypatch.setattr(dispatch, "route", spy)
    model(sample_tokens())
    assert routes == [name in ("mixtral", "gpt_oss", "granitemoe")] * len(_routers(model))


def test_swapping_twice_keeps_the_rule_and_the_selection_bias():
    model = swapped("deepseek_v3")
    first = next(iter(_routers(model).values()))
    swap_routers(model, XMoEConfig(rank=4))
    second = next(iter(_routers(model).values()))
    assert second is not first
    assert second.selection == first.selection
    assert second.selection.family == "deepseek_v3"
    assert second.e_score_correction_bias is first.e_score_correction_bias


def test_a_router_that_was_never_fitted_is_no_predecessor():
    """A fit after several swaps learns from the router that was trained."""
    model = tiny_model(FAMILIES["mixtral"])
    stock = [site.router for site in router_sites(model)]
    for config in (CONFIG, XMoEConfig(rank=4), CONFIG):
        swap_routers(model, config)
        old, new = zip(*unfitted_sites(model), strict=True)
        assert [site.router for site in old] == stock
        assert [*new] == [*_routers(model).values()]


def test_a_router_that_was_trained_and_not_fitted_is_a_predecessor():
    model = swap_routers(tiny_model(FAMILIES["mixtral"]), CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(sample_tokens(), labels=sample_tokens()).loss.backward()
    optimizer.step()
    trained = [site.router for site in router_sites(model)]
    swap_routers(model, XMoEConfig(rank=4))
    assert [site.router for site, _ in unfitted_sites(model)] == trained


def test_without_a_config_layers_with_a_rule_of_their_own_are_swapped_with_the_others():
    """Not half of them: the family decides about the others' weights."""
    model = tiny_model(FAMILIES["olmoe"])
    swap_routers(model, L2RConfig(rank=4), layers=[0], selection="router")
    swap_routers(model)
    first, second = _routers(model).values()
    assert first.config == second.config and not first.config.normalize_weights
    assert (first.selection.family, second.selection.family) == (None, "olmoe")
    before = [*_routers(model).values()]
    with pytest.raises(ValueError, match="normalize_weights is decided by the model's family"):
        swap_routers(model, L2RConfig(normalize_weights=True))
    assert [*_routers(model).values()] == before  # the first layer's too


def test_our_own_olmoe_takes_the_new_router_into_its_configuration():
    model = swap_routers(own_olmoe(), CONFIG)
    assert model.config.router == CONFIG.to_dict()
    assert not hasattr(model.config, "l2r_swap")
    swap_routers(model, XMoEConfig(rank=4), layers=[1])
    assert [entry["layers"] for entry in model.config.l2r_swap] == [[1]]
    families = {router.selection.family for router in _routers(model).values()}
    assert families == {None}


def test_renormalization_is_left_to_the_family():
    with pytest.raises(ValueError, match="normalize_weights is decided by the model's family"):
        swap_routers(tiny_model(FAMILIES["olmoe"]), L2RConfig(normalize_weights=True))


def test_an_unknown_selection_is_refused():
    with pytest.raises(ValueError, match="selection must be family or router; got"):
        swapped("olmoe", selection="other")


REFUSED = {
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 16, "head_dim": 8},
    "jetmoe": {"num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2},
    "zaya": {"num_experts": 4, "head_dim": 8},
    "gemma4_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "enable_moe_block": True,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("kind", ["llama4_text", "jetmoe", "zaya", "gemma4_text", "dbrx"])
def test_families_that_do_not_fit_are_refused_with_the_reason(kind):
    class Other(nn.Module):
        config = CONFIG_MAPPING[kind]()

    with pytest.raises(ValueError, match=rf"cannot swap the routers of '{kind}': \w+"):
        swap_routers(Other(), CONFIG)


def test_families_whose_routers_an_older_transformers_writes_otherwise_are_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.23.0")
    every = runpy.run_path(families.__file__)["FAMILIES"]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.20.2")
    older = runpy.run_path(families.__file__)
    assert older["FAMILIES"].keys() == every.keys() - older["REFUSED"].keys()
    assert "needs transformers >= 5.21; this is 5.20.2" in older["REFUSED"]["granitemoe"]
    assert "jamba" in older["FAMILIES"]


def test_a_dense_model_is_refused():
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    )
    with pytest.raises(
        ValueError, match="'llama' has no router of a supported family; it has no experts"
    ):
        swap_routers(model, CONFIG)


@pytest.mark.parametrize("name", MAIN)
def test_the_router_computes_in_float32_inside_a_bfloat16_model(name):
    model = swap_routers(tiny_model(FAMILIES[name]).bfloat16(), CONFIG)
    routers = _routers(model).values()
    assert {p.dtype for r in routers for n, p in r.named_parameters()} == {torch.float32}
    with capture(model) as record:
        output = model(sample_tokens())
    assert output.logits.dtype == torch.bfloat16
    assert output.logits.isfinite().all()
    for calls in record.outputs.values():
        assert calls[0].logits.dtype == torch.float32
        assert calls[0].weights.dtype == torch.bfloat16


@pytest.mark.parametrize("name", MAIN)
def test_gradient_checkpointing_gives_the_same_gradients(name):
    model = swapped(name).train()
    plain = _router_gradients(copy.deepcopy(model))
    checkpoint_activations(model)
    checkpointed = _router_gradients(model)
    assert plain.keys() == checkpointed.keys()
    for name_, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name_], gradient, rtol=1e-5, atol=1e-8)


def test_checkpointing_is_found_under_the_name_of_older_transformers():
    class Older:
        def gradient_checkpointing_enable(self, options):
            self.options = options

    model = Older()
    checkpoint_activations(model)
    assert model.options == {"use_reentrant": False}


@pytest.mark.parametrize("name", MAIN)
def test_generation_with_the_cache_equals_generation_without(name):
    assert generates(swapped(name))


@pytest.mark.slow("a compiler")
@pytest.mark.parametrize("name", MAIN)
def test_one_graph_under_torch_compile(name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are not traceable
    assert compiles(swapped(name))


def _routers(model: nn.Module) -> dict[str, Router]:
    return {path: m for path, m in model.named_modules() if isinstance(m, Router)}


def _router_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = sample_tokens()
    with capture(model) as record:
        output = model(ids, labels=ids, use_cache=False)
        balance = load_balancing_loss(record.logits(), record.indices())
    (output.loss + 0.1 * balance).backward()
    return {
        f"{path}.{name}": p.grad
        for path, router in _routers(model).items()
        for name, p in router.named_parameters()
        if p.requires_grad
    }


@pytest.mark.parametrize("name", MAIN)
def test_a_swapped_model_can_be_pickled_and_records_as_before(name):
    """As torch.save(model), multiprocessing's spawn and Lightning's ddp_spawn do."""
    model = swapped(name).eval()
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    with torch.no_grad():
        expected = model(sample_tokens(), output_router_logits=True)
        for other in copies:
            output = other(sample_tokens(), output_router_logits=True)
            assert torch.equal(output.logits, expected.logits)
            assert len(output.router_logits) == len(expected.router_logits) > 0
            for ours, theirs in zip(output.router_logits, expected.router_logits, strict=True):
                assert torch.equal(ours, theirs)


def test_a_wrapper_without_a_configuration_is_refused_before_anything_changes():
    model = nn.Sequential(tiny_model(FAMILIES["olmoe"]))
    with pytest.raises(ValueError, match=r"model must have a config .*got Sequential; pass the"):
        swap_routers(model, CONFIG)
    assert not any(isinstance(module, Router) for module in model.modules())


@pytest.mark.parametrize("config", ["l2r_sips", {"kind": "l2r_sips"}, L2RConfig])
def test_a_config_of_another_type_is_named(config):
    with pytest.raises(ValueError, match=r"config must be a RouterConfig such as L2RConfig\(\)"):
        swap_routers(tiny_model(FAMILIES["olmoe"]), config)


@pytest.mark.parametrize("layers", [0, [], "0", [0.5], [True]])
def test_layers_that_are_no_list_of_indices_are_named(layers):
    model = tiny_model(FAMILIES["olmoe"])
    with pytest.raises(ValueError, match="layers must be None or a list of at least one index"):
        swap_routers(model, CONFIG, layers=layers)
    assert not hasattr(model.config, "l2r_swap")


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_without_a_config_the_sizes_decide_and_the_family_keeps_its_rule(name):
    model = swap_routers(tiny_model(FAMILIES[name]))
    for site in router_sites(model):
        expected = dataclasses.replace(L2RConfig.for_experts(**site.sizes), normalize_weights=False)
        assert site.router.config == expected and site.selection.family == name


def test_without_a_config_our_own_routers_normalize_and_images_take_the_papers():
    (site, *_) = router_sites(swap_routers(own_olmoe()))
    assert site.router.config == L2RConfig.for_experts(**site.sizes)
    assert site.router.config.normalize_weights
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 2}
    vit = L2rViTForImageClassification(L2rViTConfig(**sizes, image_size=8, patch_size=4))
    assert router_sites(swap_routers(vit))[0].router.config == L2RConfig()
