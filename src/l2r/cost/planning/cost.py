"""Seconds of a training step: arithmetic, and the bytes that GPUs send each other."""

from dataclasses import dataclass

from l2r.cost.planning.cut import Cut
from l2r.cost.planning.hardware import LINK_EFFICIENCY, Gpu
from l2r.cost.planning.sizes import Sizes

_WEIGHT = 4  # bytes; weights and gradients are fp32 in every form of ours, and travel so


@dataclass(frozen=True)
class Step:
    """One optimizer step. Seconds of arithmetic and of each kind of communication, and its bytes.

    gradients: all-reduce of ddp and ep, or reduce-scatter of fsdp2. weights: all-gathers of fsdp2.
    tokens: all-to-alls of ep. Gradients and weights travel during the arithmetic, and only what
    takes longer than it is waited for; tokens are waited for.
    """

    arithmetic: float
    gradients: float
    weights: float
    tokens: float
    bytes_sent: dict[str, float]

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return max(self.arithmetic, self.gradients + self.weights) + self.tokens

    @property
    def bottleneck(self) -> str:
        """Name of the longest part."""
        names = ("arithmetic", "gradients", "weights", "tokens")
        return max(names, key=lambda name: float(getattr(self, name)))


def training_flops(sizes: Sizes, cut: Cut) -> dict[str, float]:
    """FLOPs of forward and backward of one item by part: 3 forwards, 4 of what runs again.

    One more where balance statistics of a whole step are counted before its parts.
    """
    before = _counts_before(sizes, cut)
    chunk = sizes.loss_chunk
    again = chunk is not None and chunk < cut.micro_batch * sizes.tokens  # else logits are kept
    times, head = before + (4 if cut.checkpointing else 3), before + (4 if again else 3)
    return {
        part: (head if part == "head" else times) * count for part, count in sizes.flops.items()
    }


def _counts_before(sizes: Sizes, cut: Cut) -> int:
    """Forwards that only count loads: of every part of a step, before the first."""
    return int(sizes.balanced_over_step and cut.parts > 1)


def step_bytes(sizes: Sizes, cut: Cut) -> dict[str, float]:
    """Bytes that one GPU sends in a step: rings send (R - 1) / R of what they reduce or gather."""
    ring = (cut.gpus - 1) / cut.gpus
    sent = {"gradients": 0.0, "weights": 0.0, "tokens": 0.0}
    if cut.parallel == "fsdp2":
        # Blocks are gathered for the forward and again for the backward; the rest once.
        # Of a tensor with fewer rows than GPUs, such as experts, every GPU sends a row.
        blocks = sum(block.padded(cut.gpus) for block in sizes.blocks)
        numbers = sizes.around.padded(cut.gpus) + blocks
        gathered = numbers + (1 + _counts_before(sizes, cut)) * blocks
        sent["weights"] = ring * _WEIGHT * gathered * cut.parts
        sent["gradients"] = ring * _WEIGHT * numbers
        return sent
    group = cut.expert_ranks(sizes.experts)
    copies = cut.gpus // group
    experts = sizes.expert_numbers / group
    sent["gradients"] = 2 * _WEIGHT * (ring * (sizes.numbers - sizes.expert_numbers))
    sent["gradients"] += 2 * _WEIGHT * experts * (copies - 1) / copies
    if group > 1:
        rows = cut.imbalance * sizes.tokens * cut.per_gpu * sizes.top_k
        there_and_back = 4 + 2 * cut.checkpointing + 2 * _counts_before(sizes, cut)
        width = 2 if sizes.half else 4
        sent["tokens"] = (
            there_and_back * sizes.moe_layers * rows * sizes.hidden * width * (group - 1) / group
        )
    return sent


def step_time(sizes: Sizes, cut: Cut, gpu: Gpu, utilization: float) -> Step:
    """Time of a step at a stated share of the GPU's arithmetic."""
    flops = sum(training_flops(sizes, cut).values()) * cut.per_gpu
    sent, rate = step_bytes(sizes, cut), gpu.between(cut.gpus)
    # A block of experts is the work of its most loaded GPU.
    load = 1.0
    if cut.expert_ranks(sizes.experts) > 1:
        share = sizes.flops["experts"] / sum(sizes.flops.values())
        load += (cut.imbalance - 1) * share
    return Step(
        arithmetic=load * flops / (utilization * (gpu.flops if sizes.half else gpu.wide_flops)),
        gradients=sent["gradients"] / rate,
        weights=sent["weights"] / rate,
        tokens=sent["tokens"] / (LINK_EFFICIENCY * gpu.link),
        bytes_sent=sent,
    )
