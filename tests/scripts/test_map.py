"""The map of dev/architecture.md is what the imports are."""

import pytest

from scripts.pages import map as drawing


def test_the_figure_is_fresh():
    below = drawing.imports()
    assert {"functional", "cli", "report", "lab.training"} <= set(below) and len(below) <= 26
    assert drawing.figure(below) in drawing.PAGE.read_text(encoding="utf-8"), (
        "run python scripts/pages/map.py"
    )


def test_imports_are_those_of_the_files():
    below = drawing.imports()
    assert "files" in below["report"] and "hf" not in below["report"]
    assert below["stats"] == set() and below["functional"] == {"files"}  # names, without torch
    assert not any(
        room.startswith("lab.") for name in below if name[:4] != "lab." for room in below[name]
    )


def test_arrows_that_follow_from_others_are_left_out():
    below = {"top": {"middle", "bottom"}, "middle": {"bottom"}, "bottom": set()}
    assert drawing.arrows(below) == [("middle", "bottom"), ("top", "middle")]
    assert drawing.reachable(below, "top") == {"middle", "bottom"}


def test_a_circle_is_refused():
    with pytest.raises(ValueError, match="no circle; one imports itself"):
        drawing.arrows({"one": {"two"}, "two": {"one"}})
