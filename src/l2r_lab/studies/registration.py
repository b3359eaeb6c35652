"""Registration: where the text of a plan stands, and whether it was there before the runs.

One of ``plans/`` is registered when a commit holds just its text (or it came with an installed
package) and its results were made with the same text. A file of one's own is known by the digest
of its text; git is not asked about it, because git runs programs that the configuration of a folder
names.
"""

import hashlib
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from l2r._version import __version__
from l2r.errors import InputError
from l2r.files.reading import read_bytes, read_yaml
from l2r.files.wording import nearest
from l2r_lab.studies.earlier_plans import CLOSED, EARLIER
from l2r_lab.studies.study_plan import StudyPlan, validated_plan

_FOLDER = Path(__file__).parent / "plans"
_CHECKOUT = _FOLDER.parents[3]  # of this package, where it is one: src/l2r/studies/plans
# Reasons why the commit that a result names does not show that its plan was there before it.
LOST = "is not in this repository"
WITHOUT_PLAN = "does not hold the plan"


@dataclass(frozen=True)
class RegisteredPlan:
    """A plan, its name, and where its text stands.

    digest: of the text. commit: first that holds the text of a plan of the package, or the
    package's version; None for a file of one's own and for a text that no commit holds. state:
    that in words. text: of the file.
    """

    plan: StudyPlan
    name: str
    digest: str
    commit: str | None
    state: str
    text: bytes = field(default=b"", repr=False)

    @property
    def closed(self) -> bool:
        """Tell whether the plan is run no more, as its number of seeds was not fixed."""
        return self.digest in CLOSED

    def mark(self) -> dict[str, Any]:
        """Fields that a result keeps."""
        return {"name": self.name, "digest": self.digest, "commit": self.commit}


def plan_names() -> list[str]:
    """Plans of the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def read_plan(name: str) -> RegisteredPlan:
    """Read a plan by its packaged name or its path. Raises ValueError for a bad one."""
    path, text, digest, plan = _parsed(name)
    if path.resolve().parent == _FOLDER.resolve():
        return RegisteredPlan(plan, path.stem, digest, *_registration(path.name, text), text)
    state = f"not registered: no plan of the package; the digest of its text is {digest}"
    return RegisteredPlan(plan, path.stem, digest, None, state, text)


def parse_plan(name: str) -> StudyPlan:
    """Read a plan as ``read_plan`` does, without asking git for the commit of its text."""
    return _parsed(name)[-1]


def _parsed(name: str) -> tuple[Path, bytes, str, StudyPlan]:
    """File, text and its digest, and the plan."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
    if not path.is_file():
        hint = f"{nearest(name, plan_names())}; known: {', '.join(plan_names())}, or a YAML path"
        raise InputError(f"unknown plan {name!r}{hint}")
    text, values = read_bytes(path), read_yaml(path)
    digest = hashlib.sha256(text).hexdigest()[:16]
    return path, text, digest, validated_plan(name, values, earlier=digest in EARLIER)


def _registration(name: str, text: bytes) -> tuple[str | None, str]:
    """Commit or version of a text that lies in ``plans/`` as ``name``, and the state in words.

    The commit is the first that holds just this text, under whatever path: a plan keeps it when
    its file is moved, and a text that was changed has none before it is committed itself.
    An installed package may lie in anybody's repository, whose configuration is not ours: git is
    asked in the package's own checkout alone, and what it does not confirm is not registered.
    """
    if not in_checkout():
        return f"l2r-moe {__version__}", f"registered in l2r-moe {__version__}"
    if _is_shallow():
        return (
            None,
            "not registered: the clone is shallow; git fetch --unshallow brings its history",
        )
    blob = _blob(text)
    wanted = ("--full-history", "--reverse", "--format=%H %cs", "--ignore-missing")
    commits = None if blob is None else _git("log", *wanted, f"--find-object={blob}", "HEAD")
    if commits is None:
        return None, "not registered: git gave no answer"
    if commits:
        commit, _, date = commits.splitlines()[0].partition(" ")
        return commit, f"registered in commit {commit} of {date}"
    last = _git("log", "-1", "--ignore-missing", "--format=%H of %cs", "HEAD", "--", name)
    if last:
        return None, f"not registered: the text was changed after commit {last}"
    return None, "not registered: no git commit has this text"


def in_checkout() -> bool:
    """Tell whether the package lies in its own git checkout, so that git knows its plans."""
    return (_CHECKOUT / ".git").exists()


def doubtful_commits(plan: RegisteredPlan, commits: Iterable[str]) -> dict[str, str]:
    """Those of the commits, named by results, that do not show the plan's text, with the reason.

    A commit must be in the history of what is checked out, and hold the text under some path.
    Empty where git cannot be asked, and for versions of an installed package.
    """
    blob = _blob(plan.text) if in_checkout() and not _is_shallow() else None
    found = dict[str, str]()
    for commit in dict.fromkeys(commits):
        if blob is None or not re.fullmatch("[0-9a-f]{40,64}", commit):
            continue
        if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
            found[commit] = LOST
        elif blob not in (_git("ls-tree", "-r", "--full-tree", commit) or ""):
            found[commit] = WITHOUT_PLAN
    return found


def _is_shallow() -> bool:
    """Tell whether the clone lacks a part of its history."""
    return _git("rev-parse", "--is-shallow-repository") == "true"


def _blob(text: bytes) -> str | None:
    """Name that git gives the text."""
    return _git("hash-object", "--stdin", text=text)


def source_tree() -> dict[str, Any]:
    """Git's tree of ``src/`` in the commit that is checked out, and whether files there differ.

    A tree is named by what it holds, so that it stays findable where a commit was rewritten. Both
    are None where the package is installed, and where git gives no answer.
    """
    tree = _git("rev-parse", "--verify", "HEAD:src") if in_checkout() else None
    changed = _git("status", "--porcelain", "--", ":/src") if tree else None
    return {"tree": tree, "changed": None if changed is None else bool(changed)}


def _git(*args: str, text: bytes | None = None) -> str | None:
    """Output of a git command in the folder of plans; None where git is missing or refuses."""
    command = ["git", "-C", str(_FOLDER), "-c", "core.fsmonitor=false", *args]
    try:
        process = subprocess.run(command, capture_output=True, input=text, check=False)
    except OSError:
        return None
    return None if process.returncode else process.stdout.decode(errors="replace").strip()
