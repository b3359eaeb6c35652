"""Self-contained HTML pages: titled sections of tables and figures, or drawn by our own script.

Every page has a content security policy: the scripts that we wrote run, and no other. Text of a
stranger is escaped wherever it stands. Should one place be missed, the browser still runs nothing
of it, and loads nothing from anywhere.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from l2r.files.atomic import plain_json, write_text
from l2r.report.tables import Table, prose
from l2r.report.verdicts import Verdict

_SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)
_REST = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


@dataclass(frozen=True)
class Link:
    """A way to another page; ``href`` is relative, so that both can move together."""

    href: str
    text: str


@dataclass(frozen=True)
class Key:
    """Key of colors: (color, meaning, shape); shapes are box, line, line dashed, line dotted."""

    entries: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Section:
    """Part of a page. ``parts`` holds links, keys, tables and plotly figures, shown in order."""

    title: str
    text: str = ""
    parts: Sequence[Any] = field(default_factory=tuple)


def write_page(
    path: Path,
    *,
    title: str,
    summary: str,
    sections: Sequence[Section],
    verdict: Verdict | None = None,
    reload: float | None = None,
) -> Path:
    """Write the page, the verdict first; plotly's script is inlined once: no network is needed.

    Written under a temporary name and renamed, so a reader never sees half a page. ``reload``:
    seconds after which a browser loads it again.
    """
    again = "" if reload is None else f"<meta http-equiv='refresh' content='{reload:g}'>"
    links = "".join(
        f"<a href='#section-{number}'>{html.escape(section.title)}</a>"
        for number, section in enumerate(sections)
    )
    links = f"<nav>{links}</nav>" if len(sections) > 1 else ""
    view = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    body, scripts = section_html(sections)
    text = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>{policy(scripts)}{view}{again}"
        f"<title>{html.escape(title)}</title><style>{style('theme')}{style('page')}</style></head>"
        f"<body><h1>{html.escape(title)}</h1>{_head(verdict)}<p>{prose(summary)}</p>{links}"
        f"{body}</body></html>"
    )
    write_text(path, text)
    return path


def style(name: str) -> str:
    """Read a style sheet of this package."""
    return files("l2r.report").joinpath(f"{name}.css").read_text(encoding="utf-8")


def _head(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    cannot = f"<b>What this cannot say.</b> {prose(verdict.cannot)}" if verdict.cannot else ""
    return f"<p class='verdict'>{prose(verdict.says)}</p><p class='cannot'>{cannot}</p>"


def section_html(sections: Sequence[Section]) -> tuple[str, list[str]]:
    """Render sections and their scripts; the first figure brings plotly's script."""
    body, script, scripts = "", True, list[str]()
    for number, section in enumerate(sections):
        body += f"<h2 id='section-{number}'>{html.escape(section.title)}</h2>"
        body += f"<p>{prose(section.text)}</p>" if section.text else ""
        for part in section.parts:
            if isinstance(part, Link):
                href, shown = html.escape(quote(part.href)), html.escape(part.text)
                body += f"<p><a class='page' href='{href}'>{shown}</a></p>"
            elif isinstance(part, Table):
                body += f"<h3>{html.escape(part.title)}</h3>" if part.title else ""
                body += f"<div class='scroll'>{part.to_html()}</div>"
            elif isinstance(part, Key):
                body += _key(part)
            else:
                figure = part.to_html(full_html=False, include_plotlyjs=script)
                wide = part.layout.meta or 0  # pixels that it needs; a narrow page scrolls it
                body += f"<div class='scroll'><div style='min-width:{wide}px'>{figure}</div></div>"
                scripts += scripts_of(figure)
                script = False
    return body, scripts


def _key(key: Key) -> str:
    items = ""
    for color, meaning, shape in key.entries:
        kind = "" if shape == "box" else f" class='{shape}'"
        paint = "background" if shape == "box" else "border-color"
        items += f"<li><i{kind} style='{paint}:{color}'></i>{html.escape(meaning)}</li>"
    return f"<ul class='key'>{items}</ul>"


def write_script_page(
    path: Path,
    name: str,
    *,
    title: str,
    data: dict[str, Any],
    libraries: Sequence[str] = (),
    figures: str = "",
    drawing: Sequence[str] = (),
    package: str = "l2r.report",
) -> Path:
    """Write the page; ``libraries`` are scripts before its own.

    ``figures`` is HTML below it, ``drawing`` its scripts. ``package`` holds the files of the page,
    ``name`` with .html, .css and .js, and the libraries.
    """
    shared, own = files("l2r.report"), files(package)

    def read(file: str) -> str:
        of_page = file.partition(".")[0] in (name, *libraries)
        return ((own if of_page else shared) / file).read_text(encoding="utf-8")

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


def scripts_of(html: str) -> list[str]:
    """Texts of the scripts in HTML that we, or plotly, wrote."""
    return _SCRIPT.findall(html)


def policy(scripts: Iterable[str]) -> str:
    """Write the ``<meta>`` of a page with these scripts: exactly the text between their tags."""
    sources = {f"'sha256-{_digest(script)}'": None for script in scripts} or {"'none'": None}
    content = f"script-src {' '.join(sources)}; {_REST}"
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
