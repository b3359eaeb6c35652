"""Self-contained HTML pages: titled sections of tables and figures, or drawn by our own script.

Every page has a content security policy: the scripts that we wrote run, and no other. Text of a
stranger is escaped wherever it stands. Should one place be missed, the browser still runs nothing
of it, and loads nothing from anywhere.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

from l2r.files.atomic import plain_json, write_text
from l2r.report.palette import ink_on
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
    """Key of colors: (color, meaning, shape); shapes: box, line, and line dotted of chance."""

    entries: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Passages:
    """The same text several times, in columns: title -> tokens as (piece, color, note).

    A piece without a color is plain text. ``caption`` says what the colors mean.
    """

    columns: Mapping[str, Sequence[tuple[str, str, str]]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """Part of a page. ``parts`` holds links, keys, passages, tables and plotly figures, in order.

    ``folded``: closed until a reader opens it, for what does not help to choose.
    """

    title: str
    text: str = ""
    parts: Sequence[Any] = field(default_factory=tuple)
    folded: bool = False


def write_page(
    path: Path,
    *,
    title: str,
    summary: str,
    sections: Sequence[Section],
    verdict: Verdict | None = None,
    lead: Sequence[Any] = (),
    reload: float | None = None,
) -> Path:
    """Write the page: the verdict, the parts ``lead`` that show it, its limits, then sections.

    Plotly's script is inlined once: no network is needed. Written under a temporary name and
    renamed, so a reader never sees half a page. ``reload``: seconds after which a browser loads it
    again.
    """
    again = "" if reload is None else f"<meta http-equiv='refresh' content='{reload:g}'>"
    links = "".join(
        f"<a href='#section-{number}'>{html.escape(section.title)}</a>"
        for number, section in enumerate(sections)
        if not section.folded  # the heads of folded ones stand one below the other
    )
    links = f"<nav>{links}</nav>" if links.count("<a") > 1 else ""
    about = f"<p>{prose(summary)}</p>" if summary else ""
    view = "<meta name='viewport' content='width=device-width, initial-scale=1'>"
    body, scripts = section_html(sections, lead)
    own = files("l2r.report").joinpath("page.js").read_text(encoding="utf-8")
    says, cannot = ("", "") if verdict is None else _head(verdict)
    text = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>{policy([*scripts, own])}"
        f"{view}{again}<title>{html.escape(title)}</title>"
        f"<style>{style('theme')}{style('page')}</style></head>"
        f"<body><header><h1>{html.escape(title)}</h1><button id='theme' type='button'></button>"
        f"</header>{says}{body[0]}{cannot}{about}{links}{body[1]}"
        f"<script>{own}</script></body></html>"
    )
    write_text(path, text)
    return path


def style(name: str) -> str:
    """Read a style sheet of this package."""
    return files("l2r.report").joinpath(f"{name}.css").read_text(encoding="utf-8")


def _head(verdict: Verdict) -> tuple[str, str]:
    cannot = f"<b>What this cannot say.</b> {prose(verdict.cannot)}" if verdict.cannot else ""
    return f"<p class='verdict'>{prose(verdict.says)}</p>", f"<p class='cannot'>{cannot}</p>"


def section_html(
    sections: Sequence[Section], lead: Sequence[Any] = ()
) -> tuple[tuple[str, str], list[str]]:
    """Render the lead, the sections, and their scripts; the first figure brings plotly's script."""
    figures = _Figures()
    first = "".join(figures.part_html(part) for part in lead)
    body = ""
    for number, section in enumerate(sections):
        inside = f"<p>{prose(section.text)}</p>" if section.text else ""
        inside += "".join(figures.part_html(part) for part in section.parts)
        head = f"<h2 id='section-{number}'>{html.escape(section.title)}</h2>"
        if section.folded:
            body += f"<details><summary>{head}</summary>{inside}</details>"
        else:
            body += head + inside
    return (first, body), figures.scripts


class _Figures:
    """Parts of a page as HTML; ``scripts`` are those of the figures so far."""

    def __init__(self) -> None:
        self.scripts: list[str] = []

    def part_html(self, part: Any) -> str:
        if isinstance(part, Link):
            href, shown = html.escape(quote(part.href)), html.escape(part.text)
            return f"<p><a class='page' href='{href}'>{shown}</a></p>"
        if isinstance(part, Table):
            title = f"<h3>{html.escape(part.title)}</h3>" if part.title else ""
            return f"{title}<div class='scroll'>{part.to_html()}</div>"
        if isinstance(part, Key):
            return _key(part)
        if isinstance(part, Passages):
            return _passages(part)
        figure = part.to_html(full_html=False, include_plotlyjs=not self.scripts)
        wide = part.layout.meta or 0  # pixels that it needs; a narrow page scrolls it
        self.scripts += scripts_of(figure)
        return f"<div class='scroll'><div style='min-width:{wide}px'>{figure}</div></div>"


def _key(key: Key) -> str:
    items = ""
    for color, meaning, shape in key.entries:
        kind = "" if shape == "box" else f" class='{shape}'"
        paint = "background" if shape == "box" else "border-color"
        items += f"<li><i{kind} style='{paint}:{color}'></i>{html.escape(meaning)}</li>"
    return f"<ul class='key'>{items}</ul>"


def _passages(passages: Passages) -> str:
    columns = ""
    for title, tokens in passages.columns.items():
        text = "".join(_token(*token) for token in tokens)
        columns += f"<figure><figcaption>{html.escape(title)}</figcaption><p>{text}</p></figure>"
    caption = f"<p class='caption'>{prose(passages.caption)}</p>" if passages.caption else ""
    return f"<div class='passages'>{columns}</div>{caption}"


def _token(piece: str, color: str, note: str) -> str:
    """Color a piece, but for the spaces before it, which may hang at the end of a line."""
    word = piece.lstrip(" ")
    if not color or not word:
        return html.escape(piece)
    style = f"background:{color};color:{ink_on(color)}"
    shown = f"<span style='{style}' title='{html.escape(note)}'>{html.escape(word)}</span>"
    return " " * (len(piece) - len(word)) + shown


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
