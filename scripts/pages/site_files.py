"""A hook of mkdocs: files of the site that are not pages of docs/: notebooks and examples."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
EXAMPLES = ROOT / "runs" / "site" / "pages"  # made by site_examples.py
SECTION = """
## Examples

What the commands write, for two small models trained for minutes, as files that need no server:

- [text in the colors of its experts](examples/diagnosis/index-text.html) and the
  [diagnosis](examples/diagnosis/index.html) of two checkpoints: `l2r diagnose`
- [report of a training](examples/report/report.html): `l2r compare`, `l2r report`
- [a registered study](examples/study.html): `l2r evidence decision --judge-only`
- [score explorer](examples/explorer.html): `l2r landscape`
"""


def on_files(files: Any, config: Any) -> Any:
    """Add notebooks and, where they were made, example pages."""
    found = [(path, f"notebooks/{path.name}") for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
    found += [
        (path, f"examples/{path.relative_to(EXAMPLES).as_posix()}")
        for path in sorted(EXAMPLES.rglob("*.html"))
    ]
    for path, uri in found:
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keep links to notebooks inside the site, name results by path, list the examples."""
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\[([^\]]*)\]\((?:\.\./)+(results/[^)#]*)[^)]*\)", r"\1 (`\2`)", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+notebooks/", f"]({up}notebooks/", markdown)
    examples = page.file.src_uri == "index.md" and EXAMPLES.is_dir()
    return markdown + SECTION if examples else markdown
