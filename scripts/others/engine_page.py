"""Install and run what docs/engines.md says of one engine, as it is written there.

    python scripts/others/engine_page.py olmo-core

The page has a section an engine. Its marked blocks are run in order, in an empty folder: the one in
bash that names a folder under .engines makes and fills a fresh environment there; blocks in Python
are one program, but for those whose first line is ``# NAME.py``, which are saved under that name;
other blocks in bash run with the environment's programs, and every line is printed as it comes.
Writes page.json into the environment: how many snippets ran, by how much the logits of exported
checkpoints differ, minutes and size; or why there is no environment. Needs Python alone.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
BLOCK = re.compile(r"^<!-- not run: make engines -->\n```(bash|python)\n(.*?)^```", re.M | re.S)
FOLDER = re.compile(r"\.engines/([\w.-]+)")
FILE = re.compile(r"# ([\w-]+\.py)\n")
DIFFER = re.compile(r"^logits differ by (\S+) of the largest$", re.M)
# Two layers add up the same numbers in another order: single sums agree to 1e-6 of the largest
# (tests/engines/engines.py), and here sums enter others.
LIMIT = 1e-5


@dataclass(frozen=True)
class Steps:
    """An environment's name, the commands that make it, and what runs in it.

    snippets: one program in Python. files: to be saved, by name. commands: in bash, after it.
    """

    name: str
    install: str
    snippets: tuple[str, ...]
    files: Mapping[str, str]
    commands: tuple[str, ...]


def environments(page: str) -> dict[str, Steps]:
    """Environments of a page by name; all those of a section run what the section says."""
    found = {}
    for section in re.split(r"^##+ ", page, flags=re.M):
        blocks = BLOCK.findall(section)
        python = [text for language, text in blocks if language == "python"]
        bash = [text for language, text in blocks if language == "bash"]
        files = {name[1]: text for text in python if (name := FILE.match(text))}
        snippets = tuple(text for text in python if not FILE.match(text))
        commands = tuple(text for text in bash if not FOLDER.search(text))
        for install in bash:
            if FOLDER.search(install):
                (name,) = set(FOLDER.findall(install))
                found[name] = Steps(name, install, snippets, files, commands)
    return found


def printed(command: list[str], folder: Path, surroundings: Mapping[str, str]) -> tuple[int, str]:
    """Exit code and output of a command, both streams; every line is printed as it comes."""
    lines = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=surroundings,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines)


def missing(install: str, root: Path, surroundings: Mapping[str, str]) -> str:
    """The interpreter that the commands start with, where it does not run; else nothing."""
    program, *_ = install.split(maxsplit=1)
    if not Path(program).name.startswith("python"):
        return ""
    tried = subprocess.run(
        ["bash", "-c", f"{program} -c ''"],
        cwd=root,
        env=surroundings,
        capture_output=True,
        check=False,
    )
    return program if tried.returncode else ""


def run_page(steps: Steps, root: Path) -> dict[str, str]:
    """Make the environment afresh under ``root`` and run what the page says; what became of it.

    ``absent`` says why there is no environment: its interpreter does not run, or an install failed.
    """
    folder = root / ".engines" / steps.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    surroundings = {name: value for name, value in os.environ.items() if name not in ours}
    total = len(steps.snippets) + len(steps.commands)
    result = dict.fromkeys(("logits", "problem", "absent", "minutes", "size"), "")
    result["snippets"] = f"0 of {total}"
    program = missing(steps.install, root, surroundings)
    if program:
        return result | {"absent": f"no {program} that runs"}
    start = time.monotonic()
    code, said = printed(["bash", "-euo", "pipefail", "-c", steps.install], root, surroundings)
    if code:
        return result | {"absent": "the install failed", "problem": _last(said)}
    installed = time.monotonic()
    path = f"{(folder / 'bin').absolute()}{os.pathsep}{surroundings.get('PATH', '')}"
    surroundings |= {"HF_HUB_OFFLINE": "1", "PATH": path}
    lines = [f"{code}\nprint('snippet', {n}, 'ran')\n" for n, code in enumerate(steps.snippets, 1)]
    with tempfile.TemporaryDirectory() as empty:
        for name, text in ({"snippets.py": "\n".join(lines)} | dict(steps.files)).items():
            Path(empty, name).write_text(text, encoding="utf-8")
        said, ran, problem = "", 0, ""
        if steps.snippets:
            code, said = printed(["python", "snippets.py"], Path(empty), surroundings)
            ran = len(re.findall(r"^snippet \d+ ran$", said, re.M))
            problem = _last(said) if code else ""
        for command in steps.commands if not problem else ():
            print(command, end="", flush=True)
            code, more = printed(
                ["bash", "-euo", "pipefail", "-c", command], Path(empty), surroundings
            )
            said += more
            if code:
                problem = _last(more)
                break
            ran += 1
    differ = DIFFER.findall(said)
    if not problem and (not differ or not all(float(each) <= LIMIT for each in differ)):
        problem = (
            f"logits after export must be within {LIMIT:.1e} of the largest; "
            f"got {', '.join(differ) if differ else 'no line that says it'}"
        )
    ended = time.monotonic()
    return result | {
        "snippets": f"{ran} of {total}",
        "logits": max(differ, key=float, default=""),
        "problem": problem,
        "minutes": f"{(installed - start) / 60:.0f} + {(ended - installed) / 60:.0f}",
        "size": f"{_bytes(folder) / 1e9:.1f} GB",
    }


def _last(said: str) -> str:
    return (said.strip() or "no message").splitlines()[-1]


def _bytes(folder: Path) -> int:
    files = (path.lstat() for path in folder.rglob("*") if not path.is_dir())
    return sum(file.st_size for file in files)


def main() -> None:
    """Run the page for the environments named, and say what came out."""
    known = environments(PAGE.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        if name not in known:
            sys.exit(f"error: the environment must be one of {', '.join(known)}; got {name}")
        result = run_page(known[name], ROOT)
        if result["absent"]:
            print(f"{name}: {result['absent']}: {result['problem'] or known[name].install.strip()}")
        text = json.dumps(result, indent=1) + "\n"
        (ROOT / ".engines" / name / "page.json").write_text(text, encoding="utf-8")
        print(name, result)


if __name__ == "__main__":
    main()
