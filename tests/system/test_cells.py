"""Every pair of a family of each contract, a dtype, a kind of folder and a command: a cell."""

from itertools import combinations, product

import pytest

from tests.system.cells import (
    COMMANDS,
    DTYPES,
    KINDS,
    OF_EACH_CONTRACT,
    Cell,
    Folders,
    cover,
    make_text,
    try_cell,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def folder_of(text, tmp_path_factory):
    return Folders(tmp_path_factory.mktemp("folders"), text)


@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("unlimited_ocr", "fp16", "preset", "load"),  # experts of a wrapper's part
        Cell("inkling2_loop_text", "bf16", "linear", "fit_routers"),  # layers run several times
        Cell("openai_privacy_filter", "bf16", "stock", "serve"),
        Cell("openai_privacy_filter", "float32", "linear", "router_losses"),
        Cell("olmoe", "float32", "exported", "check"),  # our own class, of a swap
        Cell("olmoe", "float32", "exported", "mismatch_folder"),
    ],
    ids=str,
)
def test_a_cell_that_was_wrong_once_is_right_or_refused_for_a_fact(cell, folder_of):
    try_cell(cell, folder_of)


@pytest.mark.slow("two hundred folders and commands")
@pytest.mark.usefixtures("coarse", "unchecked")
@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("cell", cover(), ids=str)
def test_a_cell_is_right_or_refused_for_a_fact(cell, folder_of):
    try_cell(cell, folder_of)


def test_the_cells_have_every_pair():
    """Own models are of one family; each other pair of values is in one cell at least."""
    cells = cover()
    values = (OF_EACH_CONTRACT, tuple(DTYPES), tuple(KINDS), tuple(COMMANDS))
    for first, second in combinations(range(4), 2):
        missing = set(product(values[first], values[second]))
        missing -= {(cell[first], cell[second]) for cell in cells}
        assert {pair for pair in missing if "own" not in pair} == set()
    assert {cell.command for cell in cells if cell.kind == "own"} == set(COMMANDS)
    assert len(set(cells)) == len(cells) and all(isinstance(cell, Cell) for cell in cells)
