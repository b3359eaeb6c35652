"""docs/re-run-the-paper.md: its blocks, its table of items, and a rehearsal of all of it."""

import base64
import json
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import plotly.io
import pytest

from l2r.errors import InputError
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.files.wording import parse_tokens
from l2r.text.manifest import read_manifest
from l2r.text.split import Split
from l2r.text.tokens import read_documents
from l2r_lab.cli.paper import all_items
from l2r_lab.report.paper_sources import PaperSources
from l2r_lab.studies.cells import grid_cells
from l2r_lab.training.data.olmoe_mix import OLMOE_MIX, plan_subset
from l2r_lab.training.recipes.load import load_recipe
from scripts.pages.rehearsal import PAGE, ROOT, SECTIONS, script, sections, settings_in

# The rehearsal is set up within the time of the first test that needs it.
pytestmark = pytest.mark.timeout(2400)
DATA = Path("data/olmoe-mix-10B")
TEXT = PAGE.read_text()
BLOCKS = sections(TEXT)
FULL = BLOCKS["Language: OLMoE-1B-7B, 10B tokens"][0]
REHEARSAL = BLOCKS["Rehearse it first"][1]
SETTINGS = ["Table 12", "Table 13", "Table 15", "Figure 1"]  # and a drawing: without a command
RESULTS = ("MMLU", "BoolQ", "HSwag", "PIQA", "SciQ", "Overall")
GROUPS = ("Hum", "Other", "SocSci", "STEM")


