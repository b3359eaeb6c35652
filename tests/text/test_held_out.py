"""Which files of a domain are held out: a property of their text, under every cut."""

import hashlib
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from l2r.text.held_out import split_files
from l2r.text.split import VALIDATION, Split, position

CUTS = st.integers(20, 3000)
SIZES = st.lists(st.integers(1, 400), min_size=2, max_size=60)


def files_of(sizes, seed=0):
    """Files whose texts differ, by a number at their start."""
    return [(f"{i}.txt", f"{seed}-{i} ".ljust(size, "x")) for i, size in enumerate(sizes)]


def names(files):
    return {name for name, _ in files}


@given(SIZES, CUTS, CUTS, st.integers(0, 20))
def test_no_cut_trains_on_what_another_holds_out(sizes, first, second, seed):
    files = files_of(sizes, seed)
    splits = [split_files(iter(files), cut) for cut in (first, second)]
    for train, _ in splits:
        for _, validation in splits:
            assert train and validation and not names(train) & names(validation)


@given(SIZES, CUTS, CUTS, st.integers(0, 20))
def test_a_larger_cut_holds_out_all_that_a_smaller_one_does(sizes, first, second, seed):
    small, large = sorted((first, second))
    for few, many in zip(
        split_files(iter(files_of(sizes, seed)), small),
        split_files(iter(files_of(sizes, seed)), large),
        strict=True,
    ):
        longer = dict(many)
        assert all(longer[name].startswith(text) for name, text in few)


@given(st.integers(0, 40), st.permutations(range(9)))
def test_neither_names_nor_order_decide(seed, order):
    files = files_of([30] * 9, seed)
    renamed = [(f"other-{i}", files[i][1]) for i in order]
    held = [{text for _, text in split_files(iter(part), 10**6)[1]} for part in (files, renamed)]
    assert held[0] == held[1]


def test_copies_of_a_text_are_on_one_side():
    texts = [text for _, text in files_of([30] * 40)]
    train, validation = split_files(((f"{i}", t) for i, t in enumerate(texts * 2)), 10**6)
    assert not {text for _, text in train} & {text for _, text in validation}
    assert len(train) + len(validation) == 80


def test_files_are_held_out_that_prepare_holds_out_with_the_same_share():
    files = files_of([30] * 400)
    rule = Split(hold_out=0.1)
    wanted = {name for name, text in files if rule.part(text) == VALIDATION}
    assert names(split_files(iter(files), 10**6)[1]) == wanted and 20 < len(wanted) < 60


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_files_give_one_at_least_to_each_side(count):
    for seed in range(60):
        train, validation = split_files(iter(files_of([30] * count, seed)), 10**6)
        assert train and validation and len(train) + len(validation) == count


def test_a_tenth_of_the_characters_is_of_held_out_text():
    train, validation = split_files(iter(files_of([100] * 900)), 20_000)
    assert sum(len(text) for _, text in train) == 18_000
    assert sum(len(text) for _, text in validation) == 2_000


@pytest.mark.parametrize("texts", [[], ["one"], ["one", "one"], ["one", " \n"]])
def test_a_single_text_cannot_be_split(texts):
    with pytest.raises(ValueError, match="at least two different texts"):
        split_files(iter([(str(i), text) for i, text in enumerate(texts)]), 100)


def old_rule(files, characters):
    """Version 1, told once more: files in the order of a hash of their names, to so many
    characters; then a tenth of them, at least one, in the order of another hash."""
    left, kept = characters, []
    for name in sorted(files, key=lambda n: hashlib.sha256(("cut " + n).encode()).hexdigest()):
        if left > 0:
            kept.append((name, files[name][:left]))
            left -= len(files[name])
    kept.sort(key=lambda file: hashlib.sha256(file[0].encode()).hexdigest())
    tenth = len(kept) // 10 or 1
    return kept[tenth:], kept[:tenth]


@given(SIZES, CUTS)
def test_version_1_holds_out_what_it_always_did(sizes, cut):
    files = files_of(sizes)
    wanted = old_rule(dict(files), cut)
    if all(wanted):
        assert split_files(iter(files), cut, version=1) == wanted
    else:
        with pytest.raises(ValueError, match="at least two different texts"):
            split_files(iter(files), cut, version=1)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("place", [None, 0.05, 0.5], ids=["any place", "all held out", "none"])
def test_a_domain_of_any_size_is_split_in_the_memory_of_its_cut(version, place, monkeypatch):
    """A file of 3 MB may unpack to gigabytes; texts beyond the cut are not kept."""
    cut, size, count = 40_000, 10_000, 3000
    if place is not None:  # nearly all on one side, where texts at its end go to the other
        monkeypatch.setattr("l2r.text.held_out.position", lambda text: place + int(text[:8]) / 1e9)
    texts = ((f"{i}.txt", f"{i:08d}".ljust(size, "x")) for i in range(count))
    tracemalloc.start()
    train, validation = split_files(texts, cut, version=version)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(len(text) for _, text in train + validation) <= cut + size
    # Two sides, each with what may have to go to the other one, where whole texts are kept.
    assert peak < 4 * (cut + 2 * size) + (1 << 20) < size * count / 20


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=12), st.integers(2, 99))
def test_the_split_is_that_of_all_texts_at_once(made, cut):
    """Against the rule written out: held out is the lowest tenth, the lowest, never the highest."""
    files = [(f"{i}.txt", str(number) * length) for i, (number, length) in enumerate(made)]
    places = [(position(text), (name, text)) for name, text in files if text]
    ends = [f([p for p, _ in places], default=0) for f in (min, max)]
    held = [f for p, f in places if p == ends[0] or (p < 0.1 and p < ends[1])]
    rest = [f for _, f in places if f not in held]
    share = max(1, round(cut * 0.1))
    wanted = []
    for side, budget in ((rest, cut - share), (held, share)):
        kept, left = [], budget
        for name, text in sorted(
            side, key=lambda f: hashlib.sha256(f"cut {f[0]}".encode()).digest()
        ):
            if left > 0:
                kept.append((name, text[:left]))
            left -= len(text)
        wanted.append(kept)
    if all(wanted):
        assert split_files(iter(files), cut) == tuple(wanted)
    else:
        with pytest.raises(ValueError, match="at least two different texts"):
            split_files(iter(files), cut)


@pytest.mark.parametrize("version", [1, 2])
def test_a_name_need_not_be_utf_8(version):
    """Python reads such a byte of a file's name as a lone surrogate."""
    files = [(os.fsdecode(b"caf\xe9-%d.txt" % n), f"text {n} " * 9) for n in range(12)]
    train, validation = split_files(iter(files), 10**6, version=version)
    assert sorted([*train, *validation]) == sorted(files) and validation
