"""Stock checkpoints of every family in half precision, by each command that opens one.

What commands say is compared with transformers' own forward: cells.py has the comparisons.
"""

from functools import partial

import pytest

from l2r.files.diagnosis import read_diagnosis
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import LOOPED
from tests.system import cells
from tests.system.cells import OF_EACH_CONTRACT, READ, Cell, Folder, Folders, make_text, try_cell

pytestmark = pytest.mark.usefixtures("coarse", "unchecked")

# Whose page is drawn, which takes longer than all else: with certificates, without for groups and
# a bias, for a bias of the block, and of layers of two kinds.
DRAWN = ("olmoe", "deepseek_v3", "afmoe", "jamba")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(
    scope="module",
    params=[
        *((family, "bf16") for family in OF_EACH_CONTRACT),
        *(
            pytest.param((family, "bf16"), marks=pytest.mark.slow("every family"))
            for family in FAMILIES  # in the other dtypes: make cells
            if family not in OF_EACH_CONTRACT
        ),
    ],
    ids="-".join,
)
def stock(request, text, tmp_path_factory):
    """A family's checkpoint and what transformers reads from it."""
    others = Folders(tmp_path_factory.mktemp(request.param[0]), text)
    return Folder(*request.param, "stock", others)


def is_right(stock, command, **more):
    """Whether a number was compared; no where a fact of the family says why there is none."""
    cell = Cell(stock.family, stock.dtype, "stock", command)
    return not try_cell(cell, lambda *_: stock, run=partial(cells.COMMANDS[command], **more))


def test_check_finds_no_fault(stock):
    is_right(stock, "check")


def test_layers_in_a_loop_are_counted_and_have_no_routes(text, tmp_path):
    """Loads count every pass; what needs one route of each token says why it has none."""
    looped = Folder(LOOPED[0], "bf16", "stock", Folders(tmp_path, text))
    for command in ("diagnose_data", "diagnose_text", "mismatch_bf16", "record"):
        assert not is_right(looped, command)
    options = ("--certify", 0, "--text-tokens", 0, "--out", tmp_path / "c")
    cells.done("diagnose", looped.path, "--data", text.file, *READ, *options)
    calls = looped.read[1]
    layers = read_diagnosis(tmp_path / "c" / "stock").layers
    passes = [sum(c.router is r for c in calls) for r in dict.fromkeys(c.router for c in calls)]
    assert passes == [1, 2, 1] and len(layers) == 3


def test_diagnosis_of_data_says_what_transformers_does(stock):
    is_right(stock, "diagnose_data", draw=stock.family in DRAWN)


def test_diagnosis_of_a_sentence_has_the_experts_of_every_token(stock):
    is_right(stock, "diagnose_text")


@pytest.mark.parametrize(
    ("against", "dtype"),
    [
        ("bf16", "float32"),
        ("int8", "auto"),
        pytest.param("bf16", "auto", marks=pytest.mark.slow("every family")),
        pytest.param("int8", "float32", marks=pytest.mark.slow("every family")),
    ],
)
def test_mismatch_counts_what_changes_in_the_other_arithmetic(stock, against, dtype):
    is_right(stock, f"mismatch_{against}", dtype=dtype)


def test_record_has_the_experts_that_transformers_chooses(stock):
    is_right(stock, "record")
