"""The content security policy of every page: what runs is the scripts that we wrote, and no other.

Text of a stranger is escaped wherever it stands. Should one place be missed, the browser still runs
nothing of it, and loads nothing from anywhere.
"""

import base64
import hashlib
import re
from collections.abc import Iterable

_SCRIPT = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)
_REST = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'"
)


def scripts_of(html: str) -> list[str]:
    """Texts of the scripts in HTML that we, or plotly, wrote."""
    return _SCRIPT.findall(html)


def policy(scripts: Iterable[str]) -> str:
    """The ``<meta>`` of a page that has these scripts: exactly what stands between their tags."""
    sources = {f"'sha256-{_digest(script)}'": None for script in scripts} or {"'none'": None}
    content = f"script-src {' '.join(sources)}; {_REST}"
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
