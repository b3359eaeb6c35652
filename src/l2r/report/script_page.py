"""Pages that a script of ours draws: script_page.html, .css and .js, then those of NAME."""

import html
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from l2r.report.policy import policy
from l2r.runs.atomic import write_text
from l2r.runs.plain_json import plain_json


def write_script_page(
    path: Path,
    name: str,
    *,
    title: str,
    data: dict[str, Any],
    libraries: Sequence[str] = (),
    figures: str = "",
    drawing: Sequence[str] = (),
) -> Path:
    """Write the page; ``libraries`` are scripts before its own.

    ``figures`` is HTML below it, ``drawing`` its scripts.
    """
    parts = files("l2r.report")

    def read(file: str) -> str:
        return (parts / file).read_text(encoding="utf-8")

    script = "".join(read(f"{file}.js") for file in ("script_page", *libraries, name))
    fill = {
        # As it stands between the tags of script_page.html.
        "/*POLICY*/": policy([f"\n{script}\n", *drawing]),
        "/*TITLE*/": html.escape(title),
        "/*STYLE*/": "".join(read(f"{file}.css") for file in ("theme", "script_page", name)),
        "/*DATA*/": plain_json(data, indent=None).replace("<", "\\u003c"),
        "/*SCRIPT*/": script,
        "/*FIGURES*/": figures,
    }
    page = read("script_page.html").replace("/*BODY*/", read(f"{name}.html"))
    # In one pass: names and text may hold such a mark.
    write_text(path, re.sub(r"/\*[A-Z]+\*/", lambda mark: fill[mark[0]], page))
    return path
