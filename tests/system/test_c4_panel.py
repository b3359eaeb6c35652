"""The C4 panel of the paper's training dynamics, by the commands of docs/re-run-the-paper.md."""

import gzip
import json

import pytest

from l2r.files.folder import RunFolder
from l2r.text.corpus import CorpusOptions, build_corpus
from l2r.text.manifest import read_manifest
from l2r.text.token_writer import write_token_files


@pytest.mark.slow("several commands")
def test_text_prepared_beside_the_mixture_becomes_a_panel_of_its_own(
    l2r, tiny_changes, text_folder, tmp_path
):
    corpus = build_corpus(
        CorpusOptions(str(text_folder), vocab_size=300, characters_per_domain=30_000)
    )
    shard = tmp_path / "c4" / "data" / "c4" / "0.json.gz"
    shard.parent.mkdir(parents=True)
    lines = [json.dumps({"text": f"one dog two cats {i}"}) for i in range(60)]
    shard.write_bytes(gzip.compress("\n".join(lines).encode()))
    c4 = tmp_path / "c4-tokens"
    options = ("--data", tmp_path / "c4", "--tokenizer", corpus.tokenizer, "--processes", 1)
    command = l2r("data", "prepare", "--out", c4, *options)
    assert command.code == 0, command.err
    mixture = tmp_path / "mixture"  # of the same tokenizer, as prepare would write it
    rows = [list(range(2, 42)) for _ in range(40)]
    write_token_files(mixture, {"mix": rows}, tokenizer=read_manifest(c4).tokenizer)

    tokens = [
        f"data.tokens=[{mixture}]",
        f"data.validation_tokens=[{mixture},{c4}]",
        f"data.tokenizer={corpus.tokenizer}",
        "training.steps=2",
        "evaluation.every=1",
    ]
    of_corpus = ("data.corpus", "data.vocab_size", "data.characters_per_domain")
    sizes = [change for change in tiny_changes if not change.startswith(of_corpus)]
    folder = tmp_path / "run"
    assert l2r("train", "demo/l2r-sips", *sizes, *tokens, "--out", folder).code == 0
    records = RunFolder(folder).read_metrics("validation")
    assert len(records) == 2 and all(record["ce/c4"] > 0 for record in records)
    assert l2r("report", folder).code == 0
    assert "C4 validation cross-entropy" in (folder / "report.html").read_text()
