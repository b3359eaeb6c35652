"""A replayed run takes the recorded experts, and equals the recorded one to the bit."""

import threading

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from transformers import DynamicCache

from l2r import L2RConfig, Routes, build_router, capture, record, replay, router_names
from l2r.hf.models import (
    CACHE,
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.routes.calls import read_inputs
from l2r.hf.routes.routes import NO_ROUTE
from l2r.hf.swap.families import FAMILIES
from l2r.kernels import dispatch
from l2r.moe import Experts, MoELayer
from tests import tiers
from tests.hf.families import LOOPED, TINY
from tests.hf.routes.models import drawn_for, family_model, given_experts, own_model, token_ids


def cases(*without):
    """Parametrize by stock and swapped models of the families, a few of them fast."""
    names = [name for name in FAMILIES if name not in without]
    kinds = [(name, swapped) for name in names for swapped in (False, True)]
    ids = [f"{name}-{'swapped' if swapped else 'stock'}" for name, swapped in kinds]
    few = tiers.few(kinds, lambda kind: kind[0] in tiers.FAMILIES, "every family")
    return pytest.mark.parametrize(("name", "swapped"), few, ids=ids)


def logits_and_gradients(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@cases(*LOOPED)
def test_a_replayed_run_equals_the_recorded_one_to_the_bit(name, swapped):
    model, ids = family_model(name, swapped), token_ids()
    logits, gradients = logits_and_gradients(model, ids)
    with record(model) as recorder:
        recorded, _ = logits_and_gradients(model, ids)
    with replay(model, recorder.routes()):
        replayed, again = logits_and_gradients(model, ids)
    assert torch.equal(recorded, logits)
    assert torch.equal(replayed, logits)
    assert again.keys() == gradients.keys()
    assert all(torch.equal(again[key], gradients[key]) for key in gradients)


@cases(*LOOPED, "deepseek_v4")  # whose first layers keep their tables
@torch.no_grad()
def test_blocks_give_their_experts_what_the_routes_say(name, swapped):
    model, ids = family_model(name, swapped), token_ids()
    routes = drawn_for(model, (12, 12))
    own = model(ids, use_cache=False).logits
    with replay(model, routes), given_experts(model) as given:
        logits = model(ids, use_cache=False).logits
    with replay(model, routes), record(model) as recorder:
        again = model(ids, use_cache=False).logits
    assert recorder.routes() == routes
    assert np.array_equal(torch.stack(given[: len(routes.layers)], 1).numpy(), routes.experts)
    assert logits.isfinite().all()
    assert torch.equal(logits, again)
    assert not torch.allclose(logits, own)
    assert torch.equal(model(ids, use_cache=False).logits, own)


@cases(*LOOPED, "openai_privacy_filter")  # which labels tokens and generates none
@torch.no_grad()
def test_generation_with_a_cache_and_left_padding_is_replayed(name, swapped):
    model, ids = family_model(name, swapped), token_ids(columns=5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True, "attention_mask": mask}
    with record(model) as recorder:
        first = model.generate(ids, **options)
    routes = recorder.routes()
    assert routes.lengths.tolist() == [6, 8]  # the last of 7 and 9 was never forwarded
    with replay(model, routes), given_experts(model) as given:
        second = model.generate(ids, **options)
    assert torch.equal(first.sequences, second.sequences)
    for ours, theirs in zip(first.logits, second.logits, strict=True):
        assert torch.equal(ours, theirs)
    layers = len(routes.layers)
    prompt = torch.stack(given[:layers], 1).view(2, 5, layers, -1).numpy()
    assert np.array_equal(prompt[0, 2:], routes[0].experts[:3])
    assert np.array_equal(prompt[1], routes[1].experts[:5])
    for step in range(3):
        taken = torch.stack(given[layers * (step + 1) : layers * (step + 2)], 1).numpy()
        assert np.array_equal(taken[0], routes[0].experts[3 + step])
        assert np.array_equal(taken[1], routes[1].experts[5 + step])


@torch.no_grad()
def test_a_generation_is_replayed_in_one_forward_of_all_its_tokens():
    """As a sampler and a trainer do: one token at a time there, all at once here."""
    model, ids = family_model("olmoe"), token_ids(rows=1, columns=5)
    with record(model) as recorder:
        tokens = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    routes = recorder.routes()
    with (
        pytest.raises(ValueError, match=r"1 of 11 tokens; from number 0 on they have \[10\]"),
        replay(model, routes),
    ):
        model(tokens)
    with replay(model, routes.extended()), given_experts(model) as given:
        model(tokens)
    taken = torch.stack(given, 1).numpy()
    assert np.array_equal(taken[:10], routes.experts)


@torch.no_grad()
def test_a_long_generation_has_the_choice_of_every_call_in_its_order():
    """Calls of few tokens wait and are stacked together; 39 leave some that still wait."""
    model, ids = family_model("olmoe"), token_ids(rows=1, columns=5)
    length = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    with record(model, weights=True) as recorder, given_experts(model) as given:
        model.generate(ids, **length)
    routes, layers = recorder.routes(), len(recorder.routes().fingerprint.layers)
    calls = [torch.stack(given[at : at + layers], 1) for at in range(0, len(given), layers)]
    assert len(calls) == 40
    assert np.array_equal(torch.cat(calls).numpy(), routes.experts)
    assert routes.experts.dtype == np.uint8 and routes.weights.dtype == np.float32
    assert np.array_equal(recorder.routes().experts, routes.experts)


@torch.no_grad()
def test_a_loop_of_ones_own_over_a_cache_is_followed():
    model, ids = family_model("mixtral", swapped=True), token_ids(columns=6)
    with record(model) as recorder:
        whole = model(ids, use_cache=False).logits
    routes = recorder.routes()
    with replay(model, routes) as session:
        output = model(ids[:, :3], use_cache=True)
        parts = [output.logits]
        for column in range(3, 6):
            assert session.remaining == 0
            cache = output[CACHE]
            output = model(ids[:, column : column + 1], **{CACHE: cache}, use_cache=True)
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_cache_is_found_under_every_name():
    model, ids = family_model("olmoe"), token_ids()
    cache = DynamicCache(config=model.config)
    model(ids[:, :5], **{CACHE: cache})
    for name in ("cache", "past_key_values", "memory"):
        inputs = read_inputs(model, (), {"input_ids": ids[:, 5:], name: cache})
        assert (inputs.past, inputs.grows) == (5, True)
        assert not read_inputs(model, (), {"input_ids": ids, name: None}).grows
    paged, starts = object(), torch.arange(6).remainder(3).expand(1, 6)
    packed = {"input_ids": ids[:1, :6], "position_ids": starts, "cache": paged}
    assert read_inputs(model, (), packed).packed.tolist() == [3, 3]


@torch.no_grad()
def test_an_emptied_cache_begins_new_sequences():
    model, ids = family_model("olmoe"), token_ids()
    cache = DynamicCache(config=model.config)
    with record(model) as recorder:
        model(ids[:, :5], **{CACHE: cache})
        for layer in cache.layers:
            layer.keys = layer.values = None
            layer.is_initialized = False
        assert cache.get_seq_length() == 0
        model(ids[:, 5:], **{CACHE: cache})
    assert recorder.routes().lengths.tolist() == [5, 5, 7, 7]


@torch.no_grad()
def test_tokens_that_are_read_again_have_their_last_route():
    """A draft that is rejected is cut off the cache, and its place read again."""
    model, ids, other = family_model("olmoe"), token_ids(), token_ids(seed=2)
    with record(model) as whole:
        model(ids, use_cache=False)
    with record(model) as recorder:
        cache = model(ids[:, :6], use_cache=True)[CACHE]
        model(other[:, :4], **{CACHE: cache})
        cache.crop(-4)
        model(ids[:, 6:], **{CACHE: cache})
    assert recorder.routes() == whole.routes()


@torch.no_grad()
def test_a_call_that_failed_is_not_recorded():
    model, ids = family_model("olmoe"), token_ids()
    with record(model) as recorder:
        with pytest.raises(IndexError):
            model(ids + 10**6, use_cache=False)
        with pytest.raises(ValueError, match="ran outside of a call of the model that is recorded"):
            model.model(ids)
        model(ids, use_cache=False)
    assert recorder.routes().lengths.tolist() == [12, 12]


@torch.no_grad()
def test_a_call_that_failed_leaves_its_routes_to_the_next():
    """Whether it failed before its routers, between them or after them, or goes on with a cache."""
    model, ids = family_model("olmoe"), token_ids()
    routes = drawn_for(model, (12, 12))
    places = (model.model.embed_tokens, model.model.layers[1].mlp, model.lm_head)

    def failing(module, *args, **kwargs):
        def fail(*call):
            raise MemoryError

        hook = module.register_forward_pre_hook(fail)
        with pytest.raises(MemoryError):
            model(*args, **kwargs)
        hook.remove()

    with replay(model, routes) as session:
        for module in places:
            failing(module, ids, use_cache=False)
            assert session.remaining == 2
        with given_experts(model) as first:
            cache = model(ids[:, :5], use_cache=True)[CACHE]
        failing(places[0], ids[:, 5:], **{CACHE: cache})
        with given_experts(model) as second:
            model(ids[:, 5:], **{CACHE: cache})
        assert session.remaining == 0
    taken = [torch.stack(given, 1).unflatten(0, (2, -1)) for given in (first, second)]
    assert np.array_equal(torch.cat(taken, 1).flatten(0, 1).numpy(), routes.experts)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_takes_no_route_of_a_token(side):
    model = family_model("qwen3_moe")
    routes = drawn_for(model, (3, 7))
    ids, mask = token_ids(columns=7), routes.padded(side)[1].long()
    with replay(model, routes), given_experts(model) as given:
        model(ids, attention_mask=mask, use_cache=False)
    taken = torch.stack(given, 1).view(2, 7, 2, -1)
    assert np.array_equal(taken[mask.bool()].numpy(), routes.experts)
    with replay(model, drawn_for(model, (3, 7), seed=1)), given_experts(model) as others:
        model(ids, attention_mask=mask, use_cache=False)
    # The first layer's padding chooses for itself, whatever the routes of the tokens are.
    padding = ~mask.bool().flatten()
    assert torch.equal(given[0][padding], others[0][padding])
    assert not torch.equal(given[0][~padding], others[0][~padding])


@torch.no_grad()
def test_packed_sequences_begin_where_their_positions_do():
    model = family_model("olmoe")
    ids, lengths = token_ids(rows=1, columns=12), (5, 3, 4)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with record(model) as recorder:
        logits = model(ids, position_ids=positions, use_cache=False).logits
    routes = recorder.routes()
    assert routes.lengths.tolist() == list(lengths)
    with replay(model, routes):
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, logits)
    with replay(model, routes[[2, 0, 1]]) as session, given_experts(model) as given:
        model(ids[:, :4], use_cache=False)
        model(ids[:, 4:], use_cache=False)  # without positions the lengths tell
        assert session.remaining == 0
    taken = np.concatenate([torch.stack(given[:2], 1), torch.stack(given[2:], 1)])
    assert np.array_equal(taken, routes[[2, 0, 1]].experts)
    message = "sequence 0 has 5 in the call and 4 in the routes"
    with pytest.raises(ValueError, match=message), replay(model, routes[[2, 0, 1]]):
        model(ids, position_ids=positions, use_cache=False)


@torch.no_grad()
def test_experts_above_256_are_recorded_and_replayed():
    sizes = {name: size for name, size in TINY.items() if name != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=300, router={"kind": "linear"})
    model, ids = L2rOlmoeForCausalLM(config).eval(), token_ids()
    with record(model) as recorder, given_experts(model) as given:
        logits = model(ids, use_cache=False).logits
    routes = recorder.routes()
    taken = torch.stack(given, dim=1)
    assert taken.max() > 255 and np.array_equal(routes.experts, taken)
    with replay(model, routes):
        assert torch.equal(model(ids, use_cache=False).logits, logits)


@torch.no_grad()
def test_a_packed_row_may_begin_in_the_middle_of_a_sequence():
    model, ids = family_model("olmoe"), token_ids(rows=2, columns=6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]])
    with record(model) as recorder:
        model(ids, position_ids=positions, use_cache=False)
    assert recorder.routes().lengths.tolist() == [6, 2, 4]


