"""Routers keep float32 weights under FSDP2's bfloat16 policy, stock, swapped and our own."""

import copy
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import l2r
from l2r import L2RConfig, record, replay, shard_routers
from l2r.analysis.diagnostics.step_statistics import RouterWatch
from l2r.errors import InputError
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap import find_sites, running_sites, selection_biases, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import Router
from l2r_lab.training.parallel import transformer_blocks
from tests.engines.engines import assert_close
from tests.hf.families import sample_tokens, tiny_model
from tests.processes import on_two_ranks
from tests.tiers import few

BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# A gate with weights in the dtype of its logits, one in float32, one whose block has the bias.
CONTRACTS = ("olmoe", "mixtral", "afmoe")
# Families that run under no bfloat16 policy: parts of theirs want float32 inputs.
WIDE = ("minimax", "inkling2_text", "inkling2_loop_text")
SIPS = L2RConfig(rank=4, heads=2, learn_temperature=True)


@dataclass
class Call:
    """What a router was called with, in which dtypes its parameters were, and what it gave."""

    args: tuple
    dtypes: set
    output: tuple


def sharded(model, mesh, *, routers=True, policy=BFLOAT16):
    """FSDP2 as people put it on a model."""
    if routers:
        shard_routers(model, mesh)
    for layer in transformer_blocks(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def calls_of(model, ids):
    """The calls of each router in a forward pass, by path, and the logits of the model."""
    found, handles = {}, []
    for site in running_sites(model):

        def note(router, args, named, output, path=site.path):
            dtypes = {p.dtype for p in router.parameters()}
            args = tuple(a.detach().clone() for a in (*args, *named.values()))
            found.setdefault(path, Call(args, dtypes, tuple(t.detach().clone() for t in output)))

        handles.append(site.router.register_forward_hook(note, with_kwargs=True))
    logits = model(input_ids=ids).logits
    for handle in handles:
        handle.remove()
    return found, logits


def made(name, *, swapped):
    torch.manual_seed(0)
    if name == "own":
        config = L2rOlmoeConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_experts=8, num_experts_per_tok=2, intermediate_size=16, pad_token_id=None,
            router={"kind": "l2r_sips", "rank": 4, "heads": 2},
        )  # fmt: skip
        return L2rOlmoeForCausalLM(config).eval()
    model = tiny_model(FAMILIES[name])
    if swapped:
        swap_routers(model, SIPS)
        for site in running_sites(model):
            if isinstance(site.router, Router):
                site.router.lift_scalars()
    return model


def by_hand(router, call):
    """What the whole router in float32 gives on the states of a call."""
    wide = [a.float() if a.is_floating_point() else a for a in call.args]
    with torch.no_grad():
        return router(*wide)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def check(model, mesh, dtypes=None, policy=BFLOAT16):
    """Routers of a sharded model give what whole ones in float32 give on the same states."""
    whole = {site.path: copy.deepcopy(site.router) for site in running_sites(model)}
    kinds = [site.selection for site in find_sites(model)]
    sharded(model, mesh, policy=policy)
    assert [site.selection for site in find_sites(model)] == kinds  # still known as what they are
    found, logits = calls_of(model, sample_tokens())
    assert found.keys() == whole.keys()
    for path, call in found.items():
        assert call.dtypes == {torch.float32}, path
        ours = by_hand(whole[path], call)
        assert call.output[0].dtype == torch.float32 and torch.equal(call.output[0], ours[0]), path
        assert torch.equal(call.output[2], ours[2]), path
        wanted = call.args[0].dtype if dtypes is None else dtypes[path]
        assert call.output[1].dtype == wanted, path
        # A fused kernel and a plain one round a weight otherwise, by the last bit.
        assert_close(call.output[1], ours[1].to(wanted), path, room=2 * torch.finfo(wanted).eps)
    logits.float().square().mean().backward()
    grads = [p.grad for s in running_sites(model) for p in s.router.parameters() if p.requires_grad]
    assert all(g.dtype == torch.float32 and g.full_tensor().isfinite().all() for g in grads)
    assert any(g.full_tensor().abs().max() > 0 for g in grads)
    return found


# Its logits are a view, in which FSDP2 warns of operations in place.
VIEWS = "ignore:FSDP2-wrapped module .* returned a view"


@pytest.mark.filterwarnings(VIEWS)
@pytest.mark.parametrize("name", few(FAMILIES, CONTRACTS, "every family"))
def test_stock_routers_stay_in_float32_and_weigh_in_the_dtype_of_stock(name, mesh):
    policy = MixedPrecisionPolicy() if name in WIDE else BFLOAT16
    plain = sharded(made(name, swapped=False), mesh, routers=False, policy=policy)
    before, _ = calls_of(plain, sample_tokens())
    assert all(torch.bfloat16 in call.dtypes for call in before.values()) == (name not in WIDE)
    dtypes = {path: call.output[1].dtype for path, call in before.items()}
    check(made(name, swapped=False), mesh, dtypes, policy)


@pytest.mark.filterwarnings(VIEWS)
@pytest.mark.parametrize("name", ["own", *few(FAMILIES, CONTRACTS[:2], "every family")])
def test_swapped_and_own_routers_stay_in_float32(name, mesh):
    check(
        made(name, swapped=True), mesh, policy=MixedPrecisionPolicy() if name in WIDE else BFLOAT16
    )


