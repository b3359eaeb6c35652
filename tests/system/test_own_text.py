"""The commands of docs/data.md for a text of one's own, as they stand there, on small documents."""

import json
import random
import re
import shlex
from pathlib import Path
from pydoc_data.topics import topics

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
SECTION = PAGE.read_text().split("## Your own text")[1].split("\n## ")[0]
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", SECTION, re.S) for line in block.splitlines()
]
# Appended to the page's commands: the same, smaller.
SMALLER = {
    "train": (
        "data.sequence_length=32 model.hidden_size=32 model.num_hidden_layers=1 "
        "model.num_attention_heads=2 model.intermediate_size=16 model.num_experts=4 "
        "model.num_experts_per_tok=2 training.steps=2 training.global_batch=4 "
        "training.micro_batch=4 optimizer.warmup=64 evaluation.every=0 evaluation.max_batches=1 "
        "training.logger=none"
    ),
    "diagnose": "--instances 4 --length 32 --certify 1",
    "data prepare": "--processes 1",
}


def write_text(folder):
    """Two domains of forty documents, one of them as lines."""
    texts = [topics[name][:1500] for name in sorted(topics)[:80]]
    random.Random(0).shuffle(texts)
    (folder / "letters").mkdir(parents=True)
    (folder / "forum").mkdir()
    for number, text in enumerate(texts[:40]):
        (folder / "letters" / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": text}) + "\n" for text in texts[40:]]
    (folder / "forum" / "posts.jsonl").write_text("".join(lines))


@pytest.mark.slow("a chain of commands")
def test_the_pages_commands_lead_from_a_folder_to_a_report(l2r, tmp_path, monkeypatch):
    assert [line.split(" -")[0].split()[1] for line in COMMANDS] == [
        "train", "train", "report", "diagnose", "data", "data", "train", "diagnose",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("L2R_CACHE", str(tmp_path / "cache"))
    write_text(Path("my-text"))
    for line in COMMANDS:
        command = line.removeprefix("l2r ")
        smaller = next((SMALLER[c] for c in SMALLER if command.startswith(c)), "")
        ended = l2r(*shlex.split(command), *shlex.split(smaller))
        assert ended.code == 0, (line, ended.err)
    page = Path("runs/report.html").read_text()
    assert "letters" in page and "forum" in page
    for folder in ("diagnosis", "diagnosis-all"):
        assert Path(folder, "index.html").is_file()
    domains = json.loads(Path("my-tokens/train/manifest.json").read_text())["files"]
    assert {file["domain"] for file in domains} == {"letters", "forum"}
