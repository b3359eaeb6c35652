"""A bug of ours is told apart from bad input: exit code 70, one line and a file to report it with.

An error is raised in the middle of each command's work, by the code of a function of ours that is
called there, in a process of its own.
"""

import ast
import importlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.commands import Ended, command

SOURCE = Path(__file__).parents[2] / "src"
SECRET = "hunter2hunter2"


def value_error(*args, **options):
    raise ValueError("injected")


def os_error(*args, **options):
    raise OSError("injected")


def file_error(*args, **options):
    raise FileNotFoundError(2, "No such file or directory", "/injected")


def key_error(*args, **options):
    raise KeyError("injected")


def overflow_error(*args, **options):
    raise OverflowError("injected")


def runtime_error(*args, **options):
    raise RuntimeError("injected")


def input_error(*args, **options):
    from l2r.errors import InputError

    raise InputError("injected")


ERRORS = {f.__name__: f for f in (
    value_error, os_error, file_error, key_error, overflow_error, runtime_error,
)}  # fmt: skip

# Command, the function in which the error is raised, the words (TEXT, MODEL, TINY and OUT stand for
# folders and changes). 1 is done: the table of check and doctor names what was raised.
COMMANDS = [
    ("check", "l2r.analysis.inputs:open_text", "check MODEL --data TEXT --instances 4", 70),
    ("check", "l2r.analysis.diagnostics.checks.gradients:gradient", "check MODEL --data TEXT", 1),
    ("diagnose", "l2r.analysis.diagnostics.model_diagnosis:_sample_arrays", "diagnose MODEL "
     "--data TEXT --instances 4 --length 32 --sample 64 --certify 4 --gain 0 --out OUT", 70),
    ("diagnose", "l2r.analysis.certificates.certify:certify", "diagnose MODEL --data TEXT "
     "--instances 4 --length 32 --sample 64 --certify 4 --gain 0 --out OUT", 70),
    ("mismatch", "l2r.analysis.routes.mismatch:_divergence", "mismatch MODEL --against bf16 "
     "--data TEXT --instances 4 --length 32", 70),
    ("landscape", "l2r.analysis.diagnostics.landscape:_plain", "landscape --out OUT/page.html", 70),
    ("report", "l2r_lab.report.comparison:comparison_table", "report RUN --out OUT/page.html", 70),
    ("swap", "l2r.hf.swap.sites:new_router", "swap MODEL --out OUT", 70),
    ("swap", "l2r.fitting.fit:fit_sites", "swap MODEL --fit --data TEXT --length 16 --out OUT", 70),
    ("export", "l2r.hf.checkpoints.export:source_files", "export MODEL --out OUT", 70),
    ("serve", "l2r.engines.serve.server:_prepared", "serve MODEL --port 0", 70),
    ("train", "l2r_lab.training.step:TrainingStep.take", "train demo/linear TINY --out OUT", 70),
    ("train", "l2r_lab.training.checkpoint:_checksum", "train demo/linear TINY --out OUT", 70),
    ("train", "l2r.hf.checkpoints.run_card:write_run_card", "train demo/linear TINY --out OUT", 70),
    ("compare", "l2r_lab.training.step:TrainingStep.take", "compare demo --routers linear "
     "--processes 1 TINY --out OUT", 70),
    ("compare", "l2r.analysis.diagnostics.model_diagnosis:_measure", "compare demo "
     "--routers linear --processes 1 TINY --out OUT", 70),
    ("sweep", "l2r_lab.training.step:TrainingStep.take",
     "sweep demo/l2r-sips --grid router.rank=2,4 "
     "--processes 1 TINY --out OUT", 70),
    ("eval", "l2r.text.losses_on_text:document_losses", "eval MODEL --data TEXT "
     "--out OUT", 70),
    ("data plan", "l2r_lab.training.data.olmoe_mix:plan_subset", "data plan --tokens 200B "
     "--out OUT/plan.json", 70),
    ("data prepare", "l2r_lab.training.data.prepare:_prepare",
     "data prepare --data TEXT --tokenizer "
     "MODEL --out OUT", 70),
    ("data tokenizer", "l2r.text.new_tokenizer:_train", "data tokenizer --data TEXT "
     "--vocab-size 300 --out OUT", 70),
    ("evidence", "l2r_lab.studies.judging:study_of",
     "evidence run paper --judge-only --results RESULTS "
     "--out OUT", 70),
    ("evidence new", "l2r_lab.studies.new_plan:write_plan", "evidence new OUT/p.yaml --arm "
     "a:router.rank=2 --arm b:router.rank=8 --recipe demo/l2r-sips", 70),
    ("doctor", "l2r.kernels.guard:compare", "doctor", 1),
    ("bench", "l2r_lab.inference:measure", "bench inference --size tiny --seconds 0.01", 70),
    ("params", "l2r.routers.count:router_parameters", "params", 70),
    ("plan", "l2r_lab.planning.choose:make_plan", "plan demo/l2r-sips --gpus 1", 70),
]  # fmt: skip


