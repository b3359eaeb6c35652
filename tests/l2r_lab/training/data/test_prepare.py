"""Shards to token files: the same bytes whatever happens on the way."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from tokenizers import Tokenizer

from l2r.files.atomic import try_lock
from l2r.hf.checkpoints.pretrained import hugging_face_tokenizer
from l2r.text.manifest import read_manifest
from l2r.text.shards import BadShardError
from l2r.text.split import Split
from l2r.text.tokens import TokenDataset, read_documents
from l2r_lab.training.data.listing import folder_listing
from l2r_lab.training.data.olmoe_mix import (
    MixDomain,
    Mixture,
    PlannedShard,
    name_shards,
    plan_subset,
)
from l2r_lab.training.data.prepare import prepare_tokens, shard_tasks


def tasks_of(folder, plan=None):
    return shard_tasks(folder_listing(folder), f"{folder}/", plan=plan)


def bytes_of(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_token_files_hold_every_document_in_order(
    shard_folder, documents, tokenizer_file, tmp_path
):
    seen = []
    manifest = prepare_tokens(
        tasks_of(shard_folder),
        tmp_path / "tokens",
        tokenizer=tokenizer_file,
        workers=2,
        on_progress=seen.append,
    )["train"]
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    expected = [
        (domain, [*tokenizer.encode(text).ids, 0])
        for seed, domain in enumerate(["dclm", "dclm", "pes2o", "wiki"])
        for text in documents(seed, 150)
    ]
    got = [(domain, ids.tolist()) for domain, ids in read_documents(tmp_path / "tokens")]
    assert got == expected
    assert manifest == read_manifest(tmp_path / "tokens")
    assert [f.name for f in manifest.files] == [
        "dclm-00000", "dclm-00001", "pes2o-00000", "wiki-00000",
    ]  # fmt: skip
    assert TokenDataset(tmp_path / "tokens", 16, verify=True).domains == ("dclm", "pes2o", "wiki")
    assert (seen[0].shards, seen[-1].shards, seen[-1].shards_total) == (0, 4, 4)
    assert seen[-1].bytes_read == seen[-1].bytes_total
    assert seen[-1].tokens == manifest.tokens
    assert [p.bytes_read for p in seen] == sorted(p.bytes_read for p in seen)

    # As versions without a hold-out wrote it, so that their folders resume.
    receipts = sorted((tmp_path / "tokens" / "receipts").iterdir())
    written = [path.read_bytes() for path in receipts]
    for path in receipts:
        values = json.loads(path.read_text())
        assert values.pop("bytes") > 0  # they did not have it
        assert set(values) == {"shard", "tokenizer", "entry"}
        path.write_text(json.dumps(values))
    old = bytes_of(tmp_path / "tokens")
    prepare_tokens(tasks_of(shard_folder), tmp_path / "tokens", tokenizer=tokenizer_file)
    assert bytes_of(tmp_path / "tokens") == old
    for path, data in zip(receipts, written, strict=True):
        path.write_bytes(data)
    assert manifest.source == {"skipped": {}}

    # Again: nothing is left to do, and one worker gives the bytes that two gave.
    before = bytes_of(tmp_path / "tokens")
    again = []
    prepare_tokens(
        tasks_of(shard_folder),
        tmp_path / "tokens",
        tokenizer=tokenizer_file,
        on_progress=again.append,
    )
    assert [p.shards for p in again] == [4]
    assert bytes_of(tmp_path / "tokens") == before
    # ... and so does reading through fsspec, which streams from the hub.
    urls = shard_tasks(folder_listing(shard_folder), f"file://{shard_folder}/")
    prepare_tokens(urls, tmp_path / "one", tokenizer=tokenizer_file, workers=1)
    assert bytes_of(tmp_path / "one") == before


SCRIPT = """
import sys
from pathlib import Path
from l2r_lab.training.data.listing import folder_listing
from l2r_lab.training.data.prepare import prepare_tokens, shard_tasks
from l2r.text.split import Split
if __name__ == "__main__":
    shards, out, tokenizer = map(Path, sys.argv[1:])
    tasks = shard_tasks(folder_listing(shards), f"{shards}/")
    prepare_tokens(tasks, out, tokenizer=tokenizer, split=Split(hold_out=0.1, share=0.8), workers=2)
