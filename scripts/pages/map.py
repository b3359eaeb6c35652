"""Draw the map of dev/architecture.md, a Mermaid figure, from the imports of both packages.

    python scripts/pages/map.py

A test compares the figure with the imports.
"""

from collections.abc import Mapping
from pathlib import Path

import grimp

PAGE = Path(__file__).resolve().parents[2] / "dev" / "architecture.md"
BEGIN, END = "<!-- map -->\n", "<!-- end of map -->\n"


PACKAGES = ("l2r_lab", "l2r")


def imports() -> dict[str, set[str]]:
    """Rooms, the packages inside both packages, and the rooms that each imports from.

    ``files`` is a room of the library, ``lab.files`` one of the laboratory.
    """
    graph = grimp.build_graph(*PACKAGES, cache_dir=None, exclude_type_checking_imports=True)
    children = {child for package in PACKAGES for child in graph.find_children(package)}
    below: dict[str, set[str]] = {
        _room(room): set() for room in children if graph.find_children(room)
    }
    for module in graph.modules:
        room = _room(module)
        if room in below:
            targets = map(_room, graph.find_modules_directly_imported_by(module))
            below[room] |= {target for target in targets if target in below and target != room}
    return below


def _room(module: str) -> str:
    package, *rest = [*module.split("."), ""]
    return f"lab.{rest[0]}" if package == "l2r_lab" else rest[0]


def reachable(below: Mapping[str, set[str]], start: str) -> set[str]:
    """Rooms that ``start`` imports, directly or through others."""
    seen: set[str] = set()
    waiting = [*below[start]]
    while waiting:
        room = waiting.pop()
        if room not in seen:
            seen.add(room)
            waiting += below[room]
    return seen


def arrows(below: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Direct imports that do not follow from the other arrows (transitive reduction).

    Raises ValueError for a circle of imports, which has no such reduction.
    """
    for room in below:
        if room in reachable(below, room):
            raise ValueError(f"imports must have no circle; {room} imports itself through others")
    return sorted(
        (room, target)
        for room, targets in below.items()
        for target in targets
        if not any(target in reachable(below, other) for other in targets - {target})
    )


def figure(below: Mapping[str, set[str]]) -> str:
    """The map in Mermaid's language, rooms that import most first."""
    order = sorted(below, key=lambda room: (-len(reachable(below, room)), room))
    lines = ["```mermaid", "flowchart TD"]
    for package, is_lab in (("l2r_lab", True), ("l2r", False)):
        inside = [room for room in order if room.startswith("lab.") == is_lab]
        names = [f"        {room}([{room.removeprefix('lab.')}/])" for room in inside]
        lines += [f"    subgraph {package}", *names, "    end"]
    lines += [f"    {room} --> {target}" for room, target in arrows(below)]
    return "\n".join([*lines, "```", ""])


def main() -> None:
    """Replace the figure between the two marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}{figure(imports())}{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