def test_a_bias_that_the_block_has_as_a_parameter_is_not_rounded(mesh):
    whole = selection_biases(made("afmoe", swapped=False))
    model = sharded(made("afmoe", swapped=False), mesh)
    calls, _ = calls_of(model, sample_tokens())
    for path, bias in whole.items():
        assert torch.equal(calls[path].args[1].flatten(), bias) and bias.abs().max() > 0
    assert selection_biases(model).keys() == whole.keys()
    assert any(name.endswith("mlp.expert_bias") for name in model.state_dict())


def test_routes_are_recorded_and_replayed_where_stock_routers_are_sharded(mesh):
    model = sharded(made("olmoe", swapped=False), mesh)
    with torch.no_grad(), record(model) as recorder:
        plain = model(sample_tokens()).logits
    with torch.no_grad(), replay(model, recorder.routes()):
        assert torch.equal(model(sample_tokens()).logits, plain)


def test_it_must_come_before_the_layers_and_needs_a_router(mesh):
    model = made("olmoe", swapped=True)
    fully_shard(model.model.layers[1], mesh=mesh)
    with pytest.raises(InputError, match=r"must come before .*; model.layers.1 is sharded already"):
        shard_routers(model, mesh)
    with pytest.raises(InputError, match="no router"):
        shard_routers(nn.Sequential(nn.Linear(2, 2)), mesh)
    whole = fully_shard(made("own", swapped=True), mesh=mesh)
    with pytest.raises(InputError, match="the model is sharded already"):
        shard_routers(whole, mesh)


def learned(model, rows):
    """Calls of the routers for some rows, and the whole gradients of their parameters."""
    calls, logits = calls_of(model, rows)
    logits.float().square().mean().backward()
    routers = ((site.path, site.router) for site in running_sites(model))
    named = {f"{path}.{n}": p for path, router in routers for n, p in router.named_parameters()}
    return calls, {n: p.grad.full_tensor() for n, p in named.items() if p.grad is not None}


def two_ranks(rank, names):
    """What ``learned`` says of half of the rows, with layers in bfloat16 and in float32."""
    mesh, rows, found = init_device_mesh("cpu", (2,)), sample_tokens(4).chunk(2)[rank], {}
    for name, swapped in names:
        half, _ = learned(sharded(made(name, swapped=swapped), mesh), rows)
        wide = sharded(made(name, swapped=swapped), mesh, policy=MixedPrecisionPolicy())
        found[name, swapped] = half, learned(wide, rows)[1]
    return found


@pytest.mark.slow("two processes")
def test_two_ranks_choose_as_whole_routers_and_learn_as_one_process(tmp_path):
    names = [*((name, False) for name in CONTRACTS), ("olmoe", True), ("own", True)]
    ranks = on_two_ranks(two_ranks, tmp_path, names)
    for name, swapped in names:
        whole = {site.path: site.router for site in running_sites(made(name, swapped=swapped))}
        model = made(name, swapped=swapped)
        _, grads = calls_of(model, sample_tokens(4))
        grads.square().mean().backward()
        for found in ranks:
            calls, gradients = found[name, swapped]
            for path, call in calls.items():
                ours = by_hand(whole[path], call)
                assert call.dtypes == {torch.float32}
                assert_close(call.output[0], ours[0], path)
                assert torch.equal(call.output[2], ours[2]), path
            assert gradients
            for key, gradient in gradients.items():
                expected = model.get_parameter(key).grad
                assert expected.abs().max() > 0
                assert_close(gradient, expected, key, room=1e-5)


def page_s_lines(rank, code):
    """The page's FSDP2 on this rank and a step: dtypes, loads and biases."""
    model = made("deepseek_v3", swapped=False).train()
    space = {"l2r": l2r, "torch": torch, "model": model}
    exec(code, space)
    optimizer, balancing = torch.optim.SGD(model.parameters(), lr=0.1), space["balancing"]
    dtypes, before = set(), whole_biases(model)
    for site in running_sites(model):
        site.router.register_forward_pre_hook(lambda m, _: dtypes.add(m.weight.dtype))
    watch, rows = RouterWatch(model), sample_tokens(4).chunk(2)[rank]
    watch.start()
    with l2r.capture(model) as captured:
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
    (loss + l2r.router_losses(captured, balance=0.01).total).backward()
    optimizer.step()
    balancing.step()
    own = {p: torch.cat([o.indices for o in calls]) for p, calls in captured.outputs.items()}
    return dtypes, own, watch.read().load, before, whole_biases(model)


def whole_biases(model):
    biases = selection_biases(model).items()
    return {p: getattr(b, "full_tensor", lambda b=b: b)().detach().clone() for p, b in biases}


@pytest.mark.slow("two processes")
def test_the_page_s_lines_keep_routers_in_float32_and_balance_over_ranks(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "your-loop.md").read_text()
    code = re.search(r"```python\n(from torch.distributed.fsdp.*?)```", page, re.S)[1]
    first, second = on_two_ranks(page_s_lines, tmp_path, code)
    assert first[0] == second[0] == {torch.float32}
    for number, path in enumerate(first[1]):
        chosen = torch.cat([first[1][path], second[1][path]])
        load = torch.bincount(chosen.flatten(), minlength=8).double()
        moved = first[3][path] - 0.001 * torch.sign(load - load.mean()).float()
        for ours in (first, second):
            assert torch.equal(ours[2][number], load)
            torch.testing.assert_close(ours[4][path], moved, rtol=0, atol=1e-7)
