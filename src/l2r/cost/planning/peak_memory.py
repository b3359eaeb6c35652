"""Memory of one GPU by formula: what autograd keeps of every block, and the states around it.

Shape letters: T tokens of a micro-batch, D hidden size, F expert width, N experts, K experts per
token, V vocabulary. In bf16 weights stay fp32 and autocast makes copies: a product keeps 2 bytes
a number, norms and the residual stream keep 4.
"""

from dataclasses import dataclass
from itertools import pairwise

from l2r.cost.planning.cut import Cut
from l2r.cost.planning.sizes import Part, Sizes

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


def formula(sizes: Sizes, cut: Cut) -> Memory:
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


def _held(block: Part, group: int) -> float:
    """Numbers of a block where ``group`` GPUs share its experts."""
    return block.numbers - block.expert_numbers + block.expert_numbers / group


def _attention(sizes: Sizes, narrow: int) -> float:
    """Bytes a token keeps in a block outside of its MLP or experts.

    OLMoE: residual twice, two norms and their results, q and k before and after their norms and
    after rotation, v, the output. ViT has norms that keep their input alone.
    """
    if sizes.language:
        wide, half = (7, 9) if sizes.half else (14, 0)
    else:
        wide, half = (2, 8) if sizes.half else (8, 0)
    return (wide * _WIDE + half * narrow) * sizes.hidden + _WIDE * sizes.attention_heads


def _per_row(sizes: Sizes) -> int:
    """Numbers a row keeps inside its expert: SwiGLU's gate, up, silu and product; GELU's two."""
    return (4 if sizes.language else 2) * sizes.expert_width


def _routing(sizes: Sizes) -> float:
    """Bytes a token keeps of its routing: logits, softmax and their sums; places of its rows."""
    return 3 * _WIDE * sizes.experts + 40 * sizes.top_k
