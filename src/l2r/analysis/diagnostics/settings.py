"""Settings of a diagnosis and what they may be; read without torch, before anything is loaded."""

from dataclasses import dataclass

from l2r.errors import InputError

TOKENS = 1024  # of a text that are shown
LEAST = 10  # occurrences of a word that counts, as in OLMoE's lists of words
MOST_SIGMA = 1e6  # squares of noisy inputs stay far from the end of fp32


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
    least: int = LEAST

    def __post_init__(self) -> None:
        check_sigma(self.sigma)
        for name, lowest in (("repeats", 1), ("certify", 0)):
            if getattr(self, name) < lowest:
                raise InputError(f"{name} must be >= {lowest}; got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed must be >= 0 and below 2^63; got {self.seed}")


def check_sigma(sigma: float) -> None:
    """Raise ValueError for a sigma that is negative, above a million or no number."""
    if not 0 <= sigma <= MOST_SIGMA:
        raise InputError(f"sigma must be between 0 and {MOST_SIGMA:,.0f}; got {sigma}")
