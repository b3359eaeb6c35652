"""Make an example of every page that the package writes, for the documentation site.

    python scripts/pages/site_examples.py --steps 200 --out runs/site

Trains two routers of the demo (minutes on two cores), diagnoses them, judges the committed study
``decision`` again and draws the score explorer. ``mkdocs build`` then puts the pages into
site/examples/ (see site_files.py). Finished runs are kept: the same command only writes pages.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUDY = "decision"


def l2r(*arguments: object) -> None:
    """Run a command of the package."""
    subprocess.run([sys.executable, "-m", "l2r", *map(str, arguments)], check=True, cwd=ROOT)


def make(work: Path, pages: Path, *changes: str) -> None:
    """Write the pages of an example into ``pages``; runs stay in ``work``.

    ``changes`` are those of the demo recipe, key.sub=value.
    """
    runs, diagnosis = work / "runs", work / "diagnosis"
    l2r("compare", "demo", *changes, "--routers", "linear,l2r_sips", "--out", runs)
    l2r("diagnose", runs / "linear", runs / "l2r_sips", "--out", diagnosis)
    l2r("landscape", "--out", work / "explorer.html")
    l2r("evidence", STUDY, "--judge-only", "--out", work)
    pages.mkdir(parents=True, exist_ok=True)
    # Pages link to the page beside them by its name, so the names stay.
    for folder, names in ((runs, ("report", "report-text")), (diagnosis, ("index", "index-text"))):
        target = pages / folder.name.replace("runs", "report")
        target.mkdir(exist_ok=True)
        for name in names:
            shutil.copy(folder / f"{name}.html", target / f"{name}.html")
    shutil.copy(work / "explorer.html", pages / "explorer.html")
    shutil.copy(work / STUDY / "report.html", pages / "study.html")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps per router")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "site")
    given = parser.parse_args()
    make(given.out, given.out / "pages", f"training.steps={given.steps}")


if __name__ == "__main__":
    main()
