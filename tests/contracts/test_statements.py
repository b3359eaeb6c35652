"""Sentences of dev/architecture.md, each beside the code that finds out whether it holds.

A sentence that is reworded on the page fails here, so that page and check change together. A
failure lists every place that contradicts the sentence.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

from l2r import laboratory
from l2r.cli import app
from l2r.routers import config, router_names

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PAGE = (ROOT / "dev" / "architecture.md").read_text(encoding="utf-8")
PLAIN = " ".join(re.sub(r"^- ", "", PAGE, flags=re.M).replace("**", "").split())

STATEMENTS: dict[str, Callable[[], list[str]]] = {}


def states(sentence: str) -> Callable[[Callable[[], list[str]]], Callable[[], list[str]]]:
    """Decorator: the function lists what contradicts a sentence of the page."""

    def keep(check: Callable[[], list[str]]) -> Callable[[], list[str]]:
        STATEMENTS[sentence] = check
        return check

    return keep


@cache
def sources() -> dict[str, ast.Module]:
    """Every Python file of both packages, parsed; its place below src is the key."""
    return {str(p.relative_to(SRC)): ast.parse(p.read_text()) for p in sorted(SRC.rglob("*.py"))}


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules that import lines anywhere in a file name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module)


def importers(*packages: str) -> list[str]:
    """Files that import one of some packages."""
    return [
        path
        for path, tree in sources().items()
        if any(name.split(".")[0] in packages for name in imported(tree))
    ]


def outside(paths: list[str], *folders: str) -> list[str]:
    return [path for path in paths if not path.startswith(folders)]


def used(word: str, *folders: str) -> list[str]:
    """Files below some folders that use a name, but for strings and comments."""
    return [
        path
        for path, tree in sources().items()
        if path.startswith(folders)
        and any(word in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(tree))
    ]


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(
        "l2r", "l2r_lab", cache_dir=None, include_external_packages=True,
        exclude_type_checking_imports=True,
    )  # fmt: skip


def torch_below(*rooms: str) -> list[str]:
    """How rooms reach torch, by import lines of modules of ours."""
    chains = (
        graph().find_shortest_chain(importer=module, imported="torch")
        for room in rooms
        for module in sorted({room} | graph().find_descendants(room))
    )
    return [" imports ".join(chain) for chain in chains if chain]


@states("The library never imports the laboratory.")
def _() -> list[str]:
    return [path for path in importers("l2r_lab") if path.startswith("l2r/")]


@states(
    "It asks for names of it through `l2r/laboratory.py`, the one file of the library that holds "
    "the name of the other package."
)
def _() -> list[str]:
    holding = [
        path
        for path, tree in sources().items()
        if path.startswith("l2r/")
        and any(
            isinstance(n, ast.Constant) and str(n.value).partition(".")[0] == laboratory.PACKAGE
            for n in ast.walk(tree)
        )
    ]
    return [path for path in holding if path != "l2r/laboratory.py"]


@states(
    "Pages import files and stats only: `l2r/report/` and `l2r_lab/report/` never import torch, "
    "and neither do `l2r/files/`, `l2r/stats/`, `l2r_lab/files/` and `l2r_lab/stats/`."
)
def _() -> list[str]:
    quiet = [f"{package}.{room}" for package in ("l2r", "l2r_lab") for room in
             ("report", "files", "stats")]  # fmt: skip
    rooms = (
        f"{module} imports {target}"
        for room in ("l2r.report", "l2r_lab.report")
        for module in graph().find_descendants(room)
        for target in graph().find_modules_directly_imported_by(module)
        if target.count(".") and target.startswith(("l2r.", "l2r_lab."))
        and graph().find_children(".".join(target.split(".")[:2]))
        and not target.startswith(tuple(quiet))
    )  # fmt: skip
    return [*rooms, *torch_below(*quiet)]


@states("Only `l2r/hf/` and `l2r/engines/` import transformers.")
def _() -> list[str]:
    return outside(importers("transformers"), "l2r/hf/", "l2r/engines/")


@states(
    "`import l2r` imports none of torch, transformers, plotly, pydantic and typer: its names come "
    "on first use."
)
def _() -> list[str]:
    heavy = {"torch", "transformers", "plotly", "pydantic", "typer"}
    waiting, seen = ["l2r"], {"l2r"}
    while waiting:  # what import lines outside functions reach
        path = waiting.pop().replace(".", "/")
        tree = sources().get(f"{path}/__init__.py") or sources().get(f"{path}.py")
        for module in at_the_top(tree.body if tree else []):
            if module not in seen:
                seen.add(module)
                waiting.append(module)
    return sorted(heavy & {name.split(".")[0] for name in seen})


def at_the_top(body: list[ast.stmt]) -> Iterator[str]:
    """Modules that an import of a file imports at once."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_the_top(node.orelse)
        elif isinstance(node, ast.Try | ast.If | ast.With):
            yield from at_the_top([*node.body, *getattr(node, "orelse", [])])


