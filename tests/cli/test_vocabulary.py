"""One vocabulary of options: a word has one meaning in all commands, and a meaning has one word."""

from collections import defaultdict
from pathlib import Path
from typing import get_args, get_origin

import pytest
from typer.main import get_command

from l2r.cli.app import build_app
from scripts.pages.commands_page import commands
from tests.cli.test_early_refusals import assert_refused_before_torch

# What differs on purpose, by option and command.
SEVERAL = {("--data", "l2r eval"): "files are compared, so several are named"}
CALLS = list(commands(get_command(build_app()), ("l2r",)))


def meaning(help_text):
    """The help up to a colon, behind which a command says what it does with it."""
    return " ".join((help_text or "").split()).partition(": ")[0].rstrip(".").lower()


def words():
    """Every option and argument with its command: word, command, parameter."""
    for call, command in CALLS:
        for parameter in command.params:
            is_option = parameter.param_type_name == "option"
            for word in parameter.opts if is_option else [parameter.name.upper()]:
                yield word, call, parameter


def kind(parameter):
    """What a word takes: a number, a word (a path is one), a flag; one value or several."""
    annotation = parameter.type_descriptor.annotation
    several = get_origin(annotation) is list
    inner = get_args(annotation)[0] if several else annotation
    return ("word" if inner in (str, Path) else str(inner)), several


def test_every_option_says_what_it_means():
    silent = [(word, call) for word, call, p in words() if not meaning(p.help) and p.name != "help"]
    assert silent == []


def test_no_word_has_two_meanings():
    found = defaultdict(set)
    for word, _, parameter in words():
        found[word].add(meaning(parameter.help))
    assert {word: texts for word, texts in found.items() if len(texts) > 1} == {}


def test_no_word_takes_two_kinds_of_values():
    found = defaultdict(set)
    for word, call, parameter in words():
        if (word, call) not in SEVERAL:
            found[word].add(kind(parameter))
    assert {word: kinds for word, kinds in found.items() if len(kinds) > 1} == {}


def test_no_meaning_has_two_words():
    found = defaultdict(set)
    for word, _, parameter in words():
        found[meaning(parameter.help)].add(word)
    two = {text: names for text, names in found.items() if len(names) > 1}
    assert two == {}


def test_words_for_the_same_value_do_not_come_back():
    """Names that an option had, or that other programs give it, beside the one it has."""
    taken = {word for word, _, _ in words()}
    others = {
        "--out": {"--output", "--out-dir", "--output-dir", "--save", "--to", "--dest", "OUT"},
        "--data": {"--input", "--corpus", "--dataset", "--source", "--file", "--files", "--texts"},
        "--against": {"--compare", "--baseline", "--reference", "--other"},
        "--length": {"--sequence-length", "--max-length", "--context", "--seq-len"},
        "--limit": {"--max-documents", "--first", "--max-samples"},
        "--dtype": {"--torch-dtype", "--precision"},
        "--device": {"--cuda", "--on"},
        "--processes": {"--workers", "--jobs", "--num-workers"},
        "--layers": {"--layer"},
        "--show": {"--dry-run", "--plan-only"},
        "--json": {"--as-json"},
        "--open": {"--browser"},
    }
    for word, names in others.items():
        assert word in taken and not names & taken, (word, names & taken)


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("l2r check", "--text --data --dtype --device --length"),
        ("l2r diagnose", "--text --data --out --dtype --device --length"),
        ("l2r mismatch", "--text --data --against --out --dtype --device --length"),
        ("l2r eval", "--text --data --limit --out --dtype --device --length"),
        ("l2r swap", "--fit --data --out --dtype --device --length"),
        ("l2r data prepare", "--data --out"),
        ("l2r data tokenizer", "--data --out"),
    ],
)
def test_what_reads_text_takes_it_by_the_same_words(command, options):
    taken = {word for word, call, _ in words() if call == command}
    assert set(options.split()) <= taken


FORMER = """
upcycle my-moe --data my-text | l2r swap CHECKPOINT --fit --data PATH
upcycle | l2r swap CHECKPOINT --fit --data PATH
upcycle --help | l2r swap CHECKPOINT --fit --data PATH
swap my-moe --fit my-text --out new | --data PATH
swap my-moe --fit embedded --out new | --data PATH
swap my-moe --fit=my-text --out new | --data PATH
diagnose my-moe --text my-text | --data my-text
diagnose my-moe --text gone.txt | --data gone.txt
diagnose my-moe --text 1024 | --text-tokens
mismatch my-moe --against bf16 --text my-text | --data my-text
eval my-moe --text my-text | --data my-text
eval my-moe --text my-text --text file | --data
data prepare tokens --data my-text | --out OUT
data prepare --data my-text --out tokens --workers 2 | --processes
data tokenizer my-text --out new | --data FOLDER
bench inference --compare file | two_trees
bench inference --against file | two_trees
bench router --seconds 4 | python -m benchmarks.router
bench memory | python -m benchmarks.memory
report my-moe --bench file | benchmarks
params --layers 32 | --num-layers
landscape my-moe --layer 3 | --layers
sweep demo/l2r-sips --grid router.rank=2 --plan | --show
"""


def test_a_former_spelling_is_one_line_that_names_the_new_one(tmp_path):
    """In a process that has not imported torch, so that the line comes within a second."""
    (tmp_path / "my-moe").mkdir()
    (tmp_path / "my-moe" / "config.json").write_text('{"model_type": "olmoe"}')
    (tmp_path / "my-moe" / "tokenizer.json").write_text("{}")
    (tmp_path / "my-text").mkdir()
    (tmp_path / "file").write_text("")
    assert_refused_before_torch(tmp_path, FORMER)
