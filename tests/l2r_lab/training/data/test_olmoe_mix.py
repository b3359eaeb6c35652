"""The subset plan against the paper's Table 11, and its file."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.files.wording import parse_tokens
from l2r_lab.training.data.olmoe_mix import (
    OLMOE_MIX,
    MixDomain,
    Mixture,
    name_shards,
    plan_subset,
    read_plan,
    write_plan,
)

# Domain, total shards, selected shards, approximate tokens (B): the paper's table, typed in.
PAPER = [
    ("dclm", 1970, 97, "190.06"),
    ("starcoder", 863, 43, "5.03"),
    ("pes2o", 26, 1, "2.20"),
    ("open-web-math", 26, 1, "0.49"),
    ("algebraic-stack", 16, 1, "0.79"),
    ("wiki", 2, 1, "1.84"),
]


def counts(plan):
    return [len(domain.shards) for domain in plan.domains]


def test_200b_plan_is_the_papers_table():
    plan = plan_subset(200_000_000_000)
    got = [(d.name, d.total_shards, len(d.shards), f"{d.tokens / 1e9:.2f}") for d in plan.domains]
    assert got == PAPER
    assert sum(counts(plan)) == 144
    assert f"{plan.tokens / 1e9:.2f}" == "200.41"


@pytest.mark.parametrize(
    ("target", "expected", "tokens"),
    [
        ("10B", [5, 2, 1, 1, 1, 1], "15.35"),
        ("50B", [24, 11, 1, 1, 1, 1], "53.63"),
        ("100B", [49, 21, 1, 1, 1, 1], "103.79"),
    ],
)
def test_smaller_subsets_of_the_paper(target, expected, tokens):
    plan = plan_subset(parse_tokens(target))
    assert counts(plan) == expected
    assert f"{plan.tokens / 1e9:.2f}" == tokens


def test_papers_stated_total_of_4_07t_would_not_give_its_own_table():
    starcoder = [d.name for d in OLMOE_MIX.domains].index("starcoder")
    # The card's arXiv tokens, for which the repository has no shards, make the difference.
    missing = MixDomain("arxiv", 1, 4.07e12 - OLMOE_MIX.tokens)
    stated = Mixture(OLMOE_MIX.repository, (*OLMOE_MIX.domains, missing))
    assert counts(plan_subset(200_000_000_000, mixture=stated))[starcoder] == 42
    assert counts(plan_subset(200_000_000_000))[starcoder] == 43


@settings(deadline=None, max_examples=40)
@given(
    shards=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**20),
)
def test_shards_are_whole_distinct_and_within_the_domain(shards, share, seed):
    mixture = Mixture("x/y", tuple(MixDomain(f"d{i}", n, 1e6 * n) for i, n in enumerate(shards)))
    target = max(1, int(share * mixture.tokens))
    plan = plan_subset(target, mixture=mixture, seed=seed)
    for total, domain in zip(shards, plan.domains, strict=True):
        indices = [s.index for s in domain.shards]
        assert indices == sorted(set(indices))
        assert 1 <= len(indices) <= total
        assert all(0 <= i < total for i in indices)


def test_small_plan_is_part_of_a_large_one_and_seeds_differ():
    small, large = plan_subset(10**10), plan_subset(10**11)
    for few, many in zip(small.domains, large.domains, strict=True):
        assert set(few.shards) <= set(many.shards)
    assert plan_subset(10**11, seed=1).domains[0].shards != large.domains[0].shards
    assert plan_subset(10**11).domains == large.domains


def test_drawn_shards_are_pinned_so_that_a_plan_means_the_same_everywhere():
    plan = plan_subset(10**10)
    drawn = [[s.index for s in d.shards] for d in plan.domains]
    assert drawn == [[530, 857, 1469, 1476, 1963], [261, 646], [7], [7], [2], [0]]


def test_plan_file_reads_back_and_names_the_shards(tmp_path):
    listing = {
        d.name: [f"data/{d.name}/f{i:04d}.gz" for i in range(d.shards)] for d in OLMOE_MIX.domains
    }
    plan = name_shards(plan_subset(10**10), listing, revision="abc")
    write_plan(tmp_path / "plan.json", plan)
    assert read_plan(tmp_path / "plan.json") == plan
    values = json.loads((tmp_path / "plan.json").read_text())
    first = values["domains"][0]["shards"][0]
    assert first["file"] == f"data/dclm/f{first['index']:04d}.gz"
    assert values["revision"] == "abc"


def test_a_listing_in_another_order_names_the_same_shards():
    listing = {d.name: [f"{i:04d}" for i in range(d.shards)] for d in OLMOE_MIX.domains}
    turned = {domain: names[::-1] for domain, names in listing.items()}
    plan = plan_subset(10**10)
    assert name_shards(plan, turned) == name_shards(plan, listing)


def test_incomplete_listing_is_refused():
    with pytest.raises(ValueError, match="must have 1970 shards of dclm; got 1"):
        name_shards(plan_subset(10**10), {"dclm": ["data/dclm/a.json.gz"]})


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"tokens": 1, "domains": [{"x": 1}]}'])
def test_file_that_is_no_plan_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="is not a shard plan"):
        read_plan(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("text", "value"),
    [("200B", 2 * 10**11), ("1.5t", 15 * 10**11), ("7", 7), (" 3k ", 3000), ("0.5M", 500_000)],
)
def test_token_counts_are_parsed(text, value):
    assert parse_tokens(text) == value


@pytest.mark.parametrize("text", ["", "B", "-1B", "1e9", "10 GB", "nan", "0", "0.0001K", "9" * 400])
def test_other_token_counts_are_refused(text):
    with pytest.raises(ValueError, match="tokens must look like 200B"):
        parse_tokens(text)


@pytest.mark.parametrize("target", [0, 5 * 10**12])
def test_target_outside_the_mixture_is_refused(target):
    with pytest.raises(ValueError, match="tokens must be between 1 and"):
        plan_subset(target)
