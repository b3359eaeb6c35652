"""Cost of routes that differ in bf16 and int8, of a run's model on its held-out text."""

import numpy as np

from l2r.analysis import DiagnosisSubject
from l2r.analysis.routes import Comparison, compare_models, in_other_arithmetic
from l2r.files.mismatch import Mismatch
from l2r_lab.files.study import ARITHMETICS

_NO_TEXT = np.array([""])


def route_costs(subject: DiagnosisSubject, batch_size: int) -> dict[str, float]:
    """Measures ``runs.study.OF_TEXT`` of a language model, over all tokens of a subject.

    Each arithmetic is compared with the model as it is: tokens with another choice in some layer,
    change of the cross-entropy, KL(model, other) of the next token, and the share of that KL which
    goes where the other replays the model's routes.
    """
    measures = dict[str, float]()
    for name in ARITHMETICS:
        other = in_other_arithmetic(subject.model, name)
        batches = (b["input_ids"] for b in subject.batches(batch_size, subject.device))
        result = _without_text(compare_models(subject.model, other, batches))
        costs = result.costs()
        own, replayed = (costs[routes]["kl"] or 0.0 for routes in ("own", "replayed"))
        measures |= {
            f"{name}_flipped_tokens": result.totals()["tokens_changed"],
            f"{name}_ce_change": -float(np.nanmean(result.own, dtype=np.float64)),
            f"{name}_kl": own,
            f"{name}_kl_replay_share": 1 - replayed / own if own else float("nan"),
        }
    return measures


def _without_text(comparison: Comparison) -> Mismatch:
    """Return the comparison as one domain whose tokens have no text."""
    arrays = comparison.arrays()
    lengths = np.array(comparison.lengths)
    return Mismatch(
        **{**arrays, "tokens": np.zeros_like(arrays["tokens"])},
        layers=np.array(comparison.fingerprint.layers),
        remarks=np.array(comparison.remarks),
        lengths=lengths,
        domain=np.zeros_like(lengths),
        domains=_NO_TEXT,
        pieces=_NO_TEXT,
    )