def function_of(target: str):
    """The function that a name stands for, without what wraps it."""
    module, _, names = target.partition(":")
    found = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


def run_broken(target: str, error: str, words: list[str]) -> None:
    """A command in which a function of ours raises: whoever has imported it calls the new code."""
    from l2r.cli import main

    function_of(target).__code__ = globals()[error].__code__
    sys.argv = ["l2r", *words]
    main(words)


@pytest.fixture(scope="session")
def places(tmp_path_factory, text_folder, tiny_changes):
    """What stands for words of a command: a checkpoint with a tokenizer, a run, a text."""
    root = tmp_path_factory.mktemp("bugs")
    run = root / "runs" / "linear"
    assert command("train", "demo/linear", *tiny_changes, "--out", run).code == 0
    results = Path(__file__).parents[2] / "results" / "evidence"
    return {
        "MODEL": [str(run / "model")],
        "RUN": [str(root / "runs")],
        "TEXT": [str(text_folder)],
        "TINY": tiny_changes,
        "RESULTS": [str(results)],
    }


def filled(words: str, places: dict[str, list[str]], out: Path) -> list[str]:
    found = []
    for word in words.split():
        found += places.get(word, [word.replace("OUT", str(out))])
    return found


FAST = [
    ("diagnose", "value_error"), ("swap", "key_error"), ("train", "os_error"),
    ("data tokenizer", "overflow_error"), ("params", "runtime_error"), ("plan", "file_error"),
]  # fmt: skip


def cases():
    seen = set()
    for number, (name, target, words, code) in enumerate(COMMANDS):
        for error in ERRORS:
            fast = (name, error) in FAST and name not in seen
            seen |= {name} if fast else set()
            marks = [] if fast else pytest.mark.slow("every command with every error")
            label = f"{name}-{target.rpartition(':')[2]}-{error}".replace(" ", "_")
            yield pytest.param(target, error, words, code, marks=marks, id=f"{number}-{label}")


@pytest.mark.parametrize(("target", "error", "words", "code"), list(cases()))
def test_an_error_in_the_middle_of_a_command_is_a_bug_and_no_bad_input(
    tmp_path, places, target, error, words, code
):
    words = filled(words, places, tmp_path / "out")
    running = processes.Running(tmp_path / "said", run_broken, target, error, words)
    ended = Ended(running.wait(), running.out, running.err)
    if code == 1:  # a fault of the model or the machine is what the command looks for
        assert ended.code == 1 and "injected" in ended.out and "Traceback" not in ended.err
        return
    kind = type(raised_by(ERRORS[error])).__name__
    line = ended.bug()
    assert kind in line and "injected" in line
    text = Path(line.partition("please report it with ")[2]).read_text()
    assert "Traceback (most recent call last)" in text and kind in text and "injected" in text
    assert f"command: l2r {words[0]}" in text and re.search(r"^torch: \d", text, re.MULTILINE)
    assert not any((tmp_path / "out").glob(".*.part"))


