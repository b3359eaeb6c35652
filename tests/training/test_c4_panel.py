"""The C4 panel of the paper's training dynamics, by the commands of docs/sweep.md."""

import gzip
import json

import pytest

from l2r.cli import main
from l2r.data.corpus import CorpusOptions, build_corpus
from l2r.runs.folder import RunFolder


def run(*args):
    with pytest.raises(SystemExit) as done:
        main([str(arg) for arg in args])
    assert done.value.code == 0


def test_text_prepared_beside_the_mixture_becomes_a_panel_of_its_own(
    tiny_changes, text_folder, tmp_path
):
    corpus = build_corpus(
        CorpusOptions(str(text_folder), vocab_size=300, characters_per_domain=30_000)
    )
    options = ("--tokenizer", corpus.tokenizer, "--workers", 1)
    for domain in ("mix", "c4"):
        shard = tmp_path / domain / "data" / domain / "0.json.gz"
        shard.parent.mkdir(parents=True)
        lines = [json.dumps({"text": f"one dog two cats {i}"}) for i in range(60)]
        shard.write_bytes(gzip.compress("\n".join(lines).encode()))
        run(
            "data",
            "prepare",
            tmp_path / f"{domain}-tokens",
            "--source",
            tmp_path / domain,
            *options,
        )

    tokens = [
        f"data.tokens=[{tmp_path / 'mix-tokens'}]",
        f"data.validation_tokens=[{tmp_path / 'mix-tokens'},{tmp_path / 'c4-tokens'}]",
        f"data.tokenizer={corpus.tokenizer}",
        "training.steps=2",
        "evaluation.every=1",
    ]
    folder = tmp_path / "run"
    of_corpus = ("data.corpus", "data.vocab_size", "data.characters_per_domain")
    sizes = [change for change in tiny_changes if not change.startswith(of_corpus)]
    run("train", "demo/l2r-sips", *sizes, *tokens, "--out", folder)
    records = RunFolder(folder).read_metrics("validation")
    assert len(records) == 2 and all(record["ce/c4"] > 0 for record in records)
    run("report", folder)
    assert "C4 validation cross-entropy" in (folder / "report.html").read_text()
