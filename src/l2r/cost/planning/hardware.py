"""GPUs: memory, arithmetic, bytes per second in and between nodes.

``source`` is where the maker states them. The makers' pages could not be read while the table was
written; the b200's fp32 rate is not the maker's, and the mi300x's network is assumed: one 400 Gb/s
card per GPU.
"""

from dataclasses import dataclass

from l2r.errors import InputError
from l2r.runs.spelling import nearest

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
    """A GPU of the table. Raises ValueError for another name."""
    if name not in GPUS:
        names = ", ".join(GPUS)
        raise InputError(f"gpu must be one of {names}; got {name!r}{nearest(name, GPUS)}")
    return GPUS[name]
