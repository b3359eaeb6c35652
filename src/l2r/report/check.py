"""The page of ``l2r check``: a mark for every check, then what is wrong with its remedy."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from l2r.report.page import Key, Passages, Section, write_page
from l2r.report.palette import INK
from l2r.report.tables import Table
from l2r.report.verdicts import Verdict

if TYPE_CHECKING:
    from l2r.analysis.diagnostics.checks import Finding

# status -> sign, color, meaning
_STATUS = {
    "fault": ("✗", "#d55e00", "fault: makes training or results wrong"),
    "warning": ("!", "#e69f00", "warning: often unwanted"),
    "ok": ("✓", "#009e73", "ok"),
    "skipped": ("-", INK, "skipped: this model or text does not allow it"),
}
_CANNOT = (
    "Whether the routers are good, and what other text would show: loads and losses are of the "
    "rows read here."
)


def verdict(checkpoint: str, findings: "Sequence[Finding]") -> str:
    """Say how many faults and warnings a checkpoint has, and of how many checks."""
    count = {status: sum(f.status == status for f in findings) for status in _STATUS}
    faults, warnings = (f"{count[s]} {s}{'s' * (count[s] != 1)}" for s in ("fault", "warning"))
    skipped = f", {count['skipped']} of them skipped" if count["skipped"] else ""
    return f"{checkpoint} has {faults} and {warnings} in {len(findings)} checks{skipped}."


def write_check(path: Path, checkpoint: str, findings: "Sequence[Finding]") -> Path:
    """Write the page of one checkpoint."""
    by_status = {
        status: [finding for finding in findings if finding.status == status] for status in _STATUS
    }
    marks = [
        (
            f" {_STATUS[status][0]} {finding.check} ".replace(" ", "\u00a0"),
            _STATUS[status][1],
            finding.found,
        )
        for status, group in by_status.items()
        for finding in group
    ]
    apart = [part for mark in marks for part in (mark, (" ", "", ""))]
    keys = [
        (color, told, "box") for status, (_, color, told) in _STATUS.items() if by_status[status]
    ]
    wrong = [*by_status["fault"], *by_status["warning"]]
    sections = [
        Section(f"{f.check}: {f.status}", f"Found: {f.found}. Remedy: {f.remedy}.") for f in wrong
    ]
    sections += [
        Section(title, parts=[_table(by_status[status])], folded=True)
        for status, title in (("ok", "Checks that are ok"), ("skipped", "Skipped checks"))
        if by_status[status]
    ]
    return write_page(
        path,
        title=f"Is {checkpoint} healthy?",
        summary="",
        sections=sections,
        verdict=Verdict(verdict(checkpoint, findings), _CANNOT),
        lead=[Passages({"": apart}), Key(keys)],
    )


def _table(findings: "Sequence[Finding]") -> Table:
    return Table("", ("check", "found"), tuple((f.check, f.found) for f in findings))
