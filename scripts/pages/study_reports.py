"""Write results/evidence/PLAN/report.md of every study again, from its stored results.

PYTHONPATH=. python -m scripts.pages.study_reports [PLAN ...]
"""

import sys
import tempfile
from pathlib import Path

from l2r_lab.report.evidence import write_study
from scripts.pages.routers_by_experts import STORED, study_in_results


def main() -> None:
    """Write the reports that are named, or all."""
    names = sys.argv[1:] or sorted(path.parent.name for path in STORED.glob("*/results.jsonl"))
    with tempfile.TemporaryDirectory() as pages:
        for name in names:
            _, text = write_study(study_in_results(name), Path(pages), STORED / name)
            print(text.relative_to(STORED.parents[1]))


if __name__ == "__main__":
    main()
