"""Run other projects' own code against ours.

    python -m scripts.others.peers --markdown dev/peers.md

Transformers' tests come out of the source distribution of the installed version. Everything is
downloaded into a cache folder and used there; nothing of it is copied into this project. Exits
with 1 if a test that the stock model passes does not pass, or if a check against an engine fails.
"""

import argparse
import os
import sys
from pathlib import Path

import transformers

from scripts.others.peers.cases import SUBJECTS, excluded
from scripts.others.peers.download import (
    ENGINES,
    engine_packages,
    tools_of_tests,
    transformers_tests,
)
from scripts.others.peers.results import Outcome, faults, markdown, read_report, run_class

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.others.peers", description=__doc__)
    parser.add_argument("--markdown", type=Path, help="write the tables here too")
    parser.add_argument("--only", help="run the test classes whose name contains this alone")
    parser.add_argument(
        "--resume", action="store_true", help="take the reports that an ended run has left"
    )
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument(
        "--cache", type=Path, default=home / "l2r-peers", help="(default %(default)s)"
    )
    options = parser.parse_args()
    cache: Path = options.cache.expanduser().resolve()
    cache.mkdir(parents=True, exist_ok=True)

    names = [name for name in SUBJECTS if (options.only or "") in name]
    source = transformers_tests(cache, HERE / "absent")
    path = [source, tools_of_tests(cache)]
    suites = {}
    for name in names:
        report = cache / f"{name}.xml"
        if options.resume and report.is_file():
            suites[name] = read_report(report)
            continue
        suites[name] = run_class(HERE / "hf_suites.py", name, report=report, path=path, cwd=source)
    engines: dict[str, Outcome | str] = {}
    for name, engine in ENGINES.items() if not options.only else ():
        folder = engine_packages(cache, engine)
        if isinstance(folder, str):
            engines[engine.title] = f"not run: {folder}"
            continue
        report = cache / f"{name}.xml"
        engines[engine.title] = run_class(
            HERE / "engine_checks.py", name, report=report, path=[folder], cwd=cache
        )
    text = markdown(suites, SUBJECTS, engines, transformers.__version__, excluded)
    sys.stdout.write(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    behind = any(
        stock in suites and faults(outcome, suites[stock], excluded(name))
        for name, outcome in suites.items()
        if (stock := SUBJECTS[name])
    )
    broken = any(isinstance(outcome, Outcome) and outcome.failed for outcome in engines.values())
    return int(behind or broken)


if __name__ == "__main__":
    raise SystemExit(main())