def raised_by(function):
    try:
        function()
    except Exception as error:
        return error


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("L2R_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "bugs"


@pytest.fixture
def broken(monkeypatch):
    """``broken(target, function)``: its code, for this test."""

    def broken(target, function):
        monkeypatch.setattr(function_of(target), "__code__", function.__code__)

    return broken


def _secrets(*args, **options):
    raise KeyError(f"https://me:{SECRET}@hub.org/x?Signature={SECRET}&a=b hf_0123456789 {SECRET}")


def test_the_file_of_a_bug_has_what_a_report_needs_and_no_secrets(l2r, cache, broken, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setitem(
        function_of("l2r.routers.count:router_parameters").__globals__, "SECRET", SECRET
    )
    broken("l2r.routers.count:router_parameters", _secrets)
    words = ["--ranks", "2", "--heads", "1", "--json", "--num-experts", "64"]
    line = l2r("params", *words).bug()
    (file,) = cache.glob("*.txt")
    text = file.read_text()
    assert SECRET not in line + text
    assert "https://***@hub.org/x?*** *** ***" in text
    for name in ("l2r-moe", "python", "torch", "transformers", "numpy"):
        assert re.search(rf"^{name}: \d", text, re.MULTILINE), name
    assert "command: l2r params --ranks 2 --heads 1 --json --num-experts 64" in text
    assert "Traceback (most recent call last)" in text and "cli/params.py" in text
    assert cache.stat().st_mode & 0o077 == 0  # for this user alone


def test_words_that_are_named_like_a_secret_and_long_ones_are_left_out():
    from l2r.cli.bug import _plain_words, without_secrets

    given = [
        "eval",
        "M",
        "--api-key",
        "abc",
        "a.token=abc",
        "--tokens",
        "5",
        "--text",
        "x" * 999,
    ]
    assert _plain_words(given) == [
        "eval", "M", "--api-key", "***", "a.token=***", "--tokens", "5", "--text",
        "x" * 200 + "...",
    ]  # fmt: skip
    for text in ("Bearer abcdef", "hf_abcdefghij", "http://u:p@h", "https://h/x?sig=1"):
        assert "***" in without_secrets(text), text
    assert without_secrets("training.tokens=500 in step.py?") == "training.tokens=500 in step.py?"


def test_only_the_newest_files_of_bugs_are_kept(l2r, cache, broken):
    cache.mkdir(parents=True)
    for number in range(30):
        (cache / f"20200101-0000{number:02}-1.txt").write_text("old")
    broken("l2r.routers.count:router_parameters", key_error)
    line = l2r("params").bug()
    kept = sorted(path.name for path in cache.glob("*.txt"))
    assert len(kept) == 20 and kept[0] == "20200101-000011-1.txt" and kept[-1] in line


def test_without_a_home_commands_and_reports_work_as_elsewhere(l2r, cache, broken, monkeypatch):
    """As in a container whose user has no entry: expanduser has nothing to put for ~."""

    def nobody(*of):
        raise KeyError(of)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert l2r("--version").code == 0
    assert "must be a file or a folder that exists" in l2r("diagnose", "x", "--data=~/y").refusal()
    broken("l2r.routers.count:router_parameters", key_error)
    assert str(cache) in l2r("params").bug()


def test_where_no_file_can_be_written_the_traceback_is_printed(l2r, tmp_path, broken, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("L2R_CACHE", str(tmp_path / "file"))
    broken("l2r.routers.count:router_parameters", key_error)
    code, out, err = l2r("params")
    assert code == 70 and not out
    assert "please report it with what follows" in err and "Traceback (most recent" in err


def test_a_traceback_that_is_asked_for_is_printed_and_the_codes_stay(
    l2r, cache, broken, monkeypatch
):
    monkeypatch.setenv("L2R_TRACEBACK", "1")
    code, _, err = l2r("params", "--ranks", "x")
    assert code == 2 and "Traceback" in err and "ranks must be positive integers" in err
    broken("l2r.routers.count:router_parameters", key_error)
    code, _, err = l2r("params")
    assert code == 70 and "Traceback" in err


def _memory(*args, **options):
    raise MemoryError


def _cuda_memory(*args, **options):
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory.\nmore")


def _cpu_memory(*args, **options):
    import torch

    torch.empty(2**60)


def _disk(*args, **options):
    raise OSError(28, "No space left on device")


def _cache(*args, **options):
    import os

    raise PermissionError(13, "Permission denied", os.environ["L2R_CACHE"] + "/x/y")


@pytest.mark.parametrize(
    ("error", "words"),
    [(_disk, "the disk fails: [Errno 28] No space"), (_cache, "cache/x/y: permission denied")],
)
def test_a_full_disk_and_a_cache_that_cannot_be_used_are_no_bugs(l2r, cache, broken, error, words):
    broken("l2r.routers.count:router_parameters", error)
    assert words in l2r("params").refusal() and not cache.exists()


@pytest.mark.parametrize("error", [_memory, _cuda_memory, _cpu_memory])
def test_a_machine_with_too_little_memory_is_no_bug(l2r, cache, broken, error):
    broken("l2r.routers.count:router_parameters", error)
    assert l2r("params").refusal().startswith("error: not enough memory: ")
    assert not cache.exists()


def _missing(*args, **options):
    import importlib

    importlib.import_module("l2r.no_such_module")


def _optional(*args, **options):
    raise ModuleNotFoundError("No module named 'plotly'", name="plotly")


def test_a_module_of_ours_that_is_missing_is_a_bug_and_an_optional_package_is_not(
    l2r, cache, broken
):
    broken("l2r.routers.count:router_parameters", _missing)
    assert "No module named 'l2r.no_such_module'" in l2r("params").bug()
    broken("l2r.routers.count:router_parameters", _optional)
    assert "pip install 'l2r-moe[report]'" in l2r("params").refusal()


def _leave(*args, **options):
    raise SystemExit(3)


def _interrupt(*args, **options):
    raise KeyboardInterrupt


def _end_of_file(*args, **options):
    raise EOFError("injected")


@pytest.mark.parametrize(("error", "code"), [(_leave, 3), (_interrupt, 130), (_end_of_file, 70)])
def test_who_leaves_or_interrupts_meets_no_bug(l2r, cache, broken, error, code):
    broken("l2r.routers.count:router_parameters", error)
    ended = l2r("params")
    assert ended.code == code and cache.exists() == (code == 70)
    assert ("interrupted" in ended.err) == (code == 130)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_command_as_before(tmp_path, number, code):
    """In a process, of a command that waits."""
    running = processes.Running(tmp_path, _waiting, L2R_CACHE=str(tmp_path / "cache"))
    while "waiting" not in running.out:
        assert running.process.is_alive(), running.err
    running.send_signal(number)
    assert running.wait(60) == code
    assert "Traceback" not in running.err and not (tmp_path / "cache").exists()


def _wait(*args, **options):
    import sys
    import time

    print("waiting", file=sys.stdout, flush=True)
    time.sleep(60)


def _waiting():
    from l2r.cli import main

    function_of("l2r.routers.count:router_parameters").__code__ = _wait.__code__
    main(["params"])


def _into_a_closed_pipe():
    from l2r.cli import main

    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing, 1)
    main(["train", "--list"])


def test_a_closed_pipe_ends_a_command_as_before(tmp_path):
    running = processes.Running(tmp_path, _into_a_closed_pipe, L2R_CACHE=str(tmp_path / "cache"))
    assert running.wait(60) == 1
    assert "Traceback" not in running.err and not (tmp_path / "cache").exists()


def test_at_the_border_no_kind_of_error_but_ours_is_bad_input():
    """``cli/app.py`` ends with 2 for InputError, missing extras and words that are no command."""
    tree = ast.parse((SOURCE / "l2r" / "cli" / "app.py").read_text())
    (main,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main")
    handlers = [n for n in ast.walk(main) if isinstance(n, ast.ExceptHandler)]
    kinds = [ast.unparse(handler.type) for handler in handlers]
    assert kinds == [
        "_UsageError", "InputError", "MissingExtraError", "KeyboardInterrupt", "Exception",
    ]  # fmt: skip
    last = ast.unparse(handlers[-1].body[-1])
    assert last == "sys.exit(_BUG)"


def test_commands_refuse_by_the_class_for_it():
    """No ``raise ValueError`` and no translation of any error in the rooms that users call."""
    wide = re.compile(r"except (Exception|BaseException|OSError|\(?ValueError\b.*) as error:")
    for path in sorted(SOURCE.glob("*/cli/*.py")):
        text = path.read_text()
        assert "raise ValueError" not in text and "raise OSError" not in text, path
        if path.name not in ("doctor.py", "app.py"):  # doctor's table is what was raised
            assert not wide.search(text), path


def test_what_blames_input_is_narrow_or_asks_who_raised():
    """``except Exception`` that ends in an InputError asks ``blames_input`` first."""
    argued = {"l2r/routers/config.py"}  # a module of the user's, imported by its name
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler) or node.type is None:
                continue
            body = ast.unparse(ast.Module(node.body, []))
            wide = re.search(r"\b(Base)?Exception\b", ast.unparse(node.type))
            if wide and ("raise InputError" in body or "raise cannot_load" in body):
                asks = "blames_input" in body or "cannot_load" in body
                name = str(path.relative_to(SOURCE))
                assert asks or name in argued, f"{name}, line {node.lineno}"


def on_a_rank(target, error, words):
    """What torchrun starts: a command in which a function of ours raises."""
    from torch.distributed.run import main

    call = f"run_broken({target!r}, {error!r}, {words})"
    code = f"from {__name__} import run_broken; {call}"
    main(["--standalone", "--nproc-per-node", "2", "--no-python", sys.executable, "-c", code])


@pytest.mark.slow("three fresh processes")
@pytest.mark.parametrize(("error", "code"), [("key_error", 70), ("input_error", 2)])
def test_under_torchrun_every_rank_ends_with_its_code_and_the_launcher_says_it(
    tmp_path, tiny_changes, monkeypatch, error, code
):
    words = ["train", "demo/linear", *tiny_changes, "training.micro_batch=4"]
    words += ["--out", str(tmp_path / "out")]
    running = processes.Running(
        tmp_path / "said", on_a_rank, "l2r_lab.training.step:TrainingStep.take", error, words
    )
    assert running.wait() == 1
    assert re.search(rf"exitcode *: {code} ", running.err), running.err
    lines = [line for line in running.err.splitlines() if line.startswith("error: ")]
    assert lines and all(("a bug in l2r" in line) == (code == 70) for line in lines)
    for line in lines if code == 70 else ():
        text = Path(line.partition("please report it with ")[2]).read_text()
        assert "WORLD_SIZE: 2" in text and "KeyError: 'injected'" in text
