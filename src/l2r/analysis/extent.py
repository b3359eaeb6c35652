"""Sizes of a diagnosis and what they may be; read without torch, before anything is loaded."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from l2r.analysis.diagnostics.settings import TOKENS, DiagnosisSettings
from l2r.errors import InputError
from l2r.runs.folder import RunFolder


@dataclass(frozen=True)
class Extent:
    """Sizes of a diagnosis.

    batch_size: sequences or images at a time. sample: tokens kept for noise and figures.
    threshold: margin below which a decision is low. gain: sequences (of images up to 2,048) whose
    loss is also taken with other experts; 0 for none. text: tokens of a text that are kept one by
    one; 0 for none. patches: images whose patches are kept; 0 for none. settings: noise and
    certificates.
    """

    batch_size: int = 8
    sample: int = 2048
    threshold: float = 0.2
    gain: int = 16
    text: int = TOKENS
    patches: int = 12
    settings: DiagnosisSettings = field(default_factory=DiagnosisSettings)

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "sample": 1, "gain": 0, "text": 0, "patches": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                option = name.replace("_", "-")
                raise InputError(f"{option} must be >= {lowest}; got {getattr(self, name)}")
        if not math.isfinite(self.threshold):
            raise InputError(f"threshold must be finite; got {self.threshold}")


def earlier_checkpoints(run: str | Path) -> list[Path]:
    """Checkpoints that training left in a run. Raises ValueError where there are fewer than two."""
    checkpoints = RunFolder(run).complete_checkpoints()
    if len(checkpoints) < 2:
        raise InputError(
            "over-time needs several checkpoints, or a run that kept two or more (recipe fields "
            f"checkpoint.every and checkpoint.keep); {run} has {len(checkpoints)}"
        )
    return checkpoints
