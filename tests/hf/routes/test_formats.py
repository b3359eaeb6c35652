"""Routes in the formats of vLLM, SGLang and Megatron-core."""

import base64
import io

import numpy as np
import pytest
import torch

from l2r.hf.routes import (
    Fingerprint,
    from_megatron,
    from_sglang,
    from_verl,
    from_vllm,
    to_megatron,
    to_sglang,
    to_vllm,
)
from tests.hf.routes.made import drawn, fingerprint


def answered(tokens, seed=0, kind=np.uint8):
    """What an engine answers for a sequence: 4 hidden layers, of which 1 and 3 have a router."""
    array = np.zeros((tokens - 1, 4, 2), kind)
    drawn_experts = drawn((tokens - 1,), seed=seed).experts
    array[:, [1, 3]] = drawn_experts
    return array


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def test_vllm_counts_all_hidden_layers_and_not_the_last_token():
    arrays = [answered(6), answered(3, seed=1)]
    texts = [base64.b64encode(npy(array)).decode() for array in arrays]
    routes = from_vllm(texts, fingerprint())
    assert routes.lengths.tolist() == [6, 3]
    assert routes.counts.tolist() == [5, 2]
    assert np.array_equal(routes.experts, np.concatenate(arrays)[:, [1, 3]])
    assert to_vllm(routes) == texts
    assert from_vllm(arrays, fingerprint()) == routes
    assert from_vllm([npy(array) for array in arrays], fingerprint()) == routes


def test_vllm_writes_two_bytes_above_256_experts():
    of = fingerprint(300)
    routes = drawn((4,), of).extended()
    (text,) = to_vllm(routes)
    array = np.load(io.BytesIO(base64.b64decode(text)))
    assert array.dtype == np.uint16
    assert array.shape == (4, 4, 2)
    assert from_vllm([text], of) == routes


def test_a_skipped_prompt_has_no_route():
    routes = from_vllm([answered(6), answered(6)], fingerprint(), prompt_start=[0, 3])
    assert routes.lengths.tolist() == [6, 9]
    assert routes[1].positions.tolist() == [3, 4, 5, 6, 7]
    assert from_vllm(to_vllm(routes), fingerprint(), prompt_start=[0, 3]) == routes


def sglang_answer(array, **counts):
    text = base64.b64encode(array.astype("<i4").tobytes()).decode()
    return {"text": "", "meta_info": {**counts, "routed_experts": text}}


def test_an_answer_of_sglang_must_have_the_routes_that_its_token_counts_say():
    counts = {"prompt_tokens": 8, "completion_tokens": 12}
    whole = sglang_answer(answered(20), **counts)
    assert from_sglang([whole], fingerprint()).lengths.tolist() == [20]
    part = sglang_answer(answered(20)[5:], **counts)
    routes = from_sglang([part, whole], fingerprint(), start_len=[5, 0])
    assert routes.lengths.tolist() == [20, 20] and routes.positions[0] == 5
    line = "sequence 0 has 20 tokens, and 19 routes from token 5 on"
    with pytest.raises(ValueError, match=f"{line}, where 14 are due; .* ignored start_len"):
        from_sglang([whole], fingerprint(), start_len=5)
    with pytest.raises(ValueError, match="sequence 1 has 20 tokens, and 14 routes from token 0 on"):
        from_sglang([whole, part], fingerprint())


def test_zeros_of_a_server_are_no_routes_of_one_expert_per_token():
    one = Fingerprint(num_experts=2, top_k=1, layers=(1, 3), hidden_layers=4)
    line = "the server recorded nothing for sequence 1: expert 0 in every layer of all its 8 tokens"
    drawn_routes = np.zeros((8, 4, 1), np.uint8)
    drawn_routes[3, 1] = 1
    short = np.zeros((3, 4, 1), np.uint8)  # by chance, once in 64 times
    assert from_vllm([drawn_routes, short], one).lengths.tolist() == [9, 4]
    for read in (from_vllm, from_sglang):
        arrays = [drawn_routes, np.zeros((8, 4, 1), np.uint8)]
        values = arrays if read is from_vllm else [sglang_answer(array) for array in arrays]
        with pytest.raises(ValueError, match=line):
            read(values, one)


