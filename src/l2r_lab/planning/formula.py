"""Seconds and memory of a training step by formula: arithmetic, bytes sent, what one GPU holds.

Memory is what autograd keeps of every block, and the states around it.

Shape letters: T tokens of a micro-batch, D hidden size, F expert width, N experts, K experts per
token, V vocabulary. In bf16 weights stay fp32 and autocast makes copies: a product keeps 2 bytes
a number, norms and the residual stream keep 4.
"""

from dataclasses import dataclass
from itertools import pairwise

from l2r_lab.planning.cut import LINK_EFFICIENCY, Gpu, StepCut
from l2r_lab.planning.sizes import GatheredPart, ModelSizes

_WEIGHT = 4  # bytes; weights and gradients are fp32 in every form of ours, and travel so


@dataclass(frozen=True)
class StepTime:
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


def training_flops(sizes: ModelSizes, cut: StepCut) -> dict[str, float]:
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


def _counts_before(sizes: ModelSizes, cut: StepCut) -> int:
    """Count the forwards that only count loads: of every part of a step, before the first."""
    return int(sizes.balanced_over_step and cut.parts > 1)


def step_bytes(sizes: ModelSizes, cut: StepCut) -> dict[str, float]:
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


def step_time(sizes: ModelSizes, cut: StepCut, gpu: Gpu, utilization: float) -> StepTime:
    """Time of a step at a stated share of the GPU's arithmetic."""
    flops = sum(training_flops(sizes, cut).values()) * cut.per_gpu
    sent, rate = step_bytes(sizes, cut), gpu.between(cut.gpus)
    # A block of experts is the work of its most loaded GPU.
    load = 1.0
    if cut.expert_ranks(sizes.experts) > 1:
        share = sizes.flops["experts"] / sum(sizes.flops.values())
        load += (cut.imbalance - 1) * share
    return StepTime(
        arithmetic=load * flops / (utilization * (gpu.flops if sizes.half else gpu.wide_flops)),
        gradients=sent["gradients"] / rate,
        weights=sent["weights"] / rate,
        tokens=sent["tokens"] / (LINK_EFFICIENCY * gpu.link),
        bytes_sent=sent,
    )


_WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. ``peak`` is less than the sum: not all of it is there at one time.

    weights: and their moving average, where there is one. buckets: of ddp. activations: kept for
    the backward pass, all blocks. casts: bf16 copies of weights that stay with them. logits: with
    their logarithm and gradient. dispatch: of activations, the rows that go to experts and come
    back, all blocks. gathered: weights that fsdp2 puts together.
    """

    weights: float
    gradients: float
    optimizer: float
    buckets: float
    activations: float
    casts: float
    logits: float
    dispatch: float
    gathered: float
    peak: float


def formula(sizes: ModelSizes, cut: StepCut) -> Memory:
    """Sizes of the parts, and the largest of the places where the peak can be."""
    narrow = 2 if sizes.half else _WIDE
    tokens = cut.micro_batch * sizes.tokens
    group = cut.expert_ranks(sizes.experts)
    imbalance = cut.imbalance if group > 1 else 1.0
    ranks = cut.gpus if cut.parallel == "fsdp2" else 1
    around, numbers = sizes.around.numbers, [_held(block, group) for block in sizes.blocks]
    shares = [_held(block, group) if ranks == 1 else block.share(ranks) for block in sizes.blocks]
    padded = [block.padded(ranks) if ranks > 1 else 0 for block in sizes.blocks]

    weights = gradients = _WIDE * (sizes.around.share(ranks) + sum(shares))
    buckets = gradients if cut.gpus > 1 and ranks == 1 else 0
    states = weights * (4 if sizes.averaged else 3) + buckets
    # Gradients of the parts of a step are added up whole.
    added = _WIDE * (around + sum(numbers)) if cut.parts > 1 else 0
    root = _WIDE * sizes.around.padded(ranks) if ranks > 1 else 0

    rows = sizes.top_k * tokens * imbalance
    # Rows as they arrive at experts, imbalanced, and as they came back to their tokens.
    dispatch = narrow * sizes.hidden * (rows + sizes.top_k * tokens)
    moe = dispatch + narrow * _per_row(sizes) * rows + _routing(sizes) * tokens
    mlp = narrow * 2 * sizes.mlp_width * tokens
    attention = _attention(sizes, narrow) * tokens
    ones = [attention + (moe if block.expert_numbers else mlp) for block in sizes.blocks]
    casts = [2 * n if sizes.half else 0 for n in numbers]
    between = _WIDE * sizes.hidden * tokens
    kept, held = sum(ones), sum(casts)
    if cut.checkpointing:
        kept, held = len(ones) * between, 0
    held_around = 2 * around if sizes.half else 0

    targets = tokens if sizes.language else cut.micro_batch
    logits = 3 * _WIDE * sizes.vocabulary * min(targets, sizes.loss_chunk or targets)
    head = (2 * _WIDE + narrow) * sizes.hidden * tokens + logits

    places = [states + gradients, states + added + kept + held + held_around + head + root]
    for n, block in enumerate(sizes.blocks):  # in the backward pass of each
        before, after = max(n - 1, 0), min(n + 1, sizes.layers - 1)
        done = added or _WIDE * (around + sum(shares[n + 1 :]))
        if cut.checkpointing:
            below = (n + 1) * between + ones[n] + casts[n]
        else:
            below = sum(ones[: n + 1]) + sum(casts[: n + 1])
        inside: float = between
        if block.expert_numbers:  # gradients of rows or of their inside, and of the weights
            inside += 2 * narrow * rows * max(sizes.hidden, sizes.expert_width)
            inside += narrow * block.expert_numbers / group
        else:
            inside += 2 * narrow * tokens * max(sizes.hidden, sizes.mlp_width)
            inside += narrow * (numbers[n] - 4 * sizes.hidden**2)
        gathered = 0.0
        if ranks > 1:  # the block's weights; the next one's on their way; gradients that leave
            gathered = _WIDE * padded[n]
            gathered += _WIDE * padded[before] * (before < n)
            gathered += _WIDE * padded[after] * (after > n and not added)
        places.append(states + done + below + inside + root + gathered)
    pairs = [a + b for a, b in pairwise([*padded, 0])]
    return Memory(
        weights=weights * (2 if sizes.averaged else 1),
        gradients=added or gradients,
        optimizer=2 * weights,
        buckets=buckets,
        activations=kept,
        casts=held + held_around,
        logits=logits,
        dispatch=dispatch * (1 if cut.checkpointing else sizes.moe_layers),
        gathered=root + _WIDE * max(pairs),
        peak=max(places),
    )


def _held(block: GatheredPart, group: int) -> float:
    """Numbers of a block where ``group`` GPUs share its experts."""
    return block.numbers - block.expert_numbers + block.expert_numbers / group


def _attention(sizes: ModelSizes, narrow: int) -> float:
    """Bytes a token keeps in a block outside of its MLP or experts.

    OLMoE: residual twice, two norms and their results, q and k before and after their norms and
    after rotation, v, the output. ViT has norms that keep their input alone.
    """
    if sizes.language:
        wide, half = (7, 9) if sizes.half else (14, 0)
    else:
        wide, half = (2, 8) if sizes.half else (8, 0)
    return (wide * _WIDE + half * narrow) * sizes.hidden + _WIDE * sizes.attention_heads


def _per_row(sizes: ModelSizes) -> int:
    """Numbers a row keeps inside its expert: SwiGLU's gate, up, silu and product; GELU's two."""
    return (4 if sizes.language else 2) * sizes.expert_width


def _routing(sizes: ModelSizes) -> float:
    """Bytes a token keeps of its routing: logits, softmax and their sums; places of its rows."""
    return 3 * _WIDE * sizes.experts + 40 * sizes.top_k
