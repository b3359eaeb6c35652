"""Memory of one GPU by formula: what autograd keeps of every block, and the states around it.

Shape letters: T tokens of a micro-batch, D hidden size, F expert width, N experts, K experts per
token, V vocabulary. In bf16 weights stay fp32 and autocast makes copies: a product keeps 2 bytes
a number, norms and the residual stream keep 4.
"""

from dataclasses import dataclass

from l2r.cost.planning.cut import Cut
from l2r.cost.planning.sizes import Sizes

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
    """Sizes of the parts, and the largest of the three places where the peak can be."""
    narrow = 2 if sizes.half else _WIDE
    tokens = cut.micro_batch * sizes.tokens
    group = cut.expert_ranks(sizes.experts)
    imbalance = cut.imbalance if group > 1 else 1.0
    sharded = cut.gpus if cut.parallel == "fsdp2" else 1
    experts = sizes.expert_numbers / group
    numbers = sizes.numbers - sizes.expert_numbers + experts
    block_numbers = (sizes.block_numbers - sizes.expert_numbers + experts) / sizes.layers
    around = numbers - block_numbers * sizes.layers

    weights = _WIDE * numbers / sharded
    gradients = _WIDE * numbers / sharded
    buckets = gradients if cut.gpus > 1 and sharded == 1 else 0.0
    states = weights * (4 if sizes.averaged else 3) + buckets
    unsharded_gradients = _WIDE * numbers if sharded > 1 else gradients
    # Around the blocks; two blocks, of which one waits its turn.
    root, pair = (_WIDE * around, 2 * _WIDE * block_numbers) if sharded > 1 else (0.0, 0.0)

    rows = sizes.top_k * tokens * imbalance
    # Rows as they arrive at experts, imbalanced, and as they came back to their tokens.
    dispatch = narrow * sizes.hidden * (rows + sizes.top_k * tokens)
    moe = dispatch + narrow * _per_row(sizes) * rows + _routing(sizes) * tokens
    block = _attention(sizes, narrow) * tokens
    dense = sizes.layers - sizes.moe_layers
    mlp = narrow * 2 * sizes.mlp_width * tokens
    whole = sizes.layers * block + sizes.moe_layers * moe + dense * mlp
    casts = 2 * numbers if sizes.half else 0.0
    one, cast = block + (moe if sizes.moe_layers else mlp), casts * block_numbers / numbers
    # In the backward of experts: gradients of rows or of their inside, and of the weights.
    inside = 2 * narrow * rows * max(sizes.hidden, sizes.expert_width)
    inside += _WIDE * tokens * sizes.hidden + narrow * experts / max(1, sizes.moe_layers)
    kept, held_casts = whole, casts
    if cut.checkpointing:
        kept, held_casts = sizes.layers * _WIDE * sizes.hidden * tokens, casts - cast * sizes.layers

    targets = tokens if sizes.language else cut.micro_batch
    logits = 3 * _WIDE * sizes.vocabulary * min(targets, sizes.loss_chunk or targets)
    head = (2 * _WIDE + narrow) * sizes.hidden * tokens + logits

    before = unsharded_gradients if cut.parts > 1 else 0.0
    last = before or _WIDE * around
    again = one + cast if cut.checkpointing else 0.0
    at_logits = states + before + kept + held_casts + head + root
    at_last_block = states + last + kept + held_casts + again + inside + root + pair
    done = before or gradients - _WIDE * block_numbers / sharded
    at_first_block = states + done + one + cast + inside + root + pair
    return Memory(
        weights=weights * (2 if sizes.averaged else 1),
        gradients=before or gradients,
        optimizer=2 * weights,
        buckets=buckets,
        activations=kept,
        casts=held_casts,
        logits=logits,
        dispatch=dispatch * (1 if cut.checkpointing else sizes.moe_layers),
        gathered=root + pair,
        peak=max(at_logits, at_last_block, at_first_block, states + gradients),
    )


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
