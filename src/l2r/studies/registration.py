"""Registration: where the text of a plan stands, and whether it was there before the runs.

One of ``plans/`` is registered when git has it as it stands (or it came with an installed package)
and its results were made with the same text. A file of one's own is known by the digest of its
text; git is not asked about it, because git runs programs that the configuration of a folder names.
"""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from l2r._version import __version__
from l2r.errors import InputError
from l2r.runs.reading import read_bytes, read_yaml
from l2r.runs.spelling import nearest
from l2r.studies.study_plan import Plan, validated_plan

_FOLDER = Path(__file__).parent / "plans"
_CHECKOUT = _FOLDER.parents[3]  # of this package, where it is one: src/l2r/studies/plans


@dataclass(frozen=True)
class Registered:
    """A plan, its name, and where its text stands.

    digest: of the text. commit: that last changed a plan of the package, or the package's version;
    None for a file of one's own and for one that was changed since. state: that in words.
    """

    plan: Plan
    name: str
    digest: str
    commit: str | None
    state: str

    def mark(self) -> dict[str, Any]:
        """Fields that a result keeps."""
        return {"name": self.name, "digest": self.digest, "commit": self.commit}


def plan_names() -> list[str]:
    """Plans of the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_plan(name: str) -> Registered:
    """A plan by its packaged name or its path. Raises ValueError, in one line, for a bad one."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if not path.is_file():
        hint = f"{nearest(name, plan_names())}; known: {', '.join(plan_names())}, or a YAML path"
        raise InputError(f"unknown plan {name!r}{hint}")
    text, values = read_bytes(path), read_yaml(path)
    plan = validated_plan(name, values)
    digest = hashlib.sha256(text).hexdigest()[:16]
    if path.resolve().parent == _FOLDER.resolve():
        return Registered(plan, path.stem, digest, *_registration(path.name))
    state = f"not registered: no plan of the package; the digest of its text is {digest}"
    return Registered(plan, path.stem, digest, None, state)


def _registration(name: str) -> tuple[str | None, str]:
    """Commit or version of a file in ``plans/``, and the state in words.

    An installed package may lie in anybody's repository, whose configuration is not ours: git is
    asked in the package's own checkout alone, and what it does not confirm is not registered.
    """
    if not (_CHECKOUT / ".git").exists():
        return f"l2r-moe {__version__}", f"registered in l2r-moe {__version__}"
    wanted = ("--follow", "--diff-filter=AM", "--format=%H %cs")  # a move changes no plan
    known = _git("log", "-1", "--ignore-missing", *wanted, "HEAD", "--", name)  # no commit yet
    changed = _git("status", "--porcelain", "--", name)
    if known is None or changed is None:
        return None, "not registered: git gave no answer"
    if not known:
        return None, "not registered: no git commit has the file"
    commit, _, date = known.partition(" ")
    if changed:
        return None, f"not registered: the file was changed after commit {commit} of {date}"
    return commit, f"registered in commit {commit} of {date}"


def source_tree() -> dict[str, Any]:
    """Git's tree of ``src/`` in the commit that is checked out, and whether files there differ.

    A tree is named by what it holds, so that it stays findable where a commit was rewritten. Both
    are None where the package is installed, and where git gives no answer.
    """
    here = (_CHECKOUT / ".git").exists()
    tree = _git("rev-parse", "--verify", "HEAD:src") if here else None
    changed = _git("status", "--porcelain", "--", ":/src") if tree else None
    return {"tree": tree, "changed": None if changed is None else bool(changed)}


def _git(*args: str) -> str | None:
    """Output of a git command in the folder of plans; None where git is missing or refuses."""
    command = ["git", "-C", str(_FOLDER), "-c", "core.fsmonitor=false", *args]
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if process.returncode else process.stdout.strip()
