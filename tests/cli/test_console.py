"""Tables on the console say what their cells say."""

import io
import math

import pytest
from rich.console import Console

from l2r.cli import console
from l2r.cli.console import print_table, progress_bars
from l2r.files.reading import parse_json
from l2r.report.tables import Table


def test_brackets_and_colons_in_a_table_are_text(capsys):
    rows = (("[bold]data[/bold]", "pip install 'l2r-moe[data]'"), ("gpu", ":warning:"))
    print_table(Table("sizes [N, H]", ("extra", "detail [x]"), rows, caption="of [all]"))
    shown = capsys.readouterr().out
    for words in (*rows[0], ":warning:", "sizes [N, H]", "detail [x]", "of [all]"):
        assert words in shown, shown


def test_records_for_programs_are_json(capsys):
    table = Table("", ("name", "radius"), (("a", math.inf), ("b", math.nan), ("c", 0.5)))
    print_table(table, as_json=True)
    records = parse_json(capsys.readouterr().out.encode(), list)
    assert [record["radius"] for record in records] == [None, None, 0.5]


def test_a_row_keeps_its_name_in_one_piece(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("router", *(f"a column of {n} words" for n in range(5)))
    rows = [("l2r_sips_tuned", *(f"{n} to {n + 9} of a hundred" for n in range(5)))]
    print_table(Table("", columns, rows))
    assert "l2r_sips_tuned" in capsys.readouterr().out


def test_names_are_not_broken_in_the_middle(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    columns = ("layer", "old router", "router", "old parameters", "parameters", "selection")
    row = (0, "MixtralTopKRouter", "l2r_sips", 512, 832, "that of mixtral")
    print_table(Table("Routers", columns, (row,), few=columns[1:]))
    words = capsys.readouterr().out.split()
    assert {"MixtralTopKRouter", "l2r_sips", "512", "832", "that", "of"} <= set(words), words


@pytest.mark.parametrize("width", range(40, 101))
def test_no_number_is_cut(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    names = ("CE mean", "stability", "load entropy", "experts ever first", "routing gain")
    numbers = (5.336, 0.991, "9.96e-08", "7 to 10", 0.239)
    print_table(Table("Routers", ("router", *names), (("l2r_sips_tuned", *numbers),)))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= width for line in lines), lines
    words = " ".join(lines).split()
    assert {"5.336", "0.991", "l2r_sips_tuned"} <= set(words), lines
    shown = {word for word in words if word[0].isdigit() and word not in {"1", "2", "3", "7", "10"}}
    assert shown <= {"5.336", "0.991", "9.96e-08", "0.239"}, lines
    assert width < 70 or "0.239" in shown, lines
    assert "0.239" in shown or "more column" in " ".join(words), lines


def test_slow_steps_have_a_time_to_the_end(monkeypatch):
    clock, screen = [0.0], io.StringIO()
    shown = Console(file=screen, force_terminal=True, width=80, get_time=lambda: clock[0])
    monkeypatch.setattr(console, "Console", lambda stderr: shown)
    with progress_bars() as report:
        for done in range(3):
            report("diagnoses", done, 6, "linear")
            clock[0] += 90
    assert "0:06:00" in screen.getvalue()
