"""The result of one check of a model, in one line."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from l2r.hf.swap import Site

Status = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True)
class Finding:
    """Result of the check ``check``.

    status: "ok"; "warning", for what is often unwanted; "fault", for what makes training or
    results wrong; "skipped", where this model or batch does not allow the check. found: the fact,
    with numbers. remedy: the advice, empty without a warning or fault.
    """

    status: Status
    found: str
    remedy: str = ""
    check: str = ""

    def __str__(self) -> str:
        advice = f"; remedy: {self.remedy}" if self.remedy else ""
        return f"{self.status:<8}{self.check}: {self.found}{advice}"


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warning(found: str, remedy: str) -> Finding:
    return Finding("warning", found, remedy)


def fault(found: str, remedy: str) -> Finding:
    return Finding("fault", found, remedy)


def skipped(reason: str) -> Finding:
    return Finding("skipped", reason)


def in_layers(sites: Sequence[Site]) -> str:
    """Return the layers of some sites, in words; of many the first four."""
    layers = sorted({site.layer for site in sites})
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers[:4]))}{more}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 expert, 2 experts."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
