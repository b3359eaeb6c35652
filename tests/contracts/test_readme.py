"""Every command and snippet of the README runs, in its order, in one empty folder.

The folder holds what the README assumes: models ``my-moe`` and ``other-moe``, texts ``my-text``
and ``held-out``, and the study's results of a clone. Lines that install are not run; ``make demo``
runs as the command it calls, with two routers and a small model.
"""

import re
import shlex
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import l2r as package
from l2r.cli.app import build_app
from tests.engines.serve.test_command import free_port
from tests.processes import Running, command, in_turn, script

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", TEXT, re.M | re.S)
# Appended to the README's commands: documented options that make them short.
SHORTER = {
    "check": "--data my-text",
    "diagnose": "--data my-text --instances 4 --length 32 --certify 1 --gain 2",
    "compare": "--routers linear,l2r_sips",
}
MODEL = """
import torch
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast
words = ["<unk>", "<eos>", *"cat dog bird fish one two three four".split()]
fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
fast.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"unk_token": "<unk>", "eos_token": "<eos>"}
PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained("my-moe")
sizes = dict(vocab_size=len(words), hidden_size=32, intermediate_size=16, num_hidden_layers=2)
heads = dict(num_attention_heads=2, num_experts=4, num_experts_per_tok=2, pad_token_id=None)
torch.manual_seed(0)
OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, eos_token_id=1)).save_pretrained("my-moe")
"""


@pytest.mark.slow("a chain of commands")
def test_the_blocks_run_in_their_order(tmp_path, text_folder, tiny_changes, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my-text", "held-out"):
        shutil.copytree(text_folder, name)
    Path("results/evidence").mkdir(parents=True)
    for kept in (ROOT / "results" / "evidence").glob("decision*"):  # one folder, or one file
        copy = shutil.copytree if kept.is_dir() else shutil.copy
        copy(kept, Path("results/evidence") / kept.name)
    script(tmp_path / "model", MODEL).succeed()
    shutil.copytree("my-moe", "other-moe")
    ran = []
    for number, (language, code) in enumerate(BLOCKS):
        logs = tmp_path / "logs" / str(number)
        if language == "python":
            script(logs, code, HF_HUB_OFFLINE="1").succeed()
            continue
        for line in code.splitlines():
            program, *arguments = shlex.split(line, comments=True)
            if program != "l2r":
                # make demo: below, as its command
                assert program in ("python3", "pip", "make"), line
                continue
            ran.append(arguments[0])
            if arguments[0] == "serve":
                answers(logs, arguments)
            else:
                own = "--text" in arguments  # a sentence is short
                shorter = [] if own else shlex.split(SHORTER.get(arguments[0], ""))
                Running(logs, in_turn, [[*arguments, *shorter]]).succeed()
    assert ran == ["check", *["diagnose"] * 4, "swap", "eval", "serve", "evidence"]
    for page in ("diagnosis/text.html", "diagnosis/index-text.html", "diagnosis/index.html"):
        assert Path(page).is_file()
    verdicts = Path("runs/evidence/decision/report.md").read_text()
    assert "worse" in verdicts and "10" in verdicts
    Running(tmp_path / "demo", in_turn, [[*demo(), *tiny_changes, "training.steps=2"]]).succeed()
    assert Path("runs/demo/report.html").is_file()


def answers(logs, arguments):
    """Start the server on a free port, wait until it is healthy, interrupt it."""
    port = free_port()
    assert arguments[-2] == "--port"
    process = command(logs, *arguments[:-1], port)
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline and process.process.exitcode is None:
            try:
                with urllib.request.urlopen(f"http://localhost:{port}/health") as answer:
                    assert answer.status == 200
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, process.err
    finally:
        process.process.kill()


def demo():
    """Arguments of the l2r command behind ``make demo STEPS=30``, with fewer routers."""
    assert "`make demo STEPS=30`" in TEXT
    dry = ["make", "--no-print-directory", "-n", "-C", str(ROOT), "demo", "STEPS=30"]
    lines = subprocess.run(dry, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = (line for line in lines if re.search(r"/l2r compare", line))
    arguments = shlex.split(line)[1:]
    assert arguments[:3] == ["compare", "demo", "training.steps=30"]
    assert arguments[3:] == ["--routers", "linear,xmoe,l2r_sips_tuned"]
    return [*arguments[:3], *shlex.split(SHORTER["compare"])]


def test_the_table_has_every_command():
    table = TEXT.split("## Commands")[1].split("##")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    named = [name for row in rows for name in re.findall(r"`([\w-]+)`", row)]
    assert sorted(named) == sorted(get_command(build_app()).commands)


def test_the_citation_names_the_paper_and_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == package.__version__
    paper = citation["preferred-citation"]
    assert f"title  = {{{paper['title']}}}" in TEXT
    for author in paper["authors"]:
        assert f"{author['family-names']}, {author['given-names']}" in TEXT


def test_it_is_short():
    assert len(TEXT.split()) <= 825
