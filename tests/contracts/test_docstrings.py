"""First words of docstrings, and names of classes: what ruff's D401 cannot see."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
TREES = {
    path.relative_to(SRC).as_posix(): ast.parse(path.read_text()) for path in SRC.rglob("*.py")
}
NOT_FIRST = {"Of", "Which", "What", "Whether", "How", "Where", "Why", "When", "For", "If", "By"}


def wrong_firsts(tree: ast.AST) -> list[str]:
    """First lines that begin with a word which is no verb and no noun."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text.splitlines()[0] for text in texts if text and text.split()[0] in NOT_FIRST]


def alike(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public classes that several files define, with the files."""
    found = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


@pytest.mark.parametrize("room", sorted({path.rpartition("/")[0] for path in TREES}))
def test_docstrings_begin_with_a_verb_or_a_noun(room):
    files = [path for path in TREES if path.rpartition("/")[0] == room]
    wrong = {path: wrong_firsts(TREES[path]) for path in files}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


def test_a_class_name_stands_for_one_class():
    assert alike(TREES) == {}


def test_a_wrong_first_word_and_a_second_class_are_seen():
    one = ast.parse('class Step:\n    """What one step does."""')
    assert wrong_firsts(one) == ["What one step does."]
    assert alike({"a.py": one, "b.py": one}) == {"Step": ["a.py", "b.py"]}
