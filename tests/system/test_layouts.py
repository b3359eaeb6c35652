"""Each layout of a quantized folder in each command: right or refused, as docs/swap.md says."""

import re
from pathlib import Path

import pytest

from l2r.hf.models import layout_of
from tests.commands import command
from tests.hf.layouts import OPENED, REFUSED, TEXT
from tests.hf.layouts import folder_of as layout_folder
from tests.system.layout_cells import OPENING, LayoutFolder, make_text, outcome
from tests.tiers import few

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "swap.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Quantized and wrapped folders\n")[2].partition("\n## ")[0]
ARITHMETIC = ("mismatch_bf16", "mismatch_int8")
GATES = ("nf4_gate", "int8_gate")
ROWS = {
    "fp8_uneven": "fp8 with rows that are no whole blocks",
    "fp8_halves": "fp8 with rows that are no whole blocks",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "transformers_4": "nf4 or int8 of transformers 4",
    "adapter": "an adapter",
    "adapter_beside": "an adapter beside the weights",
    "gguf": "a GGUF file",
}


def rows(first: str) -> dict[str, list[str]]:
    """Cells of the table of the section whose head begins with a word, by their first."""
    table = re.search(rf"^\| {first} \|.*\n\|---.*\n((?:\|.*\n)+)", SECTION, re.M)
    assert table, first
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()]
    return {line[0]: line[1:] for line in lines}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folder_of(text, tmp_path_factory):
    made = {}

    def get(layout):
        if layout not in made:
            made[layout] = LayoutFolder(layout, text, tmp_path_factory.mktemp(layout))
        return made[layout]

    return get


def own_tests(layout: str, name: str) -> bool:
    """Whether a cell has a test of its own below."""
    return (layout in GATES and name == "check") or (layout, name) == ("int8_gate", "diagnose_data")


CELLS = [(layout, name) for layout in OPENED for name in OPENING if not own_tests(layout, name)]


@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.filterwarnings("ignore:.*untrained", "ignore:.*refuses this model")
@pytest.mark.parametrize(
    ("layout", "name"),
    few(
        CELLS,
        lambda cell: cell[0] in ("mxfp4", "fp8") and cell[1] != "diagnose_data",
        "every layout",
    ),
)
def test_a_command_is_right_or_refused_as_the_page_says(layout, name, folder_of):
    """Right: the numbers are those of transformers' forward in this process."""
    folder = folder_of(layout)
    said = outcome(folder, name)
    row = rows("layout")[_label(layout)]
    expected = row[2] if name in ARITHMETIC else row[1]
    assert expected in ("right", "refused")
    if expected == "right":
        assert said == ""
    else:
        assert re.search("against (bf16|int8) has no meaning for", said), said


def _label(layout: str) -> str:
    name = layout_of(layout_folder(layout)).name
    return f"{name}, gates too" if layout in GATES else name


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("layout", ["mxfp4", "nf4"])
def test_the_first_line_names_the_layout_and_its_memory(layout, folder_of, text):
    """As the page shows it."""
    words = ("--data", text.file, "--instances", 2, "--length", 32, "--device", "cpu")
    ended = command("check", folder_of(layout).path, *words)
    first = ended.err.splitlines()[0]
    assert first in SECTION.splitlines()


@pytest.mark.slow("every layout")
@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("layout", GATES)
def test_a_packed_gate_is_a_fault_and_the_only_one(layout, folder_of, text):
    words = ("--data", text.file, "--instances", 4, "--length", 32, "--device", "cpu")
    ended = command("check", folder_of(layout).path, *words)
    faults = [line for line in ended.out.splitlines() if line.startswith("fault")]
    assert ended.code == 1 and len(faults) == 1
    assert "router weights in layers 0, 1 are quantized (bitsandbytes)" in faults[0]


@pytest.mark.slow("every layout")
@pytest.mark.usefixtures("coarse", "unchecked")
def test_products_of_8_bits_have_no_certificate(folder_of, text):
    """bitsandbytes rounds the inputs of each token by its own largest: no linear map."""
    folder = folder_of("int8_gate")
    with pytest.raises(KeyError, match="certified_top1"):  # all numbers before it were right
        outcome(folder, "diagnose_data")
    out = folder.new()
    command(
        "diagnose", folder.path, "--data", text.file, "--instances", 4, "--length", 32,
        "--device", "cpu", "--certify", 2, "--gain", 0, "--out", out,
    )  # fmt: skip
    saved = "".join(file.read_text() for file in out.rglob("*.json"))
    assert "HunYuanMoEV1Gate has other logits than its weight gives" in saved


@pytest.mark.parametrize("layout", few(OPENED, ("mxfp4", "fp8"), "every layout"))
def test_the_page_says_what_a_layout_takes(layout, folder_of):
    kept = layout_of(folder_of(layout).path)
    memory, _, _, dtypes = rows("layout")[_label(layout)]
    assert memory == ("packed" if kept.packed else "unpacked")
    assert dtypes == ("any" if kept.takes_any_dtype else f"auto, {kept.dtype}")


def test_every_layout_is_on_the_page():
    assert set(ROWS) == set(REFUSED)
    assert set(ROWS.values()) | {"another quantizer"} == set(rows("folder"))
    assert len(rows("layout")) == len({layout for layout in OPENED if "deepseek" not in layout})


def test_the_page_has_the_versions_that_are_installed_together():
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "pyproject.toml").read_text()
    for package in ("transformers", "bitsandbytes", "compressed-tensors", "torchao"):
        (version,) = set(re.findall(rf'^"?{package}==([\d.]+)|"{package}==([\d.]+)"', pins, re.M))
        assert f"{package} {''.join(version)}" in SECTION.replace("\n", " ")


REFUSING = ("check", "diagnose", "mismatch", "eval", "serve", "swap", "export")
COPIED = ("fp8_uneven", "fp8_halves")  # a swap and an export read none of their blocks


@pytest.mark.parametrize(
    ("layout", "name"),
    few(
        [
            (layout, name)
            for layout in REFUSED
            for name in REFUSING
            if layout not in COPIED or name not in ("swap", "export")
        ],
        lambda cell: cell[1] == "check",
        "every command",
    ),
)
def test_a_folder_is_refused_by_what_it_is(layout, name, tmp_path, monkeypatch):
    """In one line with exit code 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    words = {
        "check": ("--text", TEXT),
        "diagnose": ("--text", TEXT, "--out", "out"),
        "mismatch": ("--text", TEXT, "--against", "bf16", "--dtype", "auto", "--out", "out"),
        "eval": ("--text", TEXT, "--out", "out"),
        "serve": ("--port", 0),
        "swap": ("--out", "out"),
        "export": ("--out", "out"),
    }[name]
    line = command(name, layout_folder(layout), *words).refusal()
    said = re.match("`(.*?)`", rows("folder")[ROWS[layout]][0])[1]
    if name == "mismatch" and layout in ("gptq", "awq", "transformers_4"):
        said = "against bf16 has no meaning for"
    assert said in line
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ("check", "serve"))
def test_a_gguf_file_by_itself_is_named(name):
    (file,) = layout_folder("gguf").iterdir()
    line = command(name, file).refusal()
    assert f"{file} is a GGUF file of llama.cpp; take the checkpoint" in line