def settings_of(block):
    """The shell's own reading of a block of assignments."""
    done = subprocess.run(
        ["bash", "-c", f"set -a; {block}\nenv -0"],
        capture_output=True,
        check=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    given = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    return {name: given[name] for name in settings_in(block)}


def test_full_size_settings_are_the_papers():
    full, rehearsal = settings_of(FULL), settings_of(REHEARSAL)
    assert full["SIZES"] == "" and full["SUBSET"] == "200B" and "1024" in full["EVALUATE"]
    assert full["RANKS"] == "2,8,32" and full["HEADS"] == "1,4,8,16,64"
    assert full["INFERENCE"] == "", "the default is the paper's model"
    six = full["ROUTERS"].split()
    assert [load_recipe(f"olmoe-1b-7b/{name}").router.kind for name in six] == list(PAPER_ROUTERS)
    plan = plan_subset(parse_tokens(full["SUBSET"]))
    split = Split(hold_out=float(full["HOLD_OUT"]), share=float(full["SHARE"]))
    made = plan.tokens * (1 - split.hold_out) * split.share
    for router in six:
        recipe = load_recipe(f"olmoe-1b-7b/{router}", [])
        assert recipe.training.tokens <= made, "no document should be seen twice"
        folders = split.folders(DATA)
        assert recipe.data.tokens == [str(folders["train"])]
        assert recipe.data.validation_tokens == [str(folders["validation"])]
        assert recipe.data.tokenizer == str(DATA / "tokenizer")
    # Sizes, and nothing that says where data lies or what is trained.
    for name in ("SIZES", "VISION_SIZES"):
        changed = {change.partition("=")[0] for change in rehearsal[name].split()}
        assert {key.partition(".")[0] for key in changed} <= {
            "model", "data", "training", "optimizer", "evaluation"
        }  # fmt: skip
        data = {key for key in changed if key.startswith("data.")}
        assert data <= {"data.sequence_length", "data.workers"}


def items_of_the_page():
    """Items of the first column, alone, in lists and in ranges; the cells of each one's row."""
    text = TEXT.split("## Every table and figure")[1].split("\n## ")[0]
    rows = {}
    for line in text.splitlines():
        if not line.startswith("| ") or line.startswith("| item"):
            continue
        item, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        (kind, numbers), *more = re.findall(
            r"(Table|Figure)s? ([\d, ]+)", re.sub(r"\(.*\)", "", item)
        )
        assert not more and len(cells) == 3 and cells[2], line
        for number in re.findall(r"\d+", numbers):
            assert f"{kind} {number}" not in rows
            rows[f"{kind} {number}"] = cells
    return rows


def test_every_table_and_figure_has_a_row_and_is_written_by_the_last_command():
    """15 tables and 16 figures; all but settings and a drawing have files of their names."""
    rows = items_of_the_page()
    paper = [f"Table {n}" for n in range(1, 16)] + [f"Figure {n}" for n in range(1, 17)]
    assert set(rows) == set(paper) and len(rows) == 31
    written = [item.name for item in all_items()]
    assert written == [name for name in paper if name not in SETTINGS]
    for name in written:
        assert re.search("`l2r |step|sweep", rows[name][1]), name


def commands_of(text):
    """What the shell would run: its words after expansion, loops unrolled.

    Both programs are functions that print their words; any other would not be found.
    """
    record = "".join(
        f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\n\\0'; }}\n"
        for name in ("l2r", "torchrun")
    )
    done = subprocess.run(
        ["bash", "-c", f"PATH=\n{record}{script(text, programs='')}"],
        capture_output=True,
        check=False,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    if done.returncode:
        raise ValueError(done.stderr)
    return [line.split("\0")[:-1] for line in done.stdout.split("\n\0") if line]


def test_the_blocks_parse_and_run_the_commands_in_the_papers_order():
    """C4 is prepared before the first step; the heads reuse the ranks; eval comes after both."""
    commands = commands_of(TEXT)
    assert [words[1] for words in commands if words[0] == "l2r"] == [
        *("data", "data", "data", "data", "sweep", "sweep", "eval", "diagnose", "report", "bench"),
        *(["eval"] * 5), *("sweep", "sweep", "report", "paper"),
    ]  # fmt: skip
    (language, vision) = (
        [words for words in commands if f" -m l2r train {name}/" in " ".join(words)]
        for name in ("olmoe-1b-7b", "vit-s")
    )
    assert len(language) == 7 and len(vision) == 5
    assert all("data/c4" in words[-1] for words in language)
    sweeps = [words for words in commands if words[1] == "sweep"]
    assert [words.count("--reuse") for words in sweeps] == [0, 2, 1, 1]
    assert all("--tasks" in words for words in sweeps[:2])
    assert all("--tasks" not in words for words in sweeps[2:])


def lines_of_code():
    """Positions of the lines of blocks that the rehearsal runs, and of its own."""
    found, title, code = [], "", False
    for number, line in enumerate(TEXT.splitlines()):
        if line.startswith("## "):
            title = line[3:]
        if line.strip().startswith("```"):
            code = line.strip() == "```bash"
        elif code and title in SECTIONS:
            found.append(number)
    return found


def test_no_line_of_a_block_can_go():
    """Without it the page is refused, a shell ends with an error, or other commands are run."""
    commands, lines = commands_of(TEXT), TEXT.splitlines()
    places = lines_of_code()
    assert len(places) > 60
    for place in places:
        shorter = "\n".join(lines[:place] + lines[place + 1 :]) + "\n"
        with suppress(ValueError):
            assert commands_of(shorter) != commands, lines[place]


def test_a_sweep_of_the_page_has_the_recipes_of_the_papers_runs():
    """Else ``--reuse`` would find nothing, and (r 2, H 4) and the main run be trained twice."""
    heads = grid_cells("olmoe-1b-7b/l2r-sips", ["router.rank=2"], {"router.heads": [4, 16]}, 1)
    ranks = grid_cells("olmoe-1b-7b/l2r-sips", ["router.heads=4"], {"router.rank": [2]}, 1)
    assert heads[0].recipe == ranks[0].recipe == load_recipe("olmoe-1b-7b/l2r-sips-rank-2")
    assert heads[1].recipe == load_recipe("olmoe-1b-7b/l2r-sips")
    vision = grid_cells("vit-s/l2r-sips", ["router.heads=4"], {"router.rank": [2]}, 1)
    assert vision[0].recipe == load_recipe("vit-s/l2r-sips")


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """A folder in which all commands of the page ran, with no program of ours in PATH."""
    folder = tmp_path_factory.mktemp("rehearsal")
    plain = {**os.environ, "PATH": "/usr/bin:/bin", "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.pages.rehearsal", str(folder / "paper-run")],
        cwd=ROOT,
        env=plain,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder / "paper-run"


def table(folder, number):
    """Rows of a table by their first cells; ``number`` may hold how many cells those are."""
    return json.loads((folder / "paper" / f"table-{number}.json").read_text())


def numbers(cell):
    """Accuracy and its standard error; a dash or an empty cell has none."""
    found = re.fullmatch(r"(\d+\.\d+)±(\d+\.\d+)\*?", cell)
    assert found, cell
    return tuple(map(float, found.groups()))


def figure(folder, number):
    return plotly.io.read_json(folder / "paper" / f"figure-{number}.json")


@pytest.mark.slow("every command of the paper, at toy size")
def test_the_rehearsal_writes_a_file_for_every_item(rehearsed):
    expected = {name for name in items_of_the_page() if name not in SETTINGS}
    stems = {name.lower().replace(" ", "-") for name in expected}
    written = {path.name for path in (rehearsed / "paper").iterdir()}
    assert written == {f"{s}.{end}" for s in stems for end in ("html", "json")} | {"index.html"}
    for name in ("olmoe-1b-7b", "rank", "heads", "vit-s", "vit-rank", "vit-heads"):
        assert (rehearsed / "runs" / name / "report.html").is_file(), name
    report = (rehearsed / "runs/olmoe-1b-7b/report.html").read_text()
    assert "Downstream accuracy (%)" in report and "C4 validation cross-entropy" in report
    assert "l2r-sips" in (rehearsed / "diagnosis/index.html").read_text()
    made = {p.parent.name for p in (rehearsed / "runs").glob("[!v]*/*/model")}
    assert len(made) == 13 and "heads=4.seed-0" not in made and "heads=16.seed-0" not in made
    vision = {p.parent.name for p in (rehearsed / "runs").glob("vit-*/*/model")}
    assert len(vision) == 10


@pytest.mark.slow("every command of the paper, at toy size")
def test_tables_of_accuracies_have_every_number_with_its_error(rehearsed):
    full = table(rehearsed, 14)
    assert {row["Method"] for row in full} == set(PAPER_ROUTERS.values()) and len(full) == 12
    for row in full:
        values = {column: numbers(row[column]) for column in (*GROUPS, *RESULTS)}
        groups = [values[column][0] for column in GROUPS]
        assert values["MMLU"][0] == pytest.approx(sum(groups) / 4, abs=0.1)
        eight = [*groups, *(values[column][0] for column in RESULTS[1:-1])]
        assert len(eight) == 8
        assert values["Overall"][0] == pytest.approx(sum(eight) / 8, abs=0.1)
    shapes = {(row["Method"], row["H"], row["Rank"]): row for row in full}
    main = table(rehearsed, 1)
    assert [row["Method"] for row in main] == list(PAPER_ROUTERS.values())
    ranks, heads = table(rehearsed, 2), table(rehearsed, 3)
    assert [row["Rank"] for row in ranks] == ["2", "8", "32"]
    assert [row["H"] for row in heads] == ["1", "4", "8", "16", "64"]
    for column in RESULTS:  # the runs are shared, so are their numbers
        assert main[-1][column] == heads[3][column] == shapes["L2R (SIPS)", "16", "2"][column]
        assert ranks[0][column] == heads[1][column] == shapes["L2R (SIPS)", "4", "2"][column]
    for row in heads:  # 3 layers of d 32 and 8 experts: r (d + N H), and the gain of d
        count = 3 * (2 * (32 + 8 * int(row["H"])) + (32 if row["H"] != "0" else 0))
        kilo, share = row["Router Params"].split()
        assert float(kilo[:-1]) * 1e3 == pytest.approx(count, abs=100), row
        assert share == f"({100 * float(kilo[:-1]) * 1e3 / (3 * 32 * 8):.2f}%)"
    before = rehearsed / "runs/olmoe-1b-7b/l2r-sips/evaluation/boolq.json"
    assert before.stat().st_mtime < (rehearsed / "runs/heads/report.html").stat().st_mtime, (
        "the sweep evaluated the main run; step 5 scores nothing again"
    )


@pytest.mark.slow("every command of the paper, at toy size")
def test_tables_of_images_routing_and_inference_have_every_number(rehearsed):
    images = table(rehearsed, 5)
    assert [row["Method"] for row in images] == [
        name for kind, name in PAPER_ROUTERS.items() if kind != "linear_sips"
    ]
    for row in images:
        top1, top5 = (numbers(row[column])[0] for column in ("Top-1 (%)", "Top-5 (%)"))
        assert 0 <= top1 <= top5 == 100, "two classes"
    both = table(rehearsed, 6)
    assert [row["r (H = 4)"] for row in both] == ["2", "8", "32", ""]
    assert [row["H (r = 2)"] for row in both] == ["1", "4", "8", "16"]
    assert both[0]["Top-1 (%), r"] == both[1]["Top-1 (%), H"] != None  # noqa: E711
    assert all(0 <= row["Top-1 (%), H"] <= 100 for row in both)

    routing = {n: {row.pop("Model"): row for row in table(rehearsed, n)} for n in (4, 7, 8)}
    assert list(routing[4]) == ["X-MoE", "L2R (Dot)-H1", "L2R (SIPS)-H1"]
    assert list(routing[7]) == [*routing[4], "L2R (SIPS)-H16"]
    assert list(routing[8]) == ["Linear", "Linear (SIPS)", *routing[4]]
    for name, row in routing[4].items():
        assert row == {**routing[7][name], **routing[8][name]} and len(row) == 4
    for row in (row for rows in routing.values() for row in rows.values()):
        margin = row.pop("Mean Margin", 1)
        assert margin > 0 and all(0 <= value <= 1 for value in row.values())

    inference = table(rehearsed, 10)
    assert [row["Model"] for row in inference] == [
        "Linear", "L2R (Dot)-H1", "L2R (SIPS)-H1", "L2R (SIPS)-H16"
    ]  # fmt: skip
    for row in inference:
        assert row["Decode tok/s"] == pytest.approx(1000 / row["Decode latency (ms/step)"])
        assert row["Prefill tok/s"] == pytest.approx(16_000 / row["Prefill latency (ms)"])
        first = inference[0]["Prefill latency (ms)"]
        assert row["Prefill / Linear"] == pytest.approx(row["Prefill latency (ms)"] / first)
    assert table(rehearsed, 9)[0]["16"] == "131.072K (6.25%)"
    *domains, total = table(rehearsed, 11)
    assert [row["Domain"] for row in domains] == [domain.name for domain in OLMOE_MIX.domains]
    assert total["Total shards"] == 2903
    assert total["Selected shards"] == sum(row["Selected shards"] for row in domains)


LINES = {
    4: [(name, 5) for name in PAPER_ROUTERS.values()],
    5: [(f"rank {n}", 1) for n in (2, 8, 32)] + [(f"heads {n}", 1) for n in (1, 4, 8, 16, 64)],
}
PANELS = {  # kind of trace and how many
    3: ("contour", 2), 6: ("scatter", 3), 7: ("heatmap", 6), 8: ("surface", 5), 10: ("scatter", 3),
    11: ("scatter", 18), 12: ("scatter", 6), 13: ("heatmap", 9), 14: ("heatmap", 6),
    15: ("heatmap", 15), 16: ("heatmap", 9),
}  # fmt: skip


def values(numbers):
    """Numbers inside of a trace, which plotly leaves packed."""
    if isinstance(numbers, dict):
        return np.frombuffer(base64.b64decode(numbers["bdata"]), dtype=numbers["dtype"])
    return np.asarray(numbers)


@pytest.mark.slow("every command of the paper, at toy size")
def test_figures_have_a_trace_of_every_run(rehearsed):
    for number, lines in LINES.items():
        drawn = figure(rehearsed, number)
        names = [trace.name for trace in drawn.data]
        assert [(name, names.count(name)) for name in dict.fromkeys(names)] == lines
        for trace in drawn.data:
            x, y = np.asarray(trace.x), np.asarray(trace.y)
            assert len(x) == len(y) >= 2 and np.isfinite(y).all() and x[-1] == 1024
    loss = [np.asarray(trace.y)[-1] for trace in figure(rehearsed, 5).data]
    assert all(0.9 < value / math.log(50280) < 1.1 for value in loss), "four steps from chance"
    assert len(figure(rehearsed, 9).data) == 5 * (4 + 3 + 5 + 3)
    bars = figure(rehearsed, 2).data[0]
    assert [label.partition("<br>")[0] for label in bars.x] == list(PAPER_ROUTERS.values())
    assert all(0 < value < 1 for value in bars.y)
    for number, (kind, count) in PANELS.items():
        drawn = [t for t in figure(rehearsed, number).data if t.type == kind]
        assert len(drawn) == count, number
        for trace in drawn:
            if kind == "heatmap":  # three layers of eight experts, relative to the layer's mean
                use = np.asarray(trace.z, dtype=float)
                assert use.shape == (3, 8) and np.allclose(use.mean(1), 1), number
            if kind == "scatter":
                assert len(trace.x) > 100 and np.isfinite(np.asarray(trace.x)).all()
                assert set(values(trace.marker.color).tolist()) <= set(range(8))


@pytest.mark.slow("every command of the paper, at toy size")
def test_every_command_of_the_page_is_needed_by_some_item(rehearsed):
    """Without what a command wrote, an item cannot be made: none is filled from elsewhere."""
    sources, items = PaperSources(rehearsed), all_items()
    products = ["plan.json", "inference", "runs/rank", "runs/heads", "runs/vit-rank"]
    products += ["runs/vit-heads", "runs/vit-s/xmoe", "runs/vit-s/xmoe/evaluation.json"]
    products += [f"diagnosis/{name}" for name in ("linear", "l2r-dot-heads-1", "heads=1.seed-0")]
    products += [f"runs/olmoe-1b-7b/{name}" for name in ("linear-sips", "l2r-dot-heads-1")]
    products += ["runs/olmoe-1b-7b/linear/evaluation.json"]
    products += [
        "runs/rank/rank=8.seed-0/evaluation.json",
        "runs/rank/rank=8.seed-0/diagnosis.json",
    ]
    assert not list(lacking(items, sources))
    for product in products:
        path = rehearsed / product
        path.rename(rehearsed / "away")
        try:
            missing = next(lacking(items, PaperSources(rehearsed)), None)
        finally:
            (rehearsed / "away").rename(path)
        assert missing, product


def lacking(items, sources):
    for item in items:
        try:
            item.make(sources)
        except InputError:
            yield item.name


@pytest.mark.slow("every command of the paper, at toy size")
def test_the_rehearsals_tokens_are_split_and_of_every_domain(rehearsed):
    parts = {part: read_manifest(rehearsed / DATA / part) for part in ("train", "validation")}
    domains = {domain.name for domain in OLMOE_MIX.domains}
    assert all(set(manifest.by_domain()) == domains for manifest in parts.values())
    seen, held_out = (
        {tuple(ids) for _, ids in read_documents(rehearsed / DATA / part)} for part in parts
    )
    assert seen.isdisjoint(held_out)


@pytest.mark.parametrize(("card", "name"), [("h100", "H100"), ("a100", "A100")])
def test_the_hours_on_one_gpu_are_those_of_the_planner(l2r, card, name):
    done = l2r(*("plan", "small/gpu-linear", "--gpus", 1, "--gpu", card, "--no-simulate", "--json"))
    plan = json.loads(done.out)
    best, memory = plan["best"], plan["best"]["formula"] / 1e9
    (row,) = (line for line in TEXT.splitlines() if line.startswith(f"| {name}, 80 GB"))
    cells = row.split(" | ")
    assert cells[1:4] == [
        f"{1 / best['seconds']:.2f}", f"{best['hours']:.1f}", f"{18 * best['hours']:.0f}"
    ]  # fmt: skip
    assert plan["steps"] == 3815 and "3,815 steps" in TEXT
    small = best["with_checkpointing"]["peak"] / 1e9
    assert f"{memory:.0f} GB; {small:.0f} GB with" in TEXT