@states("No module of a package has the name of one of its functions.")
def _() -> list[str]:
    return [
        f"{path}: {name}"
        for path, tree in sources().items()
        if path.endswith("__init__.py") and "lazy_names" in ast.unparse(tree)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in (alias.asname or alias.name for alias in node.names)
        if (SRC / path).with_name(f"{name}.py").is_file() and node.module != package_of(path)
    ]


def package_of(path: str) -> str:
    return ".".join(Path(path).parent.parts)


@states(
    "the function NAME of `l2r/cli/NAME.py`, or of `l2r_lab/cli/NAME.py` for those in "
    "`l2r/cli/app.py:LABORATORY`"
)
def _() -> list[str]:
    wrong = [f"def register in {path}" for path in sources() if "/cli/" in path
             for node in ast.walk(sources()[path])
             if isinstance(node, ast.FunctionDef) and node.name == "register"]  # fmt: skip
    commands = [name for names in app.PANELS.values() for name in names]
    for name in commands:
        package = laboratory.PACKAGE if name in app.LABORATORY else "l2r"
        path = f"{package}/cli/{name}.py"
        if path not in sources() or name not in top_names(sources()[path]):
            wrong.append(f"{name} is no function or group of {path}")
    return [*wrong, *(f"{name} has no panel" for name in set(app.LABORATORY) - set(commands))]


def top_names(tree: ast.Module) -> set[str]:
    """Functions, classes and variables at the top of a file."""
    defined = {getattr(node, "name", "") for node in tree.body}
    assigned = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and
                isinstance(n.ctx, ast.Store)}  # fmt: skip
    return defined | assigned


@states(
    "`torch._C` in `l2r/kernels/`, `l2r/routers/` and `l2r/hf/routes/` only; other private modules "
    "in `l2r/moe/` and `l2r_lab/planning/` only"
)
def _() -> list[str]:
    inside = ("l2r/kernels/", "l2r/routers/", "l2r/hf/routes/")
    private = [
        f"{path}: {name}"
        for path, tree in sources().items()
        for name in imported(tree)
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    ]
    return outside(used("_C", ""), *inside) + outside(private, "l2r/moe/", "l2r_lab/planning/")


@states("The rooms `functional/`, `kernels/`, `moe/` and `stats/` never raise it.")
def _() -> list[str]:
    rooms = [f"{package}/{room}/" for package in ("l2r", "l2r_lab") for room in
             ("functional", "kernels", "moe", "stats")]  # fmt: skip
    return used("InputError", *rooms)


@states(
    "What a user gives is checked without torch: `l2r/analysis/diagnostics/settings.py`, "
    "`l2r/fitting/fit_options.py` and their like import nothing heavy."
)
def _() -> list[str]:
    heavy = {"torch", "transformers", "numpy", "scipy", "plotly"}
    return [
        f"{path} imports {name}"
        for path in ("l2r/analysis/diagnostics/settings.py", "l2r/fitting/fit_options.py")
        for name in at_the_top(sources()[path].body)
        if name.split(".")[0] in heavy
    ]


@states("routers beyond the paper; the registry finds them by name")
def _() -> list[str]:
    missing = {"attention", "mixture", "perturbed_cosine", "product_keys", "sigmoid", "low_rank"}
    missing -= set(router_names())
    laboratory_s = [name for name in router_names() if "l2r_lab.routers" in
                    config.registered(name).router.__module__]  # fmt: skip
    return sorted(missing) or ([] if laboratory_s else ["no router of the laboratory is found"])