def test_a_route_of_the_last_token_is_not_written():
    whole = drawn((4,))
    assert to_vllm(whole) == to_vllm(whole.truncated(3).extended())
    assert to_sglang(whole) == to_sglang(whole.truncated(3).extended())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("%%%", "of vLLM must be base64 of a .npy file"),
        (base64.b64encode(b"nothing").decode(), "of vLLM must be base64 of a .npy file"),
        (b"", "of vLLM must be base64 of a .npy file"),
        (np.zeros((3, 2, 2), np.uint8), r"must be \[tokens, 4, 2\], all hidden layers counted"),
        (np.zeros((3, 4), np.uint8), r"counted; got \[3, 4\]"),
        (np.ones((3, 4, 2), np.uint8), "must choose different experts"),
        (np.zeros((3, 4, 2), np.uint8), "recorded nothing for token 0 of sequence 0, and for 3 of"),
        (npy(np.array([{}]))[:-20], "of vLLM must be base64 of a .npy file"),
    ],
)
def test_another_answer_of_vllm_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        from_vllm([value], fingerprint())


@pytest.mark.parametrize("start", [[1], [0, -1], -1])
def test_starts_must_fit_the_sequences(start):
    with pytest.raises(ValueError, match="starts must be >= 0, one for each of the 2 sequences"):
        from_vllm([answered(3), answered(3)], fingerprint(), prompt_start=start)


def test_engines_count_layers_that_the_fingerprint_must_know():
    of = fingerprint(hidden_layers=None)
    with pytest.raises(ValueError, match="the fingerprint must have hidden_layers"):
        to_vllm(drawn((3,), of))
    with pytest.raises(ValueError, match="the fingerprint must have hidden_layers"):
        from_sglang([""], of)


def test_a_hole_cannot_be_written():
    routes = drawn((2,), lengths=(4,), positions=np.array([0, 2]))
    with pytest.raises(ValueError, match="sequence 0 has 2 routes for tokens 0 to 2"):
        to_vllm(routes)
    with pytest.raises(ValueError, match="Megatron-core replays every token"):
        to_megatron(routes)


@pytest.mark.parametrize("write", [to_vllm, to_sglang])
def test_a_sequence_without_tokens_cannot_be_written(write):
    """Engines write the experts of all tokens but one."""
    message = "must have at least 1 token to be written; sequence 1 has 0"
    with pytest.raises(ValueError, match=message):
        write(drawn((3, 0, 5)))


def test_arrays_of_any_whole_numbers_are_read_together():
    """numpy makes floats of uint64 and int64."""
    kinds = (np.uint64, np.int64, np.uint8, np.int32, np.dtype(">i2"))
    arrays = [answered(4, seed) for seed, _ in enumerate(kinds)]
    mixed = [array.astype(kind) for array, kind in zip(arrays, kinds, strict=True)]
    assert from_vllm(mixed, fingerprint()) == from_vllm(arrays, fingerprint())
    for kind in (np.float32, bool):
        with pytest.raises(ValueError, match=f"must be whole numbers; got {np.dtype(kind)}"):
            from_vllm([arrays[0], arrays[1].astype(kind)], fingerprint())


def test_sglang_gives_int32_numbers_without_a_shape():
    arrays = [answered(6, kind=np.int32), answered(3, seed=1, kind=np.int32)]
    texts = [base64.b64encode(array.tobytes()).decode() for array in arrays]
    routes = from_sglang([{"meta_info": {"routed_experts": text}} for text in texts], fingerprint())
    assert routes == from_vllm(arrays, fingerprint())
    assert from_sglang(texts, fingerprint()) == routes
    assert to_sglang(routes) == texts


@pytest.mark.parametrize("text", ["%", "AAAA", base64.b64encode(bytes(20)).decode(), None])
def test_another_answer_of_sglang_is_refused(text):
    with pytest.raises(ValueError, match=r"must be base64 of int32 numbers \[tokens, 4, 2\]"):
        from_sglang([{"meta_info": {"routed_experts": text}}], fingerprint())


