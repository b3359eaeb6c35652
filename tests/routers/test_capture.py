"""capture of every supported family's own routers, against what its experts are given."""

import copy
import threading
from contextlib import contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import l2r
from l2r import L2RConfig, build_router, capture, replay
from l2r.hf.models.version_names import checkpoint_activations
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import running_sites
from l2r.hf.swap.swap import replace_routers
from l2r.routers import RouterOutput
from tests.hf.families import (
    KEEP_FLOAT32,
    each_rule_and_dtype,
    from_folder,
    sample_tokens,
    tiny_model,
)
from tests.hf.routes.models import drawn_for, given_experts
from tests.processes import script


def model_of(name, dtype, folder):
    if dtype == torch.bfloat16 and name in KEEP_FLOAT32:
        return from_folder(name, folder)
    return tiny_model(FAMILIES[name]).to(dtype)


@contextmanager
def given(model):
    """Experts, weights and the router's path of every call of a module of experts."""
    found, hooks = [], []
    for site in running_sites(model):
        block = model.get_submodule(site.path.rpartition(".")[0])

        def see(_, args, kwargs, path=site.path):
            _, experts, weights = [*args, *kwargs.values()][:3]
            found.append((path, experts.clone(), weights.clone()))

        hooks.append(block.experts.register_forward_pre_hook(see, with_kwargs=True))
    yield found
    for hook in hooks:
        hook.remove()


@each_rule_and_dtype(FAMILIES)
def test_captured_experts_and_weights_are_those_that_the_experts_get(name, dtype, tmp_path):
    model, ids = model_of(name, dtype, tmp_path), sample_tokens()
    with torch.no_grad(), capture(model) as captured, given(model) as got:
        model(ids, use_cache=False)
    sites = running_sites(model)
    assert list(captured.outputs) == [site.path for site in sites]
    assert captured.layers == {site.path: site.layer for site in sites}
    assert len(captured.logits()) == len(got)
    left = {path: iter(calls) for path, calls in captured.outputs.items()}
    for path, experts, weights in got:
        output = next(left[path])
        assert isinstance(output, RouterOutput)
        assert torch.equal(output.indices, experts)
        assert torch.equal(output.weights, weights) and output.weights.dtype == weights.dtype
    for site in sites:
        for logits, weights, indices in captured.outputs[site.path]:
            assert logits.shape == (ids.numel(), site.sizes["num_experts"])
            if site.by_token:
                continue
            # the rule of the family, in float32, gives the weights that were captured
            rule = site.selection.weigh(site.router, logits.float(), indices)
            near = 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(weights.float(), rule, rtol=near, atol=near)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in [model, model.base_model])


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "lfm2_moe", "gpt_oss"])
def test_a_loss_of_captured_logits_trains_the_family_s_own_routers(name):
    model = tiny_model(FAMILIES[name]).train()
    with capture(model) as captured:
        model(sample_tokens(), use_cache=False)
    l2r.load_balancing_loss(captured.logits(), captured.indices()).backward()
    for site in running_sites(model):
        weight = site.router.weight.grad
        assert weight.isfinite().all() and weight.abs().max() > 0, site.path


def test_padding_is_that_of_each_call_and_unset_where_there_is_none():
    model, ids = tiny_model(FAMILIES["mixtral"]), sample_tokens()
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    with torch.no_grad(), capture(model) as captured:
        model(ids, mask)  # by position, as by name
        model(ids)
        model(input_ids=ids[:1], attention_mask=mask[1:])
    expected = [mask.flatten().bool(), None, mask[1].bool()]
    assert len(captured.masks()) == 2 * 3
    for found, wanted in zip(captured.masks(), expected * 2, strict=True):
        assert (found is None) == (wanted is None)
        assert wanted is None or torch.equal(found, wanted)


def test_a_partly_swapped_model_gives_all_its_routers_in_order():
    model = tiny_model(FAMILIES["olmoe"])
    paths = [site.path for site in running_sites(model)]
    replace_routers(model, L2RConfig(rank=2, heads=4), layers=[1])
    with torch.no_grad(), capture(model, inputs=True) as captured:
        model(sample_tokens())
    assert list(captured.outputs) == paths == list(captured.inputs)
    assert captured.heads() == [1, 4]


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_what_a_backward_pass_runs_again_is_not_captured_again(name):
    model = tiny_model(FAMILIES[name]).train()
    plain = copy.deepcopy(model)
    checkpoint_activations(model)
    ids, found = sample_tokens(), {}
    for kind, one in (("checkpointed", model), ("plain", plain)):
        with capture(one) as captured:
            task = one(ids, labels=ids, use_cache=False).loss
            z = l2r.router_z_loss(captured.logits())
            (task + z).backward()
        found[kind] = captured
        assert all(len(calls) == 1 for calls in captured.outputs.values())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_whole_model_that_is_checkpointed_counts_once():
    model, ids = tiny_model(FAMILIES["olmoe"]).train(), sample_tokens()
    with capture(model) as captured:
        out = checkpoint(lambda x: model(x, use_cache=False).logits.sum(), ids, use_reentrant=False)
        out.backward()
    assert all(len(calls) == 1 for calls in captured.outputs.values())