@states("its `Selection`, a class in `l2r/routers/`; a router's `own_selection` gives another")
def _() -> list[str]:
    found = {
        node.name
        for path, tree in sources().items()
        if path.startswith("l2r/routers/")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    return sorted({"Selection", "own_selection"} - found)


@states("Plans stand in `l2r_lab/studies/plans/` and never change.")
def _() -> list[str]:
    plans = [p for p in SRC.rglob("*.yaml") if p.parent.name == "plans"]
    return [str(p) for p in plans if p.parent != SRC / "l2r_lab" / "studies" / "plans"] or (
        [] if plans else ["no plan is there"]
    )


@states("`tests/` mirrors the rooms (`tests/l2r_lab/` the laboratory's)")
def _() -> list[str]:
    beside = {
        "benchmarks",
        "contracts",
        "fixtures",
        "hardening",
        "l2r_lab",
        "paper",
        "scripts",
        "system",
    }
    rooms = {"l2r": ROOT / "tests", "l2r_lab": ROOT / "tests" / "l2r_lab"}
    wrong = []
    for package, tests in rooms.items():
        found = {p.name for p in tests.iterdir() if p.is_dir() and not p.name.startswith("__")}
        there = {p.name for p in (SRC / package).iterdir() if (p / "__init__.py").is_file()}
        wrong += [f"{tests.name}/{name}" for name in found - there - beside]
    return wrong


@pytest.mark.parametrize("sentence", STATEMENTS)
def test_a_sentence_of_the_architecture_page_stands_and_holds(sentence):
    assert " ".join(sentence.split()) in PLAIN, "dev/architecture.md no longer says this"
    wrong = STATEMENTS[sentence]()
    assert not wrong, f"{sentence}\nis contradicted by:\n  " + "\n  ".join(wrong)


def folders(package: str) -> set[str]:
    """Rooms of a package, and the folders in those that the page names by folder."""
    return {
        f"{p.parent.relative_to(SRC)}/"
        for p in (SRC / package).rglob("__init__.py")
        if p.parent != SRC / package
    }


@pytest.mark.parametrize("package", ["l2r", "l2r_lab"])
def test_every_room_has_a_row_and_every_row_a_room(package):
    """A folder inside a room needs no row; a room whose folders all have rows needs none."""
    rows = set(re.findall(rf"^\| `({package}/[\w/]+/)`", PAGE, re.M))
    there = folders(package)
    assert sorted(rows - there) == [], "rows without a room"
    rooms = {name for name in there if name.count("/") == 2}
    assert sorted(r for r in rooms if not any(row.startswith(r) for row in rows)) == []


def test_a_room_is_begun_at_files_that_it_has():
    rows = re.findall(r"^\| `(l2r(?:_lab)?/[\w/]+/)` \| .* \| (`.+`) \|$", PAGE, re.M)
    assert len(rows) > 20
    wrong = [
        f"{room}{name}"
        for room, names in rows
        for name in re.findall(r"`([^`]+)`", names)
        if not (SRC / room / name).is_file()
    ]
    assert not wrong, "\n".join(wrong)


def test_names_behind_files_are_there():
    """``l2r/imports.py:lazy_names`` on the pages for maintainers."""
    pages = PAGE + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(?:src/)?(l2r[\w/]*\.py):(\w+)`", pages))
    assert len(named) >= 2
    assert sorted(f"{p}:{n}" for p, n in named if n not in top_names(sources()[p])) == []


def docstrings() -> Iterator[tuple[str, str]]:
    for path, tree in sources().items():
        if path.endswith("__init__.py") and (text := ast.get_docstring(tree)):
            yield package_of(path), text


def test_docstrings_of_packages_name_files_and_rooms_that_are_there():
    """``Begin at loop.py``, ``Imports hf/ and below``: in the package, beside it or in l2r."""
    wrong = []
    for package, text in docstrings():
        here = SRC / Path(*package.split("."))
        said = re.findall(r"(?:Begin at|Imports) .+?(?:\.\s|\.$)", text + "\n", re.S)
        for name in re.findall(r"[\w/]+(?:\.py\b|/(?= |,|\)|\.|$))", " ".join(said)):
            places = (here / name, here.parent / name, SRC / "l2r" / name)
            if not any(place.exists() for place in places):
                wrong.append(f"{package}: {name}")
    assert not wrong, "\n".join(wrong)


def test_docstrings_of_packages_say_what_they_import():
    """``Imports hf/ and below``: hf/ and what hf/ imports, directly or through others."""
    from scripts.pages.map import imports, reachable

    below, wrong = imports(), []
    for package, text in docstrings():
        found = re.search(r"Imports ([\w/ ,]+?/) (and below|only)", " ".join(text.split()))
        own = "lab." if package.startswith("l2r_lab.") else ""
        room = own + package.partition(".")[2]
        if room not in below or found is None:
            continue
        named = {f"{own}{name.strip('/')}" for name in re.findall(r"\w+/", found[1])}
        allowed = named | {r for name in named & set(below) for r in reachable(below, name)}
        wrong += [
            f"{package} imports {other}, which its docstring leaves out"
            for other in sorted(below[room] - allowed)
            if other.startswith("lab.") or not own or found[2] == "only"
        ]
        wrong += [f"{package} names {n}, which is no room" for n in sorted(named - set(below))]
    assert not wrong, "\n".join(wrong)


def test_a_false_sentence_is_seen():
    assert importers("torch") and used("InputError", "l2r/errors.py", "l2r/files/")
    assert torch_below("l2r.routers")
    tree = ast.parse("import a.b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d")
    assert set(at_the_top(tree.body)) == {"a.b", "d"}
    assert all(inspect.isfunction(check) for check in STATEMENTS.values()) and len(STATEMENTS) > 12
