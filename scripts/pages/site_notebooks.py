"""A hook of mkdocs: the notebooks stand beside docs/, and the site has them as files too."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks to the site's files."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that leave docs/ for a notebook, as in the repository, stay in the site."""
    up = "../" * page.file.src_uri.count("/")
    return re.sub(r"\]\((?:\.\./)+notebooks/", f"]({up}notebooks/", markdown)
