"""How a training step is cut over GPUs and micro-batches."""

import math
from dataclasses import dataclass

from l2r.cost.planning.hardware import GPUS_PER_NODE, Gpu
from l2r.errors import InputError

FORMS: tuple[str, ...] = ("ddp", "fsdp2", "ep")


@dataclass(frozen=True)
class Assumptions:
    """utilization: share of the GPU's stated arithmetic that a step reaches. imbalance: see Cut."""

    gpu: Gpu
    utilization: float = 0.3
    imbalance: float = 1.25

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise InputError(
                f"utilization must be above 0 and at most 1; got utilization={self.utilization}"
            )
        _check_imbalance(self.imbalance)


@dataclass(frozen=True)
class Cut:
    """parallel: ddp, fsdp2, or ep (experts split over a node, everything else as ddp).

    micro_batch: items of one forward on one GPU. checkpointing: recompute activations.
    imbalance: tokens at the most loaded GPU over their mean, where experts are split; elsewhere
    every GPU computes its own tokens, however they spread over experts, and it changes nothing.
    """

    parallel: str
    gpus: int
    global_batch: int
    micro_batch: int
    checkpointing: bool
    imbalance: float = 1.25

    def __post_init__(self) -> None:
        check_form(self.parallel)
        if self.gpus < 1 or self.global_batch % self.gpus:
            raise InputError(
                f"gpus must divide global_batch={self.global_batch}; got gpus={self.gpus}"
            )
        _check_imbalance(self.imbalance)
        if self.per_gpu % self.micro_batch:
            raise InputError(
                f"micro_batch must divide global_batch / gpus = {self.per_gpu}; "
                f"got micro_batch={self.micro_batch}"
            )

    @property
    def per_gpu(self) -> int:
        """Items of a step on one GPU."""
        return self.global_batch // self.gpus

    @property
    def parts(self) -> int:
        """Micro-batches of a step on one GPU."""
        return self.per_gpu // self.micro_batch

    def expert_ranks(self, num_experts: int) -> int:
        """GPUs that share one set of experts: those of a node, as far as N and all divide."""
        return math.gcd(num_experts, self.gpus, GPUS_PER_NODE) if self.parallel == "ep" else 1


def check_form(name: str | None) -> None:
    """Raise ValueError for a parallel form that does not exist; None is any."""
    if name is not None and name not in FORMS:
        raise InputError(f"parallel must be one of {', '.join(FORMS)}; got {name!r}")


def _check_imbalance(imbalance: float) -> None:
    if not 1 <= imbalance < math.inf:
        raise InputError(f"imbalance must be >= 1 and finite; got imbalance={imbalance}")
