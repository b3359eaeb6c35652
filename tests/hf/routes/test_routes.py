"""Routes hold the experts of every token, and refuse what no model could have chosen."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from l2r.hf.routes import NO_ROUTE, Fingerprint, Routes, check_tokens, tokenizer_digest
from tests.hf.routes.made import drawn, fingerprint


@pytest.mark.parametrize(("experts", "kind"), [(256, "uint8"), (257, "uint16"), (65536, "uint16")])
def test_experts_take_one_byte_up_to_256(experts, kind):
    top = [[[experts - 1, 0]]]
    routes = Routes(np.array(top), fingerprint(experts, layers=(0,)), np.array([1]))
    assert routes.experts.dtype == kind
    assert routes.experts.tolist() == top


def test_sequences_are_taken_by_number_slice_and_list():
    routes = drawn((3, 0, 5))
    assert len(routes) == 3
    assert np.array_equal(routes[2].experts, routes.experts[3:])
    assert routes[-1] == routes[2]
    assert routes[1:] == Routes.concatenate([routes[1], routes[2]])
    assert routes[[2, 0]].experts.tolist() == [
        *routes[2].experts.tolist(),
        *routes[0].experts.tolist(),
    ]
    assert Routes.concatenate(list(routes)) == routes
    assert len(routes[[]]) == 0
    with pytest.raises(IndexError):
        routes[3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_marked_and_never_an_expert(side):
    routes = drawn((3, 0, 5))
    experts, mask = routes.padded(side, width=6)
    assert experts.dtype == torch.int64
    assert experts.shape == (3, 6, 2, 2)
    assert mask.sum(1).tolist() == [3, 0, 5]
    assert (experts[~mask] == NO_ROUTE).all()
    columns = slice(0, 3) if side == "right" else slice(3, 6)
    assert torch.equal(experts[0, columns], torch.from_numpy(routes[0].experts).long())
    assert Routes.from_padded(experts, mask, routes.fingerprint) == routes


def test_tokens_without_a_route_keep_their_place():
    """A prefix that was not recorded and a last token that was never forwarded."""
    routes = drawn((3,), lengths=(6,), positions=np.array([1, 2, 4]))
    experts, mask = routes.padded()
    assert mask.all()
    assert (experts[0, :, 0, 0] == NO_ROUTE).tolist() == [True, False, False, True, False, True]
    assert Routes.from_padded(experts, mask, routes.fingerprint) == routes


@pytest.mark.parametrize("places", [(1, slice(None)), (0, 1), (slice(None), 0)])
def test_a_token_with_a_part_of_a_route_is_refused(places):
    """Also where a layer has none: it counted as a token without a route, silently."""
    routes = drawn((3, 5))
    experts, mask = routes.padded()
    experts[1, 2][places] = NO_ROUTE
    layer = 3 if places[0] == 1 else 1
    message = (
        rf"must all be -1, or none of them; got \[.*-1.*\] of sequence 1, token 2, layer {layer}$"
    )
    with pytest.raises(ValueError, match=message):
        Routes.from_padded(experts, mask, routes.fingerprint)
    experts[1, 2] = NO_ROUTE
    assert Routes.from_padded(experts, mask, routes.fingerprint).counts.tolist() == [3, 4]


def test_a_last_token_is_added_and_tokens_are_cut_off():
    routes = drawn((3, 5))
    longer = routes.extended(2)
    assert longer.lengths.tolist() == [5, 7]
    assert longer.counts.tolist() == [3, 5]
    shorter = longer.truncated(4)
    assert shorter.lengths.tolist() == [4, 4]
    assert shorter.counts.tolist() == [3, 4]
    assert np.array_equal(shorter[1].experts, routes[1].experts[:4])
    assert longer.truncated(99) == longer


def test_agreement_counts_sets_and_not_their_order():
    routes = drawn((4,))
    experts = routes.experts[..., ::-1].copy()
    free = set(range(8)) - set(routes.experts[1, 0].tolist())
    experts[1, 0, 0] = free.pop()
    changed = Routes(experts, routes.fingerprint, routes.lengths)
    agreement = routes.agreement(changed)
    assert agreement.layers.tolist() == [0.75, 1.0]
    assert agreement.tokens == 0.75
    assert agreement.compared == 4
    assert routes != changed


def by_token(routes):
    """Sets of experts in every layer, by sequence and position."""
    places = zip(routes.sequence_of_rows.tolist(), routes.positions.tolist(), strict=True)
    sets = ([frozenset(layer) for layer in token] for token in routes.experts.tolist())
    return dict(zip(places, sets, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_agreement_of_sequences_with_gaps_is_that_of_a_loop(seed):
    lengths, chance = np.array([5, 4, 0, 6]), np.random.default_rng(seed)
    whole, parts = drawn(lengths, seed=seed), []
    for _ in range(2):
        has = chance.random(lengths.sum()) < 0.7
        has[0] = True
        counts = np.bincount(whole.sequence_of_rows[has], minlength=len(lengths))
        experts = whole.experts[has].copy()
        experts[chance.random(len(experts)) < 0.3, 0] = [6, 7]
        part = Routes(experts, whole.fingerprint, lengths, counts, whole.positions[has])
        parts.append(part)
    one, other = map(by_token, parts)
    pairs = [(one[place], other[place]) for place in one.keys() & other.keys()]
    agreement = parts[0].agreement(parts[1])
    assert agreement.compared == len(pairs) < min(len(one), len(other))
    for layer in range(2):
        equal = [a[layer] == b[layer] for a, b in pairs]
        assert agreement.layers[layer] == pytest.approx(np.mean(equal))
    assert agreement.tokens == pytest.approx(np.mean([a == b for a, b in pairs]))


def test_agreement_leaves_out_tokens_without_a_route():
    whole = drawn((6,))
    positions = np.array([0, 4])
    part = Routes(whole.experts[positions], whole.fingerprint, [6], [2], positions)
    agreement = whole.agreement(part)
    assert agreement.compared == 2
    assert agreement.tokens == 1
    nothing = part.truncated(0).extended(6)
    assert np.isnan(nothing.agreement(part).tokens)
    with pytest.raises(ValueError, match=r"sequences of the same lengths; got \[6\] and \[7\]"):
        whole.agreement(whole.extended())


@pytest.mark.parametrize("weights", [False, True])
def test_a_file_gives_back_what_was_saved(weights, tmp_path):
    of = fingerprint(300, tokenizer="abc")
    routes = drawn((3, 0, 5), of, lengths=(4, 1, 5))
    if weights:
        drawn_weights = np.random.default_rng(1).random((8, 2, 2), np.float32)
        routes = dataclasses.replace(routes, weights=drawn_weights)
    routes.save(tmp_path / "a.safetensors")
    loaded = Routes.load(tmp_path / "a.safetensors")
    assert loaded == routes
    assert loaded.fingerprint == of
    assert loaded.experts.dtype == np.uint16
    assert (loaded.weights is not None) == weights


def test_a_file_is_of_the_tokens_that_it_was_saved_with(tmp_path):
    """In their order; of int32 or int64."""
    path, rows = tmp_path / "a.safetensors", [torch.tensor([5, 6, 7]), torch.tensor([1, 2])]
    drawn((3, 2)).save(path)
    assert not check_tokens(path, rows)
    drawn((3, 2)).save(path, rows=rows)
    assert check_tokens(path, [row.int() for row in rows])
    for others in (rows[::-1], [rows[0].flip(0), rows[1]], rows[:1]):
        with pytest.raises(ValueError, match="routes are of other tokens: "):
            check_tokens(path, others)


def whole_file(tmp_path, **changes):
    """A file of routes with some of its arrays or its metadata changed."""
    path = tmp_path / "routes.safetensors"
    drawn((3, 5)).save(path)
    with safe_open(path, framework="np") as file:
        metadata = {**file.metadata(), **changes.pop("metadata", {})}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    arrays.update(changes)
    save_file({k: v for k, v in arrays.items() if v is not None}, path, metadata)
    return path


BAD = {
    "no experts": ({"experts": None}, "arrays must be experts, lengths"),
    "another format": ({"metadata": {"format": "x"}}, "format must be 'l2r-routes-1'; got 'x'"),
    "no fingerprint": ({"metadata": {"fingerprint": ""}}, "line 1"),
    "other fields": ({"metadata": {"fingerprint": '{"top_k": 2}'}}, "must have the fields hidden"),
    "a list": ({"metadata": {"fingerprint": "[]"}}, "must be a JSON object; got list"),
    "out of range": ({"experts": np.full((8, 2, 2), 9)}, "between 0 and 7; got .9, 9. of token 0"),
    "twice": ({"experts": np.full((8, 2, 2), 7)}, "must choose different experts; got .7, 7."),
    "floats": ({"experts": np.ones((8, 2, 2))}, "must be whole numbers of shape"),
    "too few": ({"experts": np.ones((7, 2, 2), int)}, r"= \[8, 2, 2\]; got int64 of shape \[7"),
    "lengths": ({"lengths": np.array([3, -5])}, "lengths must be a list of whole numbers >= 0"),
    "counts": ({"counts": np.array([4, 5])}, "counts must say for each of the 2 sequences"),
    "positions": ({"positions": np.array([0, 2, 1, 0, 1, 2, 3, 4])}, "positions must rise within"),
    "few positions": ({"positions": np.array([0, 1, 2])}, "positions must be 8, one per route"),
    "weights": ({"weights": np.ones((8, 2, 1))}, "weights must have the shape of experts"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused_in_one_line(changes, message, tmp_path):
    path = whole_file(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as error:
        Routes.load(path)
    assert str(error.value).startswith(f"cannot read routes from {path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"xx", b"\xff" * 99, None])
def test_what_is_no_file_of_routes_is_refused(content, tmp_path):
    path = tmp_path / "routes.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="cannot read routes from"):
        Routes.load(path)


def test_a_cut_file_is_refused(tmp_path):
    path = whole_file(tmp_path)
    content = path.read_bytes()
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        with pytest.raises(ValueError, match="cannot read routes from"):
            Routes.load(path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_experts": 0}, "num_experts must be between 1 and 65536; got num_experts=0"),
        ({"num_experts": 65537}, "got num_experts=65537"),
        ({"top_k": 9}, "top_k must be between 1 and num_experts; got top_k=9"),
        ({"layers": ()}, "layers must be indices that rise, one at least"),
        ({"layers": (3, 1)}, r"indices that rise, one at least; got \(3, 1\)"),
        ({"hidden_layers": 3}, "layers must lie below hidden_layers; got layer 3"),
        ({"num_experts": 8.0}, "must be whole numbers"),
        ({"model_type": 3}, "must be text or None"),
    ],
)
def test_sizes_that_no_model_has_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        fingerprint(**values)


@pytest.mark.parametrize(
    "field", [{"num_experts": 9}, {"top_k": 3}, {"layers": (1, 2)}, {"model_type": "mixtral"}]
)
def test_fingerprints_differ_by_name(field):
    (name,) = field
    with pytest.raises(ValueError, match=f"routes and model must have the same {name}; got"):
        fingerprint().check(fingerprint(**field))


@pytest.mark.parametrize(
    ("stock", "swapped"),
    [("mixtral", "l2r_mixtral"), ("olmoe", "l2r_swapped_olmoe"), ("l2r_olmoe", "l2r_l2r_olmoe")],
)
def test_a_swapped_model_is_of_the_type_of_its_stock_model(stock, swapped):
    one, other = (fingerprint(model_type=name) for name in (stock, swapped))
    one.check(other)
    other.check(one)
    for name in ("l2r_qwen3_moe", "olmoe" if stock == "l2r_olmoe" else "l2r_olmoe"):
        with pytest.raises(ValueError, match=f"same model_type; got {swapped} in the routes"):
            other.check(fingerprint(model_type=name))


def test_what_nobody_said_fits_everything():
    fingerprint(tokenizer="a", model_type=None).check(fingerprint(tokenizer=None))
    with pytest.raises(ValueError, match="same tokenizer; got a in the routes and b in the model"):
        fingerprint(tokenizer="a").check(fingerprint(tokenizer="b"))


def test_a_fingerprint_survives_json():
    of = fingerprint(tokenizer="a")
    assert Fingerprint.from_values(json.loads(of.to_json())) == of


def test_a_tokenizer_is_known_by_its_vocabulary():
    class Words:
        def __init__(self, *words):
            self.words = words

        def get_vocab(self):
            return {word: number for number, word in enumerate(self.words)}

    assert tokenizer_digest(Words("a", "b")) == tokenizer_digest(Words("a", "b"))
    assert tokenizer_digest(Words("a", "b")) != tokenizer_digest(Words("b", "a"))
    assert tokenizer_digest(None) is None


def test_routes_of_two_models_are_not_joined():
    with pytest.raises(ValueError, match="must have one fingerprint"):
        Routes.concatenate([drawn(), drawn(of=fingerprint(16))])
    with pytest.raises(ValueError, match="must be at least 1; got 0"):
        Routes.concatenate([])
    weighed = drawn((1,), weights=np.ones((1, 2, 2)))
    with pytest.raises(ValueError, match="must all have weights, or none; 1 of 2"):
        Routes.concatenate([weighed, drawn((1,))])


def test_a_width_below_the_longest_sequence_is_refused():
    with pytest.raises(ValueError, match="width must be at least 5, the longest sequence; got"):
        drawn().padded(width=4)
    with pytest.raises(ValueError, match="side must be left or right; got side='top'"):
        drawn()._grid("top", None)
