"""Rows of token files: how many of every domain are taken, and that they lie all over it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2r.text.manifest import Manifest, TokenizerIdentity, write_manifest
from l2r.text.rows import balanced_rows, spread_evenly
from l2r.text.token_writer import TokenWriter
from l2r.text.tokens import TokenDataset

IDENTITY = TokenizerIdentity("tiny", 300, eos_token_id=0)


def write(folder, files):
    """A folder whose i-th file is of a domain and holds so many rows of 4 tokens."""
    entries = []
    for number, (domain, rows) in enumerate(files):
        writer = TokenWriter(folder, f"{number}", domain=domain, tokenizer=IDENTITY)
        if rows:
            writer.append([1] * (4 * rows - 1))
        entries.append(writer.close())
    write_manifest(folder, Manifest(IDENTITY, tuple(entries)))
    return TokenDataset(folder, 4)


def counts(dataset, chosen):
    domains = [dataset.domains[d] for d in dataset.rows(chosen)["domain"].tolist()]
    return {domain: domains.count(domain) for domain in dataset.domains}


def test_every_domain_gives_the_same_number_whatever_it_holds(tmp_path):
    dataset = write(tmp_path, [("large", 900), ("middle", 60), ("small", 12)])
    assert counts(dataset, balanced_rows(dataset, 30)) == {"large": 10, "middle": 10, "small": 10}


def test_what_a_small_domain_lacks_is_dealt_to_the_others(tmp_path):
    dataset = write(tmp_path, [("large", 900), ("middle", 60), ("small", 2)])
    assert counts(dataset, balanced_rows(dataset, 30)) == {"large": 14, "middle": 14, "small": 2}


def test_no_domain_is_absent_where_fewer_rows_than_domains_are_wanted(tmp_path):
    dataset = write(tmp_path, [("a", 900), ("b", 1), ("c", 20)])
    assert counts(dataset, balanced_rows(dataset, 1)) == {"a": 1, "b": 1, "c": 1}


def test_rows_of_a_domain_lie_all_over_its_files(tmp_path):
    """Files of a domain need not follow each other, and may be empty."""
    files = [("a", 10), ("b", 5), ("a", 0), ("a", 10)]
    dataset = write(tmp_path, files)
    chosen = balanced_rows(dataset, 8)
    of_a = [row if row < 10 else row - 5 for row in chosen if not 10 <= row < 15]
    assert of_a == [0, 6, 12, 19]  # of the twenty rows 0 to 19, evenly, the ends among them
    assert list(chosen) == sorted(chosen)


def test_all_rows_in_their_order_where_as_many_are_wanted(tmp_path):
    dataset = write(tmp_path, [("a", 7), ("b", 3), ("a", 2)])
    assert list(balanced_rows(dataset, 12)) == list(balanced_rows(dataset, 10**6)) == [*range(12)]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(1, 40),
)
def test_shares_differ_by_one_at_most_but_for_domains_that_gave_all(tmp_path_factory, files, count):
    total = sum(rows for _, rows in files)
    if total == 0:
        return
    dataset = write(tmp_path_factory.mktemp("rows"), files)
    held = {d: sum(rows for domain, rows in files if domain == d) for d, _ in files}
    chosen = balanced_rows(dataset, count)
    shares = counts(dataset, chosen)
    filled = [share for domain, share in shares.items() if share < held[domain]]
    assert max(shares.values()) - min(filled, default=max(shares.values())) <= 1
    assert all(shares[domain] > 0 for domain in held if held[domain])
    assert len(set(chosen.tolist())) == len(chosen)
    assert len(chosen) == min(total, max(count, sum(rows > 0 for rows in held.values())))


@pytest.mark.parametrize(("size", "count", "wanted"), [(9, 3, [0, 4, 8]), (2, 5, [0, 1])])
def test_evenly_spread_positions_have_both_ends(size, count, wanted):
    assert spread_evenly(size, count).tolist() == wanted
    assert spread_evenly(size, count).dtype == np.int64


def test_domains_are_in_the_order_of_the_alphabet_whatever_that_of_the_files(tmp_path):
    """Their numbers are kept in results: those of another process must mean the same."""
    names = list("hcfbgade")
    dataset = write(tmp_path, [(name, 1) for name in names])
    assert dataset.domains == tuple("abcdefgh")
    assert [dataset.domains[d] for d in dataset.rows(range(8))["domain"].tolist()] == names
