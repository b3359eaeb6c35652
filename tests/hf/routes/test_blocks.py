"""Several blocks of record and replay on one model: they end in any order and leave nothing."""

import itertools
import threading

import pytest
import torch

from l2r import record, replay
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import sample_tokens, tiny_model
from tests.hf.swap.test_swapped_classes import swapped


def stock():
    return tiny_model(FAMILIES["olmoe"])


KINDS = {"stock": stock, "swapped": lambda: swapped("olmoe")}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_end_in_any_order(kind, order):
    model, ids = KINDS[kind]().eval(), sample_tokens()
    forwards = {m: vars(m).get("forward") for m in model.modules()}
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    with torch.no_grad(), record(model) as recorder:
        wanted = model(ids).logits
    routes = recorder.routes()
    blocks = [record(model), replay(model, routes), record(model)]
    first, _, last = (block.__enter__() for block in blocks)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted)
        assert first.routes() == last.routes() == routes
        for count, number in enumerate(order):
            blocks[number].__exit__(None, None, None)
            if 1 in order[: count + 1]:  # no block asks for more sequences
                assert torch.equal(model(ids).logits, wanted)
    assert {m: vars(m).get("forward") for m in model.modules()} == forwards
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks


def test_an_open_block_goes_on_after_an_earlier_one_has_ended():
    model, ids = stock().eval(), sample_tokens()
    one, other = record(model), record(model)
    one.__enter__()
    recorder = other.__enter__()
    one.__exit__(None, None, None)
    with torch.no_grad():
        model(ids)
    other.__exit__(None, None, None)
    assert len(recorder.routes()) == len(ids)
    with pytest.raises(ValueError, match="outside of a call of the model"), record(model):
        model.model(ids)


@pytest.mark.parametrize("block", ["record", "replay"])
def test_a_second_thread_is_refused_while_a_call_runs(block):
    """The first call, held inside a layer until the second was refused, is recorded whole."""
    model, ids = stock().eval(), sample_tokens()
    with torch.no_grad(), record(model) as recorder:
        wanted = model(ids).logits
    routes = recorder.routes()
    inside, go_on, results = threading.Event(), threading.Event(), []

    def hold(*args):
        inside.set()
        assert go_on.wait(60)

    @torch.no_grad()
    def call():
        results.append(model(ids).logits)

    with record(model) if block == "record" else replay(model, routes) as session:
        hook = model.model.layers[1].register_forward_pre_hook(hold)
        thread = threading.Thread(target=call)
        thread.start()
        assert inside.wait(60)
        try:
            with pytest.raises(ValueError, match="by one thread at a time"):
                model(ids)
        finally:
            go_on.set()
            thread.join()
            hook.remove()
    assert torch.equal(results[0], wanted)
    assert session.routes() == routes if block == "record" else session.remaining == 0


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_generation_with_a_static_cache_is_recorded_and_replayed(family, padded, implementation):
    """generate makes masks [B, 1, W, cache] for it, one per kind of layer in gpt-oss."""
    if family == "gpt_oss" and implementation == "sdpa":
        pytest.skip("gpt-oss computes its sinks in eager attention")
    model, ids = tiny_model(FAMILIES[family]).eval(), sample_tokens(3)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = {"cache_implementation": "static", "disable_compile": True}
    with record(model) as recorder:
        tokens = model.generate(ids, attention_mask=mask, **options)
    routes = recorder.routes()
    assert routes.lengths.tolist() == [15, 11 if padded else 15, 15]
    with record(model) as recorder:
        assert torch.equal(model.generate(ids, attention_mask=mask, **options, **static), tokens)
    assert recorder.routes() == routes
    with replay(model, routes), record(model) as recorder:
        model.generate(ids.flip(1), attention_mask=mask, **options, **static)
    assert recorder.routes() == routes
