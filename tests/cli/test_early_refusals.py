"""Bad paths and options are refused before torch and transformers, which take seconds."""

import json
import shutil
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest
from typer.main import get_command

from l2r.cli.app import build_app
from l2r.cli.export import export
from l2r.hf.checkpoints import PROGRAM_FORMS

# Commands with a bad word, after which a "|" may say what else the line must name. `whole` and
# `bare` are checkpoints by their names, with a tokenizer and without; `vit` classifies images.
PATHS = """
check /no/such
diagnose /no/such
mismatch /no/such --against bf16
landscape /no/such
report /no/such
swap /no/such --out new
export /no/such --out new
serve /no/such
train /no/such.yaml
compare whole --out file | unknown recipe folder 'whole'
sweep /no/such.yaml --grid training.steps=1
eval /no/such
data plan --out file/plan.json | cannot use; file: not a directory
data prepare --out out --data /no/such
data tokenizer --out new --data /no/such
data toy --out file | cannot use; file: not a directory
evidence run /no/such
evidence new file/p.yaml --arm a --arm b --recipe /no/such.yaml
doctor /no/such
bench inference --out file | cannot use; file: not a directory
params --recipes /no/such
paper /no/such
plan /no/such.yaml
"""
OTHERS = """
check nowhere
check ./x/y
check empty
check bare | no tokenizer to read text with: put its tokenizer.json into bare; --data
check vit | is no run folder
check whole --data none | --data
check vit --data digits --text hi | --text must be given without --data
check whole --dtype int8 | --dtype
check whole --device gpu0 | --device
check whole --device-map gpu0 | --device-map
check whole --length 1 | --length
check whole --instances 0 | --instances
diagnose bare | no tokenizer; --data
diagnose bare --text hi | no tokenizer
diagnose vit --text hi | --text is for language models
diagnose whole --data none | --data
diagnose whole --out file | cannot use; file: not a directory
diagnose whole --sigma -1 | --sigma
diagnose whole --sample 0 | --sample
diagnose whole --length 1 | --length
diagnose whole --batch-size 0 | --batch-size
diagnose whole --text 1024 | --text
diagnose whole whole | checkpoints must differ
diagnose whole --over-time | --over-time
diagnose whole empty | got empty
mismatch whole | --against
mismatch whole --against int4 | --against must be one of bf16, int8, fp8, vllm
mismatch whole --against vllm | --against vllm or sglang
mismatch whole --against bf16 --data none | --data
mismatch whole --against bf16 --text hi --data file | --text must be given without --data
mismatch whole --against bf16 --text file | --data file
mismatch whole --against bf16 --out file | cannot use; file: not a directory
mismatch whole --against bf16 --length 1 | --length
mismatch vit --against bf16 | vit classifies images
mismatch bare --against bf16 | no tokenizer; --data
landscape --reach nan | --reach
landscape --out empty | cannot use empty: is a directory
landscape --layers 3 | --layers
report empty
report empty --interval 0 | --interval
swap whole --out whole | --out must be a new or empty folder
swap whole --out file/new | cannot use; file: not a directory
swap whole --out new --fit --data none | --data
swap bare --out new --fit | no tokenizer
swap whole | --out
swap whole --out new --layers x | --layers
swap whole --out new --selection mine | 'family', 'router'
swap vit --fit | image classifier
swap whole --fit --lr 0 | --lr
swap whole --fit --tokens -5 | --tokens
swap whole --fit --length 1 | --length
swap whole --fit --train-steps -1 | steps must be >= 0
swap whole --fit --out whole | --out
swap whole --out new --data file | --data is for a fit; --fit
export whole --out new --format x | 'hf', 'onnx'
export whole --out whole | --out
export whole --out new --tolerance 1 | --tolerance is for programs
export whole --out new --format onnx --dtype bfloat16 | dtype=bfloat16
export vit --out new | image classifier
serve bare | no tokenizer
serve whole --port 99999 | --port
serve whole --host no.such.host.invalid | --host
serve whole --num-blocks 4 | --num-blocks
train demo | is a folder of recipes
train | RECIPE is missing
train demo/l2r-sips training.steps=x | training.steps
train demo/l2r-sips training.stps=5 | 'steps'
train demo/l2r-sips rank=8 | 'router.rank'
train demo/l2r-sips data.tokenizer=x | tokenizer is read only
train demo/l2r-sips nonsense
train demo/l2r-sips data.corpus=/no/such | data.corpus
train demo/l2r-sips --out file | cannot use; file: not a directory
compare demo --routers linear,cubic | --routers
compare demo training.steps=x | training.steps
compare demo --out file | cannot use; file: not a directory
compare demo data.corpus=/no/such | data.corpus
sweep demo/l2r-sips | --grid is missing
sweep demo/l2r-sips --grid nonsense | --grid
sweep demo/l2r-sips --grid training.steps=5,x | training.steps
sweep demo/l2r-sips --grid training.steps=1 --out file | cannot use; file: not a directory
eval bare | no tokenizer
eval whole --tasks winogrande | --tasks
eval whole --split train | --split
eval whole --limit 0 | --limit
eval whole --data none | --data
eval whole --stride 4 | --stride
eval whole --data file --length 4 --stride 4 | --stride
eval whole --data file --tasks piqa | --tasks
eval whole bare --out x | --out
eval vit --data none | --data
eval vit --data digits --average | no averaged weights
data plan --tokens x | --tokens
data prepare --out out --plan none | --plan
data prepare --out out --data empty --hold-out 2 | --hold-out
data prepare --out out --data empty --processes 0 | --processes
data prepare --out out --on-bad-shard x | 'refuse', 'skip'
data tokenizer --data empty --out empty | --out
data tokenizer --data empty --out new --vocab-size 10 | --vocab-size
evidence paper --judge-only | --judge-only
evidence paper --out file | cannot use; file: not a directory
evidence new p --arm a --arm b | .yaml
evidence new p.yaml --arm a | --arm
evidence new p.yaml --arm a --arm b --sd inf | --sd
evidence new p.yaml --arm a --arm b --metric nosuch | 'nosuch'
bench nosuch | inference
bench inference --seconds nan | --seconds
bench inference --clock x | clock
bench inference --device gpu0 | --device
params --ranks x | --ranks
params --cost --vit | --cost
plan demo/l2r-sips --gpu x | --gpu
plan demo/l2r-sips --parallel x | --parallel
plan demo/l2r-sips --utilization 2 | --utilization
plan demo/l2r-sips --imbalance 0 | --imbalance
plan demo/l2r-sips --tokens x | --tokens
plan demo/l2r-sips training.steps=x | training.steps
"""
# Files that a clone without git-lfs holds in place of the real ones.
POINTERS = """
check weights | weights/model-00001-of-00002.safetensors is a git-lfs pointer: run git lfs pull
diagnose weights | is a git-lfs pointer
mismatch weights --against bf16 | is a git-lfs pointer
mismatch whole --against weights | weights/model-00001-of-00002.safetensors is a git-lfs pointer
swap weights --out new | is a git-lfs pointer
export weights --out new | is a git-lfs pointer
serve weights | is a git-lfs pointer
eval weights | is a git-lfs pointer
eval run | run/model/tokenizer.json is a git-lfs pointer
check pickled | pickled/pytorch_model.bin is a git-lfs pointer
check whole --data pointer.txt | pointer.txt is a git-lfs pointer
mismatch whole --against bf16 --data pointer.txt | pointer.txt is a git-lfs pointer
swap whole --fit --data pointer.txt | pointer.txt is a git-lfs pointer
eval whole --data pointer.txt | pointer.txt is a git-lfs pointer
"""
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4997744872\n"
# One process for all of them: what one command imports, the next one finds.
SCRIPT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from l2r.cli import main
for words in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), None
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main(words)
        except SystemExit as end:
            code = end.code
    heavy = sorted({"torch", "transformers", "plotly", "scipy"} & set(sys.modules))
    print(json.dumps([code, out.getvalue(), err.getvalue(), heavy]))