@torch.no_grad()
def test_a_token_without_a_route_chooses_for_itself():
    model, ids = family_model("deepseek_v3"), token_ids(rows=1)
    whole = drawn_for(model, (12,))
    has = np.array([0, 1, 2, 5, 6, 9])
    part = Routes(whole.experts[has], whole.fingerprint, [12], [6], has)
    with replay(model, part), given_experts(model) as given:
        model(ids, use_cache=False)
    with given_experts(model) as own:
        model(ids, use_cache=False)
    assert np.array_equal(given[0][has].numpy(), part.experts[:, 0])
    rest = np.setdiff1d(np.arange(12), has)
    assert torch.equal(given[0][rest], own[0][rest])  # the first routed layer's inputs are equal
    with replay(model, part.truncated(0).extended(12)), given_experts(model) as none:
        model(ids, use_cache=False)
    assert torch.equal(none[0], own[0])


@pytest.mark.parametrize("kind", router_names())
def test_every_router_of_ours_is_replayed(kind):
    model, ids = own_model(kind=kind), token_ids()
    logits, gradients = logits_and_gradients(model, ids)
    with record(model) as recorder:
        model(ids, use_cache=False)
    with replay(model, recorder.routes()):
        replayed, again = logits_and_gradients(model, ids)
    assert torch.equal(replayed, logits)
    assert all(torch.equal(again[key], gradients[key]) for key in gradients)
    routes = drawn_for(model, (12, 12))
    with replay(model, routes), capture(model) as captured:
        _, gradients = logits_and_gradients(model, ids)
    assert np.array_equal(torch.stack(captured.indices(), 1).numpy(), routes.experts)
    gates = [value for key, value in gradients.items() if "gate." in key]
    assert gates
    assert all(gate.isfinite().all() for gate in gates)
    assert any(gate.abs().max() > 0 for gate in gates)


