"""Findings of every status, for the page of checks."""

from l2r.analysis.diagnostics.checks import Finding

FINDINGS = [
    Finding("ok", "all is finite", check="finite"),
    Finding("warning", "none of 90 tokens reaches <b>1 expert</b>", "read more", check="loads"),
    Finding("skipped", "no quantized weights", check="quantized"),
    Finding("fault", "raises", "see the others", check="padding in the loss"),
]
