"""Names and values of a stranger's files are printed without what steers a terminal."""

import ast
import json
import logging
import warnings
from pathlib import Path

import pytest

import l2r.cli
from l2r.cli.app import _printable_messages
from l2r.cli.console import print_table, print_text, progress_bars
from l2r.cli.output import echo
from l2r.files.wording import printable
from l2r.report.tables import Table

STEERS = "\x1b]0;evil\x07\x1b[2J\x9b1m\r\u202e\u2066\x7f"
SHOWN = "\\u001b]0;evil\\u0007\\u001b[2J\\u009b1m\\u000d\\u202e\\u2066\\u007f"


def test_what_steers_is_written_out_and_all_else_stays():
    assert printable(f"a{STEERS}b") == f"a{SHOWN}b"
    for text in ("naïve 中文 🙂\n\t\u05e9", "a\u200db", ""):
        assert printable(text) == text
    assert printable("caf\udce9") == "caf\\udce9"  # a name of a file that is not UTF-8


def test_json_says_the_same():
    for text in (STEERS, "\udce9", "\u2028"):
        written = json.dumps({text: [text]}, ensure_ascii=False)
        assert json.loads(printable(written)) == {text: [text]}


def test_every_way_of_printing(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    echo(STEERS)
    echo(STEERS, err=True)
    print_text(STEERS)
    print_table(Table(STEERS, (STEERS, "b"), ((STEERS, 1.0),), caption=STEERS))
    with progress_bars() as report:
        report(f"{STEERS}[/bold]", 1, 2, f"{STEERS}[/bold]")
    ended = capsys.readouterr()
    assert ended.out.count(SHOWN) == 6 and ended.err.count(SHOWN) >= 3
    for sign in STEERS.replace("evil", "").replace("]0;", "").replace("[2J", "").replace("1m", ""):
        assert sign not in ended.out + ended.err, repr(sign)


def test_no_command_prints_past_it():
    """typer.echo and print pass on what they get."""
    for file in Path(l2r.cli.__path__[0]).glob("*.py"):
        calls = [n.func for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        plain = {ast.unparse(call) for call in calls} & {"typer.echo", "typer.secho", "print"}
        assert plain <= ({"typer.echo"} if file.name == "output.py" else set()), file


@pytest.mark.parametrize("command", ["check", "eval"])
def test_a_file_with_a_name_that_steers(command, l2r, tmp_path, checkpoint, capfd):
    folder = tmp_path / "text" / "\x1b]0;evil\x07\x1b[2J"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text("x")
    line = l2r(command, checkpoint, "--data", tmp_path / "text", "--length", 16).refusal()
    assert "\\u001b]0;evil\\u0007\\u001b[2J/a.jsonl" in line and "\x1b" not in line


def test_warnings_and_logs_of_libraries_too(caplog):
    before = logging.getLogRecordFactory(), warnings.formatwarning
    with _printable_messages():
        logging.getLogger("l2r").warning("about %s", STEERS)
        assert SHOWN in warnings.formatwarning(STEERS, UserWarning, "a.py", 1, "")
    assert (logging.getLogRecordFactory(), warnings.formatwarning) == before
    assert caplog.messages[0] == f"about {SHOWN}"
