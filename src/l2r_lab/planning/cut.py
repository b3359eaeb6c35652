"""Cuts of a training step over GPUs and micro-batches, and what the GPUs can do."""

import math
from dataclasses import dataclass

from l2r.errors import InputError
from l2r.files.wording import nearest

GPUS_PER_NODE = 8
# The rest: driver, communication, fragments. GB count as 10^9; cards have a little more.
USABLE = 0.95
# Of the stated rates, what collectives of many megabytes reach.
LINK_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Gpu:
    """memory [bytes]. flops: dense bf16 with fp32 sums, wide_flops: fp32 [1/s]. bandwidth: of its
    memory [bytes/s].

    link: to the GPUs of its node, network: to other nodes, both one way per GPU [bytes/s].
    """

    name: str
    memory: float
    flops: float
    wide_flops: float
    bandwidth: float
    link: float
    network: float
    source: str

    @property
    def usable(self) -> float:
        """Bytes for tensors."""
        return USABLE * self.memory

    def between(self, gpus: int) -> float:
        """Bytes per second through one GPU of a ring over ``gpus``.

        Rings leave a node once for all of its GPUs, so they share all network cards of the node.
        """
        slowest = self.link if gpus <= GPUS_PER_NODE else min(self.link, 8 * self.network)
        return LINK_EFFICIENCY * slowest


_NVIDIA = "https://www.nvidia.com/en-us/data-center"  # SXM modules; b200 an eighth of the DGX
_AMD = "https://www.amd.com/en/products/accelerators/instinct/mi300"
# Network: one card per GPU in the makers' own eight-GPU systems, 200 Gb/s for A100, else 400 Gb/s.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 80e9, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, f"{_NVIDIA}/a100"),
        Gpu("h100", 80e9, 989e12, 67e12, 3.35e12, 450e9, 50e9, f"{_NVIDIA}/h100"),
        Gpu("h200", 141e9, 989e12, 67e12, 4.8e12, 450e9, 50e9, f"{_NVIDIA}/h200"),
        Gpu("b200", 180e9, 2250e12, 80e12, 8e12, 900e9, 50e9, f"{_NVIDIA}/dgx-b200"),
        Gpu("mi300x", 192e9, 1307e12, 163.4e12, 5.3e12, 448e9, 50e9, f"{_AMD}/mi300x.html"),
    )
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table. Raises ValueError for another name."""
    if name not in GPUS:
        names = ", ".join(GPUS)
        raise InputError(f"gpu must be one of {names}; got {name!r}{nearest(name, GPUS)}")
    return GPUS[name]


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
class StepCut:
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