def test_fused_routers_have_the_gradients_of_plain_code_in_float64():
    config = L2RConfig(rank=4, heads=4, normalize_weights=True)
    torch.manual_seed(0)
    router = build_router(config, hidden_size=32, num_experts=16, top_k=4)
    routes, x = drawn_for(router, (40,)), torch.randn(40, 32)
    shares = torch.randn(40, 4)

    def gradients(router, x):
        router.zero_grad()
        with replay(router, routes):
            _, weights, indices = router(x)
        assert np.array_equal(indices.numpy(), routes.experts[:, 0])
        (weights * shares.to(weights)).sum().backward()
        return [p.grad.double().clone() for p in router.parameters()]

    fused = gradients(router, x)
    with dispatch.implementation("plain"):
        exact = gradients(router.double(), x.double())
    for ours, reference in zip(fused, exact, strict=True):
        bound = 64 * torch.finfo(torch.float32).eps * 40**0.5 * reference.abs().max().item()
        assert reference.abs().max() > 1e-3
        torch.testing.assert_close(ours, reference, rtol=0, atol=bound)


@torch.no_grad()
def test_images_are_sequences_of_patches():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "intermediate_size": 16, "num_experts": 4}
    model = L2rViTForImageClassification(L2rViTConfig(**sizes, **image, moe_layers=[1])).eval()
    pixels = torch.randn(3, 3, 8, 8)
    with record(model) as recorder:
        logits = model(pixel_values=pixels).logits
    routes = recorder.routes()
    assert routes.lengths.tolist() == [5, 5, 5]  # four patches and the class
    assert routes.layers == (1,)
    with replay(model, routes) as session:
        assert torch.equal(model(pixels).logits, logits)
        assert session.remaining == 0
    with replay(model, routes[1:]) as session, given_experts(model) as given:
        model(pixel_values=pixels[1:2])
        assert session.remaining == 1
    assert np.array_equal(given[0].numpy(), routes[1].experts[:, 0])


