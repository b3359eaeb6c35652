"""Run docs/re-run-the-paper.md from plan to figures, at toy size, in an empty folder.

    python -m scripts.pages.rehearsal FOLDER

The commands are the page's own code blocks in their order; its block of the rehearsal changes
their settings. Ends with the files of every table and figure in FOLDER/paper, or with the command
that failed. Needs no network, and no program in PATH but bash.
"""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "re-run-the-paper.md"
_BLOCK = re.compile(r"^( *)```bash\n(.*?)^ *```", re.S | re.M)
_ASSIGNED = re.compile(r"^([A-Z][A-Z_0-9]*)=", re.M)
_LANGUAGE, _IMAGES = "Language: OLMoE-1B-7B, 10B tokens", "ImageNet"
_ITEMS, _REHEARSAL = "All tables and figures", "Rehearse it first"
SECTIONS = (_LANGUAGE, _IMAGES, _ITEMS, _REHEARSAL)  # whose blocks are run
_SAME = ("C4", "ROUTERS", "RANKS", "HEADS", "IMAGES")  # settings that a rehearsal does not change
# Two programs of the environment, also where it is not activated; each says its processor time.
_PROGRAMS = "".join(
    f'{name}() {{ echo "+ {name} $*" >&2; "{sys.executable}" -m {module} "$@"; }}\n'
    for name, module in (("l2r", "l2r"), ("torchrun", "torch.distributed.run"))
)


def sections(text: str) -> dict[str, list[str]]:
    """Blocks of bash by heading, without their indentation."""
    parts = re.split(r"^## (.*)\n", text, flags=re.M)
    return {
        title: [
            "".join(line[len(indent) :] for line in code.splitlines(keepends=True))
            for indent, code in _BLOCK.findall(part)
        ]
        for title, part in zip(parts[1::2], parts[2::2], strict=True)
    }


def settings_in(block: str) -> list[str]:
    """Names that a block of assignments sets; none for a block of commands."""
    lines = [line for line in block.splitlines() if line and not line.startswith((" ", "#"))]
    assigned = _ASSIGNED.findall(block)
    return assigned if len(lines) == len(assigned) else []


def script(text: str, programs: str = _PROGRAMS) -> str:
    """All commands of the page with the settings of its rehearsal, for bash.

    With ``programs`` ImageNet's are run beside those of language, on which they do not depend.
    Raises ValueError where the page's settings and the rehearsal's do not have the same names.
    """
    blocks = sections(text)
    toy, changes = blocks[_REHEARSAL]
    full = [
        name for title in SECTIONS[:-1] for block in blocks[title] for name in settings_in(block)
    ]
    changed = settings_in(changes)
    if sorted(full) != sorted({*changed, *_SAME}):
        odd = sorted({*full} ^ {*changed, *_SAME})
        raise ValueError(f"only one of page and rehearsal sets {', '.join(odd)}")
    language, images, items = (_with_changes(blocks[title], changes) for title in SECTIONS[:-1])
    if programs:
        images = f"(\n{images}\n) &\nimages=$!\ntrap 'kill $images 2>/dev/null' EXIT"
        items = f"wait $images\ntrap - EXIT\n{items}"
        return "\n".join(["set -eu", programs, toy, images, language, items])
    return "\n".join(["set -eu", toy, language, images, items])


def _with_changes(blocks: list[str], changes: str) -> str:
    """Commands of a section, whose block of settings the rehearsal's follow."""
    return "\n".join(f"{block}\n{changes}" if settings_in(block) else block for block in blocks)


def rehearse(folder: Path, text: str) -> None:
    """Run the page's commands in the folder, which is made. Raises where one fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"folder must be empty; got {folder}")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")  # at toy sizes two threads only wait
    source = str(ROOT / "src")
    environment["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    subprocess.run(["bash", "-c", script(text)], cwd=folder, env=environment, check=True)


def main() -> int:
    """Rehearse, and say how long it took."""
    (folder,) = sys.argv[1:]
    start = time.monotonic()
    try:
        rehearse(Path(folder), PAGE.read_text())
    except (subprocess.CalledProcessError, ValueError) as error:
        what = "a command of the page failed" if not isinstance(error, ValueError) else error
        print(f"error: {what}", file=sys.stderr)
        return 1
    times = os.times()
    used = times.children_user + times.children_system
    took = time.monotonic() - start
    print(f"{folder}/paper: every table and figure; {took:.0f} s, {used:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
