"""Write the table of docs/engines.md from what the tests of every engine said (make engines)."""

import sys
import xml.etree.ElementTree as ET
from pathlib import Path

from l2r.integrations.engine import ENGINES
from l2r.report.tables import Table
from l2r.runs.atomic import write_text

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engines.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
COLUMNS = ("train step", "aux losses equal", "FSDP", "TP", "EP", "checkpoint to HF", "served")
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


def read(folder: Path) -> tuple[list[tuple[str, ...]], list[str]]:
    """A row for every environment in the folder, and the tests that failed in any."""
    rows, failures = list[tuple[str, ...]](), list[str]()
    for package, (extra, _) in ENGINES.items():
        # A folder named extra-version is another version of the same engine.
        for results in (folder / extra, *sorted(folder.glob(f"{extra}-[0-9]*"))):
            version, found, failed = outcomes(results / "results.xml")
            failures += failed
            cells = [found.get(c) or NONE.get((extra, c), "not run") for c in COLUMNS]
            rows.append((f"{package} {version}".strip(), *cells))
    return rows, failures


def main() -> None:
    """Table of the results in the folders of the environments; exit code 1 for a failed test."""
    rows, failures = read(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / ".engines")
    table = Table("Engines", ("engine", *COLUMNS), tuple(rows)).to_markdown()
    head, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    write_text(PAGE, head + MARKS[0] + "\n" + table + "\n" + MARKS[1] + rest.split(MARKS[1])[1])
    print(table)
    if failures:
        sys.exit("failed:\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