@torch.no_grad()
def test_a_layer_alone_is_replayed():
    router = build_router(L2RConfig(rank=2), hidden_size=16, num_experts=4, top_k=2)
    layer = MoELayer(router, Experts(4, 16, 8))
    for shape in ((6, 16), (2, 3, 16)):
        x = torch.randn(*shape)
        with record(layer) as recorder:
            out = layer(x)
        routes = recorder.routes()
        assert routes.lengths.tolist() == ([6] if len(shape) == 2 else [3, 3])
        with replay(layer, routes):
            assert torch.equal(layer(x), out)


@torch.no_grad()
def test_two_models_replay_side_by_side_in_threads():
    models = [family_model("olmoe"), family_model("olmoe")]
    routes = [drawn_for(model, (12, 12), seed) for seed, model in enumerate(models)]
    ids, results, barrier = token_ids(), {}, threading.Barrier(2, timeout=60)

    def run(number):
        torch.set_grad_enabled(False)
        for _ in range(8):
            with replay(models[number], routes[number]):
                barrier.wait()
                results.setdefault(number, []).append(models[number](ids, use_cache=False).logits)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        with replay(models[number], routes[number]):
            expected = models[number](ids, use_cache=False).logits
        assert len(results[number]) == 8
        assert all(torch.equal(logits, expected) for logits in results[number])
    assert not torch.equal(results[0][0], results[1][0])


