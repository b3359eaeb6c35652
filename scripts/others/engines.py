"""Write the table of docs/engines.md from its snippets and from tests of engines (make engines)."""

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path

from l2r.engines.engine import ENGINES
from l2r.files.atomic import write_text
from l2r.report.tables import Table
from l2r.versions import TRIED
from scripts.others.engine_page import environments

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
SNIPPETS = ("snippets", "logits after export", "minutes", "size")
COLUMNS = (
    "train step", "aux losses equal", "FSDP", "TP", "EP", "routes", "checkpoint to HF"
)  # fmt: skip
NONE = {("torchtitan", "aux losses equal"): "has none"}


def outcomes(results: Path) -> tuple[str, dict[str, str], list[str]]:
    """The engine's version, yes or no for every column a test stands for, and what failed."""
    version, found, failed = "", dict[str, str](), list[str]()
    if not results.is_file():
        return version, found, failed
    for case in ET.parse(results).iter("testcase"):
        properties = [(p.get("name"), p.get("value", "")) for p in case.iter("property")]
        if case.find("skipped") is not None:
            continue
        passed = case.find("failure") is None and case.find("error") is None
        if not passed:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        for name, value in properties:
            if name == "version":
                version = value
            if name == "engine":
                column = value.partition(":")[2]
                assert column in COLUMNS, column
                found[column] = "yes" if passed and found.get(column) != "no" else "no"
    return version, found, failed


def page(environment: Path) -> tuple[tuple[str, ...], list[str]]:
    """What the page's snippets gave in an environment (engine_page.py), and what is wrong."""
    file = environment / "page.json"
    if not file.is_file():
        return ("not run",) * len(SNIPPETS), []
    result = json.loads(file.read_text(encoding="utf-8"))
    absent, problem = result["absent"], result["problem"]
    wrong = [f"snippets of {environment.name}: {problem}"] if problem else []
    if absent:
        return (absent, *("none",) * (len(SNIPPETS) - 1)), wrong
    names = ("snippets", "logits", "minutes", "size")
    return tuple(result[name] or "none" for name in names), wrong


def read(folder: Path, known: Iterable[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """A row for every environment that the page makes, also one that is not there; what failed."""
    rows, failures = list[tuple[str, ...]](), list[str]()
    for name in known:
        # A folder named extra-version is another version of the same engine.
        extra, number = re.fullmatch(r"(.*?)(?:-(\d[\d.]*))?", name).groups()  # type: ignore[union-attr]
        package = next(each for each in ENGINES if TRIED[each].extra == extra)
        environment = folder / name
        snippets, wrong = page(environment)
        version, found, failed = outcomes(environment / "results.xml")
        failures += wrong + failed
        cells = [found.get(c) or NONE.get((extra, c), "not run") for c in COLUMNS]
        rows.append((f"{package} {version or number or ''}".strip(), *snippets, *cells))
    return rows, failures


def main() -> None:
    """Table of the results in the folders of the environments; exit code 1 for what failed."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".engines"
    rows, failures = read(folder, environments(PAGE.read_text(encoding="utf-8")))
    failures += outcomes(folder / "deepspeed" / "results.xml")[2]  # no engine of ours: coefficients
    table = Table("Engines", ("engine", *SNIPPETS, *COLUMNS), tuple(rows)).to_markdown()
    old = PAGE.read_text(encoding="utf-8")
    head, rest = old.split(MARKS[0])
    new = head + MARKS[0] + "\n" + table + "\n" + MARKS[1] + rest.split(MARKS[1])[1]
    if new != old:  # make builds anew what is older than the page
        write_text(PAGE, new)
    print(table)
    if failures:
        sys.exit("failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