"""


@pytest.mark.slow("killed processes")
def test_killed_twice_and_resumed_gives_the_same_bytes(
    documents, write_shard, tokenizer_file, tmp_path
):
    shards = tmp_path / "shards"
    for number in range(8):
        write_shard(shards / f"data/dclm/dclm-{number:04d}.json.gz", documents(number, 1200))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def finished(out):
        return len(list(out.glob("train/receipts/*.json")))

    out, rng = tmp_path / "killed", random.Random(0)
    left = []
    for goal in (1, 4):
        process = subprocess.Popen([sys.executable, script, shards, out, tokenizer_file])
        while finished(out) < goal and process.poll() is None:
            time.sleep(0.005)
        time.sleep(0.02 * rng.random())
        workers = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert psutil.wait_procs(workers, timeout=10)[1] == []  # workers die with their parent
        left.append(finished(out))
        assert not (out / "train" / "manifest.json").exists()
    # Both kills hit a run that had done something and had something left to do.
    assert 1 <= left[0] < left[1] < 8
    # Between the receipts of a shard's two parts is a moment, too.
    next(iter(sorted(out.glob("validation/receipts/*.json")))).unlink()
    # A kill in the middle of a write leaves a file under a temporary name.
    for folder in ("train", "train/receipts", "validation/receipts"):
        (out / folder / ".dclm-0000.0123456789abcdef.part").write_text("cut")
    split = Split(hold_out=0.1, share=0.8)
    prepare_tokens(tasks_of(shards), out, tokenizer=tokenizer_file, split=split, workers=2)
    whole = tmp_path / "whole"
    prepare_tokens(tasks_of(shards), whole, tokenizer=tokenizer_file, split=split, workers=1)
    assert bytes_of(out) == bytes_of(whole)
    assert {"train/manifest.json", "validation/manifest.json"} <= set(bytes_of(whole))


def test_held_out_documents_are_whole_and_disjoint_and_the_tokenizer_lies_beside(
    shard_folder, write_shard, documents, tokenizer_file, tmp_path
):
    # A shard that repeats documents of another domain: a copy must not cross the border.
    write_shard(shard_folder / "data/wiki/wiki-0001.jsonl", documents(0, 150))
    every = [
        (domain, text)
        for seed, domain in ((0, "dclm"), (1, "dclm"), (2, "pes2o"), (3, "wiki"), (0, "wiki"))
        for text in documents(seed, 150)
    ]
    out, split, tasks = tmp_path / "mix", Split(hold_out=0.2, share=0.5), tasks_of(shard_folder)
    manifests = prepare_tokens(tasks, out, tokenizer=tokenizer_file, split=split, workers=1)
    tokenizer = hugging_face_tokenizer(out / "tokenizer")
    found = {
        part: [(domain, tokenizer.decode(ids[:-1])) for domain, ids in read_documents(out / part)]
        for part in manifests
    }
    assert list(found) == ["train", "validation"]
    for part, texts in found.items():
        assert texts == [pair for pair in every if split.part(pair[1]) == part]
        assert {domain for domain, _ in texts} == {"dclm", "pes2o", "wiki"}
        assert manifests[part] == read_manifest(out / part)
        assert manifests[part].source["split"] == {"part": part, "hold_out": 0.2, "share": 0.5}
    assert {t for _, t in found["train"]}.isdisjoint(t for _, t in found["validation"])

    identity = manifests["train"].tokenizer
    assert manifests["validation"].tokenizer == identity
    file = out / "tokenizer" / "tokenizer.json"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == identity.sha256
    assert (tokenizer.eos_token_id, len(tokenizer)) == (identity.eos_token_id, identity.vocab_size)

    before = bytes_of(tmp_path)
    for other in (Split(0.1, share=0.5), Split(0.2)):
        with pytest.raises(ValueError, match=r"begun with hold_out=0.2, share=0.5; got hold_out="):
            prepare_tokens(tasks, out, tokenizer=tokenizer_file, split=other)
    assert bytes_of(tmp_path) == before


def test_a_split_is_nested_and_as_large_as_it_says(documents):
    texts = sorted({text for seed in range(4) for text in documents(seed, 1000)})

    def chosen(part, **options):
        split = Split(**options)
        return {text for text in texts if split.part(text) == part}

    assert chosen("train") == set(texts)
    for share, expected in ((1.0, 0.8), (0.5, 0.4), (0.1, 0.08)):
        train = chosen("train", hold_out=0.2, share=share)
        # A binomial share of n documents: five standard deviations.
        room = 5 * (expected * (1 - expected) / len(texts)) ** 0.5
        assert abs(len(train) / len(texts) - expected) < room
        assert train > chosen("train", hold_out=0.2, share=share / 2)
        held_out = chosen("validation", hold_out=0.2, share=share)
        assert held_out == chosen("validation", hold_out=0.2) and held_out.isdisjoint(train)
    assert chosen("validation", hold_out=0.1) < chosen("validation", hold_out=0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hold_out": 1.0}, "hold_out must be >= 0 and < 1; got 1.0"),
        ({"hold_out": -0.1}, "hold_out must be >= 0 and < 1; got -0.1"),
        ({"share": 0.0}, "share must be > 0 and <= 1; got 0.0"),
        ({"share": float("nan")}, "share must be > 0 and <= 1; got nan"),
    ],
)
def test_impossible_splits_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Split(**options)


def test_a_hold_out_too_small_for_one_document_is_refused(shard_folder, tokenizer_file, tmp_path):
    one = tasks_of(shard_folder)[:1]
    with pytest.raises(ValueError, match=r"no document went to validation; .* hold_out=1e-09"):
        prepare_tokens(one, tmp_path, tokenizer=tokenizer_file, split=Split(1e-9))
    assert not list(tmp_path.rglob("manifest.json"))


def test_corrupt_shard_is_refused_or_skipped_by_choice(shard_folder, tokenizer_file, tmp_path):
    bad = shard_folder / "data/dclm/dclm-0000.json.zst"
    bad.write_bytes(bad.read_bytes()[:-30])
    out = tmp_path / "tokens"
    with pytest.raises(BadShardError, match=r"shard data/dclm/dclm-0000.json.zst is truncated"):
        prepare_tokens(tasks_of(shard_folder), out, tokenizer=tokenizer_file)
    assert not (out / "manifest.json").exists()
    assert not list(out.glob("dclm-00000*"))
    manifest = prepare_tokens(
        tasks_of(shard_folder), out, tokenizer=tokenizer_file, on_bad_shard="skip"
    )
    assert [f.name for f in manifest["train"].files] == ["dclm-00001", "pes2o-00000", "wiki-00000"]
    skipped = json.loads((out / "manifest.json").read_text())["source"]["skipped"]
    assert list(skipped) == ["data/dclm/dclm-0000.json.zst"]
    assert not list(out.glob(".*.part"))


def test_other_tokenizer_in_the_same_folder_is_refused(shard_folder, tokenizer_file, tmp_path):
    one = shard_tasks({"wiki": ["data/wiki/wiki-0000.json.gz"]}, f"{shard_folder}/")
    prepare_tokens(one, tmp_path / "tokens", tokenizer=tokenizer_file)
    with pytest.raises(ValueError, match=r"by tokenizer 'tokenizer.json'; write .* to another"):
        prepare_tokens(one, tmp_path / "tokens")
    other = [dataclasses.replace(one[0], file="data/wiki/other.json.gz")]
    with pytest.raises(ValueError, match=r"holds tokens of data/wiki/wiki-0000.json.gz"):
        prepare_tokens(other, tmp_path / "tokens", tokenizer=tokenizer_file)
    (tmp_path / "tokens" / "wiki-00000.bin").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"wiki-00000.bin must have \d+ bytes; got 2"):
        prepare_tokens(one, tmp_path / "tokens", tokenizer=tokenizer_file)


def test_a_folder_that_another_process_writes_is_refused(shard_folder, tokenizer_file, tmp_path):
    part = tmp_path / "train" / ".dclm-0000.0123456789abcdef.part"
    part.parent.mkdir()
    part.write_text("of the other")
    with (
        try_lock(tmp_path / ".lock"),
        pytest.raises(ValueError, match="is being written by another"),
    ):
        prepare_tokens(tasks_of(shard_folder), tmp_path, tokenizer=tokenizer_file)
    assert part.read_text() == "of the other"


def test_bad_options_are_refused(tokenizer_file, tmp_path):
    with pytest.raises(ValueError, match="workers must be >= 1; got 0"):
        prepare_tokens([], tmp_path, tokenizer=tokenizer_file, workers=0)
    with pytest.raises(ValueError, match="no shard could be read"):
        prepare_tokens([], tmp_path, tokenizer=tokenizer_file)


MIXTURE = Mixture("a/b", (MixDomain("dclm", 4, 4e6), MixDomain("wiki", 2, 2e6)))
LISTING = {
    "dclm": [f"data/dclm/{i}.jsonl" for i in range(4)],
    "wiki": ["data/wiki/a.jsonl", "data/wiki/b.jsonl"],
}


def test_plan_chooses_by_position_or_by_name():
    plan = plan_subset(3_000_000, mixture=MIXTURE)
    tasks = shard_tasks(LISTING, "hf://datasets/a/b@c0ffee/", plan=plan)
    assert [len(d.shards) for d in plan.domains] == [2, 1]
    expected = [LISTING[d.name][s.index] for d in plan.domains for s in d.shards]
    assert [t.url for t in tasks] == [f"hf://datasets/a/b@c0ffee/{file}" for file in expected]
    # A partial local copy without data/ serves a plan that names its files.
    named = name_shards(plan, LISTING)
    local = {d.name: [s.file.removeprefix("data/") for s in d.shards] for d in named.domains}
    assert [t.name for t in shard_tasks(local, "x/", plan=named)] == [t.name for t in tasks]
    assert [t.url for t in shard_tasks(local, "x/", plan=named)] == [
        "x/" + file.removeprefix("data/") for file in expected
    ]


def test_plan_that_the_source_cannot_serve_is_refused():
    plan = plan_subset(3_000_000, mixture=MIXTURE)
    with pytest.raises(ValueError, match="must have 4 shards of dclm; got 1; a part of them"):
        shard_tasks({"dclm": ["data/dclm/0.jsonl"]}, "x/", plan=plan)
    missing = dataclasses.replace(
        plan.domains[1], shards=(PlannedShard(0, "data/wiki/gone.jsonl"),)
    )
    with pytest.raises(ValueError, match=r"lacks data/wiki/gone.jsonl"):
        shard_tasks(LISTING, "x/", plan=dataclasses.replace(plan, domains=(missing,)))