@torch.no_grad()
def test_blocks_inside_one_another_belong_to_their_models():
    first, second, ids = family_model("olmoe"), family_model("mixtral"), token_ids()
    routes = drawn_for(first, (12, 12))
    own = second(ids, use_cache=False).logits
    with replay(first, routes), record(second) as recorder:
        first(ids, use_cache=False)
        assert torch.equal(second(ids, use_cache=False).logits, own)
    assert recorder.routes().fingerprint.model_type == "mixtral"


@pytest.mark.parametrize("swapped", [False, True])
@torch.no_grad()
def test_of_two_blocks_on_one_model_the_later_decides_where_it_has_a_route(swapped):
    model, ids = family_model("mixtral", swapped), token_ids()
    first, second = (drawn_for(model, (12, 12), seed) for seed in (1, 2))
    padded, mask = second.padded("right", 12)
    padded[0, 3:5] = NO_ROUTE
    later = Routes.from_padded(padded, mask, second.fingerprint)
    with replay(model, first), replay(model, later), given_experts(model) as given:
        model(ids, use_cache=False)
    taken = torch.stack(given, 1).numpy()
    expected = second.experts.copy()
    expected[3:5] = first.experts[3:5]
    assert np.array_equal(np.sort(taken), np.sort(expected))


def test_a_model_is_as_before_after_a_block_that_failed():
    model, ids = family_model("olmoe"), token_ids()
    own = model(ids, use_cache=False).logits
    before = {name: set(vars(module)) for name, module in model.named_modules()}

    with pytest.raises(KeyError), replay(model, drawn_for(model, (12, 12))):
        model(ids, use_cache=False)
        raise KeyError
    with pytest.raises(KeyError), record(model):
        raise KeyError
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(ids, use_cache=False).logits, own)


def test_routers_that_losses_see_are_replayed():
    """``capture`` inside the block: balance losses count the experts that were taken."""
    model, ids = family_model("olmoe", swapped=True), token_ids()
    routes = drawn_for(model, (12, 12))
    with replay(model, routes), capture(model) as captured:
        output = model(ids, use_cache=False, output_router_logits=True)
    assert np.array_equal(torch.stack(captured.indices(), 1).numpy(), routes.experts)
    assert len(output.router_logits) == 2


class Wrapped(nn.Module):
    """As DistributedDataParallel does, a module around the model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@torch.no_grad()
def test_a_wrapped_model_is_replayed_inside_and_out():
    model, ids = family_model("olmoe"), token_ids()
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    with record(model) as recorder:
        expected = model(ids, mask, use_cache=False).logits
    routes = recorder.routes()
    assert routes.lengths.tolist() == [9, 12]
    outer = Wrapped(model)
    for replayed in (model, outer):
        with replay(replayed, routes):  # the mask by its place
            assert torch.equal(outer(ids, mask, use_cache=False).logits, expected)


@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
@torch.no_grad()
def test_positions_beside_a_mask_are_of_padding_and_begin_no_sequence(name):
    """As generation pads to the left: a column of padding has position 0, and so has a start."""
    model, ids = family_model(name), token_ids(rows=3, columns=6)
    mask = (torch.arange(6) >= torch.tensor([[0], [2], [4]])).long()
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)}
    with record(model) as recorder:
        logits = model(ids, use_cache=False, **given).logits
    routes = recorder.routes()
    assert routes.lengths.tolist() == mask.sum(1).tolist()
    with replay(model, routes):
        again = model(ids, use_cache=False, **given).logits
    assert torch.equal(again[mask.bool()], logits[mask.bool()])


def test_an_offloaded_model_is_replayed_as_it_is_recorded():
    """accelerate keeps its tensors elsewhere until a layer runs."""
    model, ids = family_model("olmoe", swapped=True), token_ids()
    with torch.no_grad(), record(model) as recorder:
        expected = model(ids, use_cache=False).logits
    cpu_offload(model, execution_device="cpu")
    with torch.no_grad(), replay(model, recorder.routes()):
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=0)