def test_reentrant_checkpointing_is_refused_in_one_line():
    model = tiny_model(FAMILIES["mixtral"]).train()
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    next(getattr(model, n) for n in names if hasattr(model, n))({"use_reentrant": True})
    with pytest.raises(ValueError, match="'use_reentrant': False") as found, capture(model):
        pass
    assert "\n" not in str(found.value)
    with torch.no_grad(), capture(model) as captured:  # nothing is recomputed
        model(sample_tokens())
    assert captured.logits()


@pytest.mark.parametrize("first", ["capture", "replay"])
def test_replayed_experts_are_captured_whichever_block_is_opened_first(first):
    model, ids = tiny_model(FAMILIES["qwen3_moe"]), sample_tokens()
    blocks = {"capture": capture(model), "replay": replay(model, drawn_for(model, (12, 12)))}
    order = [first, *(name for name in blocks if name != first)]
    with torch.no_grad(), given_experts(model) as got:
        opened = {name: blocks[name].__enter__() for name in order}
        model(ids, use_cache=False)
        for name in reversed(order):
            blocks[name].__exit__(None, None, None)
    for found, experts in zip(opened["capture"].indices(), got, strict=True):
        assert torch.equal(found, experts)


def test_calls_of_other_threads_are_not_captured():
    model, ids = tiny_model(FAMILIES["mixtral"]), sample_tokens()
    with torch.no_grad(), capture(model) as captured:
        other = threading.Thread(target=lambda: model(ids))
        other.start()
        other.join()
        assert not captured.outputs
        model(ids)
    assert all(len(calls) == 1 for calls in captured.outputs.values())


def test_data_parallel_is_refused_whose_copies_run_in_other_threads():
    wrapped = torch.nn.DataParallel(tiny_model(FAMILIES["mixtral"]))
    wrapped.device_ids = []  # as on a CPU, where it makes no copies
    with torch.no_grad(), capture(wrapped) as captured:
        wrapped(sample_tokens())
    assert captured.outputs
    wrapped.device_ids = [0, 1]
    with pytest.raises(
        ValueError, match=r"one process per GPU \(torchrun\); got device_ids=\[0, 1\]"
    ):
        capture(wrapped).__enter__()


def test_a_router_alone_is_captured():
    router = build_router("linear", hidden_size=4, num_experts=3, top_k=2)
    with capture(router) as captured:
        output = router(torch.randn(5, 4))
    assert captured.outputs[""] == [output] and captured.masks() == [None]


COMPILED = """
import warnings
import torch
from l2r import capture
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import sample_tokens, tiny_model
warnings.simplefilter("ignore")
ids = sample_tokens()
for name in ("mixtral", "deepseek_v3", "gpt_oss"):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(FAMILIES[name]).train()
    model.set_experts_implementation("batched_mm")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(ids, use_cache=False)
    for step in range(3):
        with capture(model) as plain:
            model(ids, use_cache=False)
        with capture(compiled) as captured:
            for _ in range(2):
                compiled(ids, use_cache=False)
        assert list(captured.outputs) == list(plain.outputs)
        for path, (one,) in plain.outputs.items():
            for other in captured.outputs[path]:
                torch.testing.assert_close(other.logits, one.logits)
                torch.testing.assert_close(other.weights, one.weights)
                assert torch.equal(other.indices, one.indices)
    sum(layer.sum() for layer in captured.logits()).backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs <= 2, (name, graphs)  # without a block and inside one
    inner = tiny_model(FAMILIES[name]).train()  # layers that are compiled in their places
    inner.set_experts_implementation("batched_mm")
    for layer in inner.model.layers:
        layer.compile(backend="aot_eager")
    inner(ids, use_cache=False)
    with capture(inner) as captured:
        inner(ids, use_cache=False)
    assert list(captured.outputs) == list(plain.outputs), name
print("captured")
"""


@pytest.mark.slow("a compiler")
def test_compiled_models_of_families_are_captured_in_one_graph(tmp_path):
    assert "captured" in script(tmp_path, COMPILED).succeed()
