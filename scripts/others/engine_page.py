"""Install and run what docs/engines.md says of one engine, as it is written there.

    python scripts/others/engine_page.py olmo-core

The page has a section an engine. Its marked blocks are run in order: those in bash make and fill
a fresh environment under .engines, those in Python run in it as one program, in an empty folder.
Writes page.json into the environment: how many snippets ran, and by how much the logits of the
exported checkpoint differ. Exit code 1 if the environment cannot be made. Needs Python alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
BLOCK = re.compile(r"^<!-- not run: make engines -->\n```(bash|python)\n(.*?)^```", re.M | re.S)
FOLDER = re.compile(r"\.engines/([\w.-]+)")
# Two layers add up the same numbers in another order: single sums agree to 1e-6 of the largest
# (tests/engines/engines.py), and here sums enter others.
LIMIT = 1e-5


@dataclass(frozen=True)
class Steps:
    """Name of an environment, the commands that make it, and the snippets to run in it."""

    name: str
    install: str
    snippets: tuple[str, ...]


def environments(page: str) -> dict[str, Steps]:
    """Environments of a page by name; all those of a section run the snippets of the section."""
    found = {}
    for section in re.split(r"^##+ ", page, flags=re.M):
        blocks = BLOCK.findall(section)
        snippets = tuple(text for language, text in blocks if language == "python")
        for language, install in blocks:
            if language == "bash":
                (name,) = set(FOLDER.findall(install))
                found[name] = Steps(name, install, snippets)
    return found


def run_page(steps: Steps, root: Path) -> dict[str, str]:
    """Make the environment afresh under ``root`` and run its snippets; what became of them.

    Raises CalledProcessError if the environment cannot be made.
    """
    folder = root / ".engines" / steps.name
    shutil.rmtree(folder, ignore_errors=True)
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    install = ["bash", "-euo", "pipefail", "-c", steps.install]
    subprocess.run(install, cwd=root, env=environment, check=True)
    total = len(steps.snippets)
    lines = [f"{code}\nprint('snippet', {n}, 'ran')\n" for n, code in enumerate(steps.snippets, 1)]
    with tempfile.TemporaryDirectory() as empty:
        program = Path(empty) / "snippets.py"
        program.write_text("\n".join(lines), encoding="utf-8")
        done = subprocess.run(
            [str((folder / "bin" / "python").absolute()), str(program)],
            cwd=empty,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    ran = len(re.findall(r"^snippet \d+ ran$", done.stdout, re.M))
    differ = re.findall(r"^logits differ by (\S+) of the largest$", done.stdout, re.M)
    problem = ""
    if done.returncode:
        problem = (done.stderr.strip() or "no message").splitlines()[-1]
    elif not differ or not float(differ[-1]) <= LIMIT:
        problem = (
            f"logits after export must be within {LIMIT:.1e} of the largest; "
            f"got {differ[-1] if differ else 'no line that says it'}"
        )
    logits = differ[-1] if differ else ""
    return {"snippets": f"{ran} of {total}", "logits": logits, "problem": problem}


def main() -> None:
    """Run the page for the environments named, and say what came out."""
    known = environments(PAGE.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        if name not in known:
            sys.exit(f"error: the environment must be one of {', '.join(known)}; got {name}")
        result = run_page(known[name], ROOT)
        text = json.dumps(result, indent=1) + "\n"
        (ROOT / ".engines" / name / "page.json").write_text(text, encoding="utf-8")
        print(name, result)


if __name__ == "__main__":
    main()