@pytest.mark.parametrize("top_k", [1, 2])
def test_verl_has_the_arrays_of_vllm_in_a_padded_batch(top_k):
    """Prompts of 4 and 2 to the left, answers of 2 and 3 to the right; the last has no route."""
    of = fingerprint(top_k=top_k)
    prompts, answers = (4, 2), (2, 3)
    arrays = []
    for seed, tokens in enumerate((6, 5)):
        array = np.zeros((tokens - 1, 4, top_k), np.uint8)
        array[:, [1, 3]] = drawn((tokens - 1,), of, seed=seed).experts
        arrays.append(array)
    batch = torch.zeros(2, 4 + 3, 4, top_k, dtype=torch.int16)
    mask = torch.zeros(2, 4 + 3, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = 4 - prompt, 4 + answer
        mask[row, start:end] = 1
        batch[row, start : end - 1] = torch.from_numpy(arrays[row]).to(batch.dtype)
    routes = from_verl(batch, mask, of)
    assert routes == from_vllm(arrays, of)
    assert routes.lengths.tolist() == [6, 5] and routes.counts.tolist() == [5, 4]


def test_tools_and_later_turns_of_verl_have_no_routes():
    """What was appended after the last generation has zeros, and chooses for itself."""
    batch = torch.zeros(1, 8, 4, 2, dtype=torch.int16)
    batch[0, :5] = torch.from_numpy(answered(6)).to(batch.dtype)
    routes = from_verl(batch, torch.ones(1, 8), fingerprint())
    assert routes.lengths.tolist() == [8] and routes.counts.tolist() == [5]
    batch[0, 2] = 0
    with pytest.raises(ValueError, match="recorded nothing for token 2 of sequence 0"):
        from_verl(batch, torch.ones(1, 8), fingerprint())
    with pytest.raises(ValueError, match=r"got \[1, 8, 4, 2\] and \[1, 7\]"):
        from_verl(batch, torch.ones(1, 7), fingerprint())


@pytest.mark.parametrize("side", ["left", "right"])
def test_megatron_has_the_sequences_innermost(side):
    routes = drawn((3, 5))
    layers = to_megatron(routes, side=side)
    assert [tuple(layer.shape) for layer in layers] == [(10, 2)] * 2
    experts, mask = routes.padded(side)
    for number, layer in enumerate(layers):
        assert layer.dtype == torch.int64
        grid = layer.view(5, 2, 2)
        for sequence in range(2):
            for column in range(5):
                if mask[sequence, column]:
                    theirs = grid[column, sequence]
                    assert torch.equal(theirs, experts[sequence, column, number])
    assert from_megatron(layers, mask, routes.fingerprint) == routes


def test_padding_for_megatron_is_spread_over_the_experts():
    """Every place is dispatched there: padding on expert 0 would fill it alone."""
    layers = to_megatron(drawn((1, 0)), width=33)
    for layer in layers:
        padding = layer[1:]
        load = torch.bincount(padding.flatten(), minlength=8)
        assert load.max() - load.min() <= 2
        assert (padding[:, 0] != padding[:, 1]).all()


@pytest.mark.parametrize("experts", [8, 7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_for_megatron_is_spread_wherever_it_lies(side, experts):
    """Rows of a batch alternate there: the padding of one short sequence in four is every fourth
    place, which met the same two of eight experts by its number."""
    routes = drawn((21, 20, 21, 1), fingerprint(experts))
    padding = ~routes.padded(side)[1].transpose(0, 1).flatten()
    for layer in to_megatron(routes, side=side):
        load = torch.bincount(layer[padding].flatten(), minlength=experts)
        assert load.max() - load.min() <= 1
        assert (layer[:, 0] != layer[:, 1]).all()


def test_a_last_token_without_a_route_is_spread_too():
    counts = (4,) * 8
    routes = drawn(counts, lengths=tuple(n + 1 for n in counts))
    for layer in to_megatron(routes):
        assert torch.bincount(layer[-8:].flatten(), minlength=8).tolist() == [2] * 8


def test_other_recorded_data_of_megatron_is_refused():
    routes = drawn((3, 5))
    layers, mask = to_megatron(routes), routes.padded()[1]
    with pytest.raises(ValueError, match=r"must be 2 tensors \[10, 2\]; got 1"):
        from_megatron(layers[:1], mask, routes.fingerprint)
    with pytest.raises(ValueError, match=r"must be 2 tensors \[10, 2\]; got 2 of shapes \[\(9"):
        from_megatron([layer[1:] for layer in layers], mask, routes.fingerprint)
