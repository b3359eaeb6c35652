"""One public class, one name: in both packages, but where an engine dictates the name."""

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
# Name -> the engine that looks for it by that name.
DICTATED: dict[str, str] = {}
# Names that rooms of the library share until those rooms are merged; none may be added.
SHARED = {
    "Agreement", "Answer", "Call", "Calls", "Choices", "Inputs", "Reading", "Recorder", "Replay",
    "Subject", "Tensors", "Verdict",
}  # fmt: skip


def public_classes() -> dict[str, list[Path]]:
    """Files of src by the public class that they define."""
    found = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(SRC))
    return found


def test_public_classes_have_names_of_their_own():
    found = public_classes()
    assert len(found) > 300  # of both packages
    shared = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert {n: p for n, p in shared.items() if n not in DICTATED.keys() | SHARED} == {}
    laboratory = {n: p for n, p in shared.items() if any(q.parts[0] == "l2r_lab" for q in p)}
    assert laboratory == {}
    assert DICTATED.keys() <= shared.keys()  # no exception that nothing needs
