"""Final losses of a run: over the last tenth of training, and of the last validation."""

from l2r.files.folder import RunFolder


def last_tenth(run: RunFolder, field: str, *, end: int | None = None) -> float | None:
    """Mean of a number of the training records whose step lies in the last tenth of the run.

    ``ce`` counts every step of them, not only those that were logged. ``end`` is the step at
    which the run is taken to end. None where no record has the field.
    """
    every = run.read_metrics("train_mean") if field == "ce" else []
    records = [
        record
        for record in every or run.read_metrics("train")
        if field in record and (end is None or record["step"] <= end)
    ]
    if not records:
        return None
    tail = [record for record in records if record["step"] > 0.9 * records[-1]["step"]]
    weights = [record.get("steps", 1) for record in tail]
    total = sum(w * record[field] for w, record in zip(weights, tail, strict=True))
    return float(total / sum(weights))


def late_losses(run: RunFolder) -> dict[str, float]:
    """Training losses of the third and of the last quarter of a run, and the change between them.

    Means over all steps; a record of several steps counts for the quarter that it ends in. Nothing
    where a quarter has no record.
    """
    records = run.read_metrics("train_mean")
    last = records[-1]["step"] if records else 0
    means = []
    for start, end in ((0.5, 0.75), (0.75, 1.0)):
        part = [r for r in records if start * last < r["step"] <= end * last]
        if not part:
            return {}
        means.append(sum(r["steps"] * r["ce"] for r in part) / sum(r["steps"] for r in part))
    return {
        "train_ce_third_quarter": means[0],
        "train_ce_last_quarter": means[1],
        "train_ce_late_change": means[1] - means[0],
    }


def final_losses(run: RunFolder) -> dict[str, float]:
    """Losses at the end of a run, as far as it has them: train_ce, balance, validation_ce."""
    validation = (run.read_metrics("validation") or [{}])[-1]
    losses = {
        "train_ce": last_tenth(run, "ce"),
        "balance": last_tenth(run, "balance"),
        "validation_ce": validation.get("ce/mean", validation.get("ce")),
    }
    return {name: value for name, value in losses.items() if value is not None}