"""


def cases(text):
    """Words of each command, and what its refusal must name: a path, or else the last word."""
    for line in text.strip().splitlines():
        command, _, named = line.partition(" | ")
        words = command.split()
        bad = next((word for word in words if word.startswith("/no/such")), words[-1])
        yield words, named.split("; ") if named else [bad]


@pytest.fixture
def folder(tmp_path):
    """Names of checkpoints, an empty folder and a file."""
    language = json.dumps({"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]})
    images = json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]})
    for name, config in {"whole": language, "bare": language, "vit": images}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "whole" / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


def assert_refused_before_torch(folder, text):
    before, tried = {*folder.rglob("*")}, list(cases(text))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([words for words, _ in tried]),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ends) == len(tried), done.stderr[-2000:]
    for (words, named), (code, out, err, heavy) in zip(tried, ends, strict=True):
        assert heavy == [], (words, heavy)
        assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1, words
        assert all(name in err for name in named), (words, err)
    assert {*folder.rglob("*")} == before


def test_every_command_refuses_a_bad_path_before_torch_is_imported(folder):
    assert_refused_before_torch(folder, PATHS)


def test_a_pointer_of_git_lfs_is_named_as_such_before_torch_is_imported(folder):
    for name in ("weights", "pickled", "run/model"):
        shutil.copytree(folder / "whole", folder / name)
    for name in (
        "weights/model-00001-of-00002.safetensors",
        "pickled/pytorch_model.bin",
        "run/model/tokenizer.json",
        "pointer.txt",
    ):
        (folder / name).write_text(POINTER)
    assert_refused_before_torch(folder, POINTERS)


@pytest.mark.slow("a hundred commands")
def test_every_bad_option_is_refused_before_torch_is_imported(folder):
    assert_refused_before_torch(folder, OTHERS)


def test_no_command_is_left_out():
    commands = {
        name: getattr(c, "commands", None) for name, c in get_command(build_app()).commands.items()
    }
    every = {
        (name, *sub)
        for name, below in commands.items()
        for sub in ([(b,) for b in below] if below else [()])
    }
    tried = [words for words, _ in cases(PATHS)]
    assert every == {tuple(words[: 2 if commands[words[0]] else 1]) for words in tried}


def test_the_forms_of_an_export_are_those_of_its_programs():
    allowed = get_args(get_type_hints(export)["form"])
    assert allowed == ("hf", *PROGRAM_FORMS)
