"""One self-contained HTML page from titled sections of text, tables and plotly figures."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from l2r.report.tables import Table, prose
from l2r.runs.atomic import write_text

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;max-width:1180px;margin:2rem auto;
padding:0 1rem}h1{font-size:1.7rem;margin-bottom:.2rem}h2{font-size:1.25rem;margin-top:2.4rem;
border-bottom:1px solid #d5dbe1;padding-bottom:.2rem}p{max-width:75ch}
table{border-collapse:collapse;margin:.8rem 0;font-size:14px;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .42rem;text-align:right;border-bottom:1px solid #e4e8ec}
th:first-child,td:first-child{text-align:left;min-width:7em}td:first-child{max-width:20em}
thead th{border-bottom:2px solid #52606d}
a.page{display:inline-block;padding:.4rem .9rem;border:2px solid #1d5b9e;border-radius:6px}
td.number{white-space:nowrap}
.caption{color:#52606d;font-size:13px}nav a{margin-right:1rem}.scroll{overflow-x:auto}
"""


@dataclass(frozen=True)
class Link:
    """A way to another page; ``href`` is relative, so that both can move together."""

    href: str
    text: str


@dataclass(frozen=True)
class Section:
    """Part of a page. ``parts`` holds links, tables and plotly figures, shown in order."""

    title: str
    text: str = ""
    parts: Sequence[Any] = field(default_factory=tuple)


def write_page(
    path: Path,
    *,
    title: str,
    summary: str,
    sections: Sequence[Section],
    reload: float | None = None,
) -> Path:
    """Write the page; plotly's script is inlined once, so the file opens without a network.

    Written under a temporary name and renamed, so a reader never sees half a page. ``reload``:
    seconds after which a browser loads it again.
    """
    again = "" if reload is None else f"<meta http-equiv='refresh' content='{reload:g}'>"
    links = "".join(
        f"<a href='#section-{number}'>{html.escape(section.title)}</a>"
        for number, section in enumerate(sections)
    )
    text = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'>{again}"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1><p>{prose(summary)}</p><nav>{links}</nav>"
        f"{section_html(sections)}</body></html>"
    )
    write_text(path, text)
    return path


def section_html(sections: Sequence[Section]) -> str:
    """The sections as they stand in a page; the first figure brings plotly's script."""
    body, script = "", True
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
            else:
                body += part.to_html(full_html=False, include_plotlyjs=script)
                script = False
    return body
