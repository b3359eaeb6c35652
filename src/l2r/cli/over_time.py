"""``l2r diagnose --over-time``: earlier checkpoints of a run, or those given, beside the last."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l2r.checkpoints.inputs import Subject
    from l2r.diagnostics.choices import Batch, Choices
    from l2r.runs.diagnosis import Diagnosis


def training_checkpoints(checkpoints: Sequence[str]) -> list[Path]:
    """Checkpoints that training left in the run given alone; none where several are given.

    Raises ValueError for one thing alone that has no more than one.
    """
    from l2r.runs.folder import RunFolder

    if len(checkpoints) > 1:
        return []
    found = RunFolder(checkpoints[0]).complete_checkpoints()
    if len(found) < 2:
        raise ValueError(
            "over-time needs several checkpoints, or a run that kept two or more (recipe fields "
            f"checkpoint.every and checkpoint.keep); {checkpoints[0]} has {len(found)}"
        )
    return found


def within_run(
    folders: Sequence[Path],
    subject: "Subject",
    batches: "Callable[[], Iterator[Batch]]",
    last: "Choices",
    report: Callable[[int], None],
) -> dict[str, Any]:
    """Saturation over training checkpoints; their weights replace those of the subject."""
    from l2r.diagnostics.choices import choices_of
    from l2r.diagnostics.over_time import saturation
    from l2r.training.checkpoint import load_weights

    found = {}
    for number, folder in enumerate(folders, start=1):
        step = load_weights(folder, subject.model)
        found[step] = choices_of(subject.model, batches(), subject.run).experts
        report(number)
    return saturation(found, last.experts)


def of_list(views: "Mapping[str, Diagnosis]") -> dict[str, Any]:
    """Saturation over the checkpoints given, against the last of them."""
    from l2r.diagnostics.over_time import saturation
    from l2r.runs.agreement import same_tokens

    *_, last = views.values()
    other = [name for name, view in views.items() if not same_tokens(view, last)]
    if other:
        raise ValueError(f"over-time needs checkpoints that read the same tokens; not {other[0]}")
    experts = {name: view.by_layer("experts") for name, view in views.items()}
    return saturation(experts, last.by_layer("experts"))
