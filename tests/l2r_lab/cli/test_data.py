"""``l2r data plan`` and ``l2r data prepare``."""

import json

import pytest

from l2r.text.manifest import read_manifest
from l2r_lab.training.data.olmoe_mix import OLMOE_MIX, read_plan


def test_plan_prints_the_papers_table(l2r, tmp_path):
    shown = l2r("data", "plan", "--tokens", "200B").out
    for line in ("dclm", "1,970", "190.06", "2,903", "144", "200.41"):
        assert line in shown
    rows = json.loads(l2r("data", "plan", "--json").out)
    assert [row["Selected shards"] for row in rows] == [97, 43, 1, 1, 1, 1, 144]
    assert rows[-1]["Token share (%)"] == pytest.approx(100)


def test_plan_file_names_shards_when_there_is_a_listing(l2r, tmp_path):
    for domain in OLMOE_MIX.domains:
        folder = tmp_path / "shards" / "data" / domain.name
        folder.mkdir(parents=True)
        for number in range(domain.shards):
            (folder / f"{domain.name}-{number:04d}.json.gz").touch()
    code, _, err = l2r(
        "data",
        "plan",
        "--tokens",
        "10B",
        "--listing",
        tmp_path / "shards",
        "--out",
        tmp_path / "p.json",
    )
    assert code == 0, err
    plan = read_plan(tmp_path / "p.json")
    assert [len(d.shards) for d in plan.domains] == [5, 2, 1, 1, 1, 1]
    assert plan.domains[0].shards[0].file.endswith(f"{plan.domains[0].shards[0].index:04d}.json.gz")


def test_prepare_reports_tokens_and_skipped_shards(l2r, shard_folder, tokenizer_file, tmp_path):
    bad = shard_folder / "data/wiki/wiki-0000.json.gz"
    bad.write_bytes(bad.read_bytes()[:-30])
    code, out, err = l2r("data",
        "prepare", "--out", tmp_path / "tokens", "--data", shard_folder,
        "--tokenizer", tokenizer_file, "--processes", 1, "--on-bad-shard", "skip",
    )  # fmt: skip
    assert code == 0, err
    manifest = read_manifest(tmp_path / "tokens")
    assert f"{manifest.tokens:,} tokens in 3 files" in out
    assert "skipped: shard data/wiki/wiki-0000.json.gz" in err
    assert "3/4" in err or "4/4" in err
    assert manifest.source["shards"] == "shards"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--tokens", "many"], "tokens must look like 200B"),
        (["plan", "--tokens", "9T"], "tokens must be between 1 and"),
        (["prepare", "--out", "OUT"], "give --plan for the hub's shards, or --data"),
        (
            ["prepare", "--out", "OUT", "--data", "missing"],
            "--data must be a file or a folder that exists",
        ),
        (["prepare", "--out", "OUT", "--plan", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_value_error(l2r, arguments, message, tmp_path):
    ended = l2r("data", *[tmp_path / a if a == "OUT" else a for a in arguments])
    assert message in ended.refusal()
    assert list(tmp_path.iterdir()) == []
