"""Settings and sizes of a diagnosis, checked without torch, before anything is loaded."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from l2r.errors import InputError
from l2r.files.folder import RunFolder

TOKENS = 1024  # of a text that are shown
MIN_OCCURRENCES = 10  # occurrences of a word that counts, as in OLMoE's lists of words
MAX_SIGMA = 1e6  # squares of noisy inputs stay far from the end of fp32


@dataclass(frozen=True)
class DiagnosisSettings:
    """sigma: noise on router inputs, drawn ``repeats`` times from ``seed``.

    certify: tokens of the sample that get a certified radius and a search for a flip; 0 for none.
    keep_sample: also keep the sampled tokens, the anchors and the routing planes, from which the
    page of l2r diagnose draws the geometry; they can be hundreds of MiB.
    least: occurrences of a word that counts for vocabulary specialization.
    Raises ValueError for a sigma as ``check_sigma``, repeats < 1, a negative number of tokens to
    certify and a seed that torch does not take.
    """

    sigma: float = 0.02
    repeats: int = 5
    seed: int = 0
    certify: int = 128
    keep_sample: bool = True
    least: int = MIN_OCCURRENCES

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        for name, lowest in (("repeats", 1), ("certify", 0)):
            if getattr(self, name) < lowest:
                raise InputError(f"{name} must be >= {lowest}; got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be >= 0 and below 2^63; got {self.seed}")


def check_sigma(sigma: float) -> None:
    """Raise ValueError for a sigma that is negative, above a million or no number."""
    if not 0 <= sigma <= MAX_SIGMA:
        raise InputError(f"sigma must be between 0 and {MAX_SIGMA:,.0f}; got {sigma}")


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
