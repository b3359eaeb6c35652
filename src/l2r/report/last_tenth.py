"""The number that a run ends with: a mean over the last tenth of training."""

from l2r.data.run_folder import RunFolder


def last_tenth(run: RunFolder, field: str) -> float | None:
    """Mean of a number of the training records whose step lies in the last tenth of the run.

    ``ce`` counts every step of them, not only those that were logged. None where no record has
    the field.
    """
    every = run.read_metrics("train_mean") if field == "ce" else []
    records = [record for record in every or run.read_metrics("train") if field in record]
    if not records:
        return None
    tail = [record for record in records if record["step"] > 0.9 * records[-1]["step"]]
    weights = [record.get("steps", 1) for record in tail]
    total = sum(w * record[field] for w, record in zip(weights, tail, strict=True))
    return float(total / sum(weights))
