"""Experts by request from steps with several requests, cut prompts, cached prefixes, used slots."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.engines.vllm.recording import EXTENSION, check_settings, recording
from l2r.engines.vllm.steps import Scheduled, Steps

LAYERS, TOP_K, BLOCK = 2, 2, 4


def experts_of(tokens):
    """Experts of each token by all tokens up to it, as a cached prefix has them."""
    rows = []
    for end in range(1, len(tokens) + 1):
        seed = [7, *tokens[:end]]
        rows.append(np.random.default_rng(seed).permutation(8)[: LAYERS * TOP_K])
    return np.array(rows).reshape(-1, LAYERS, TOP_K)


class Engine:
    """Blocks of a cache by the tokens up to their end, least recently used first out."""

    def __init__(self, blocks):
        self.free = list(range(blocks))
        self.cached = {}
        self.held = {}

    def start(self, name, tokens):
        """How many tokens of a new request are in the cache; it gets blocks for all."""
        found = []
        while len(found) * BLOCK + BLOCK < len(tokens):
            block = self.cached.get(tuple(tokens[: len(found) * BLOCK + BLOCK]))
            if block is None:
                break
            found.append(block)
        held = list(found)
        for _ in range(len(found) * BLOCK, len(tokens), BLOCK):
            busy = {block for blocks in self.held.values() for block in blocks} | set(held)
            block = next(b for b in self.free if b not in busy)
            self.free.remove(block)
            self.free.append(block)
            self.cached = {key: b for key, b in self.cached.items() if b != block}
            held.append(block)
        self.held[name] = held
        return len(found) * BLOCK

    def slots(self, name, tokens):
        """Slots of a request's first ``tokens``."""
        positions = np.arange(tokens)
        return np.array(self.held[name])[positions // BLOCK] * BLOCK + positions % BLOCK

    def schedule(self, name, tokens, end):
        """Blocks that a step fills may be shared from that step on."""
        for place in range(BLOCK, end + 1, BLOCK):
            self.cached.setdefault(tuple(tokens[:place]), self.held[name][place // BLOCK - 1])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(0, 9)), min_size=1, max_size=8
    ),
    st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_every_request_gets_the_experts_of_its_own_tokens(drawn, budgets):
    """Three prefixes that are shared, other ends; steps of one to six tokens of two requests."""
    engine, steps = Engine(blocks=12), Steps(LAYERS, TOP_K, np.uint8, 12 * BLOCK)
    requests = [
        [prefix * 100 + n for n in range(length)] + [1000 + number * 50 + n for n in range(own)]
        for number, (prefix, length, own) in enumerate(drawn)
    ]
    waiting, done, turn = list(enumerate(requests)), {}, 0
    while waiting or engine.held:
        budget = budgets[turn % len(budgets)]
        turn += 1
        scheduled, rows = [], [np.zeros((0, LAYERS, TOP_K), int)]
        while waiting and len(engine.held) < 2:
            number, tokens = waiting.pop(0)
            done[number] = engine.start(number, tokens)
            engine.schedule(number, tokens, min(done[number] + budget, len(tokens)))
        for number in list(engine.held):
            tokens, first = requests[number], done[number]
            count = min(budget, len(tokens) - first)
            engine.schedule(number, tokens, first + count)
            slots = engine.slots(number, first + count)
            scheduled.append(Scheduled(str(number), first, count, slots))
            rows.append(experts_of(tokens)[first : first + count])
            done[number] += count
        padding = np.full((3, LAYERS, TOP_K), 9)
        steps.add(scheduled, np.concatenate([*rows, padding]))
        for number in [n for n in engine.held if done[n] == len(requests[n])]:
            del engine.held[number]
    for number, tokens in enumerate(requests):
        experts, known = steps.read(str(number))
        assert known.all() and experts.dtype == np.uint8
        assert np.array_equal(experts, experts_of(tokens))


def test_what_was_cached_before_is_unknown_and_no_expert():
    steps = Steps(LAYERS, TOP_K, np.uint8, 16)
    rows = np.full((2, LAYERS, TOP_K), 3)
    steps.add([Scheduled("a", 4, 2, np.arange(6))], rows)
    _, known = steps.read("a")
    assert known.tolist() == [False] * 4 + [True] * 2
    steps.drop("a")
    assert steps.names == []
    steps.add([Scheduled("b", 6, 1, np.arange(7))], rows[:1])  # its slots are known still
    assert steps.read("b")[1].tolist() == [False] * 4 + [True] * 3


def test_a_request_that_was_put_off_has_its_last_experts():
    steps = Steps(LAYERS, TOP_K, np.uint16, 16)
    for value, slots in ((300, np.arange(4)), (500, np.arange(8, 12))):
        steps.add([Scheduled("a", 0, 4, slots)], np.full((4, LAYERS, TOP_K), value))
    assert steps.read("a")[0].tolist() == np.full((4, LAYERS, TOP_K), 500).tolist()


def test_what_cannot_be_is_refused():
    steps = Steps(LAYERS, TOP_K, np.uint8, 16)
    with pytest.raises(ValueError, match="a step of 3 tokens must have as many rows; got 2"):
        steps.add([Scheduled("a", 0, 3, np.arange(3))], np.zeros((2, LAYERS, TOP_K), int))
    with pytest.raises(ValueError, match="no step had a request 'b'"):
        steps.read("b")


def settings_of(extension=EXTENSION, **changes):
    values = {
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_sequence_parallel_moe": False,
    }
    mode = changes.pop("cudagraph_mode", "NONE")
    transfer = changes.pop("kv_transfer_config", None)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**values | changes, worker_extension_cls=extension),
        kv_transfer_config=transfer,
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode)),
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
        ("decode_context_parallel_size", 2),
        ("use_sequence_parallel_moe", True),
        ("kv_transfer_config", "another engine"),
        ("cudagraph_mode", "FULL"),
    ],
)
def test_settings_under_which_it_would_be_wrong_are_refused(name, value):
    check_settings(settings_of())
    with pytest.raises(ValueError, match=f"{name} must be .* got {value}"):
        check_settings(settings_of(**{name: value}))


def test_an_engine_without_the_extension_is_refused():
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=settings_of(extension="")))
    with pytest.raises(ValueError, match="worker_extension_cls must be"), recording(llm):
        pass
