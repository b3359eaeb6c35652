"""Block sizes and warps of the Triton launches, chosen by trials on an H100 (dev/LOG.md).

None depends on the number of tokens, so the results of a token do not depend on its batch.
"""

import triton

from l2r.kernels.contract import Sizes


def project_blocks(sizes: Sizes) -> dict[str, int]:
    """Parts, blocks of tokens and of d, groups of d, warps."""
    row = power(sizes.hidden, 16)
    if lanes(sizes.rank) < 16:
        width = min(row, 2048)
        tokens = max(1, min(8192 // width, 8))
        return {"WIDTH": row, "BT": tokens, "BD": width, "G": 1, "num_warps": 4}
    width = min(row, 64)
    return {"WIDTH": min(row, 512), "BT": 16, "BD": width, "G": width // 16, "num_warps": 2}


def forward_blocks(sizes: Sizes, top_k: int) -> dict[str, int]:
    """Blocks of tokens, of experts and of choices, warps."""
    row = power(sizes.experts, 16)
    columns = row if top_k else min(row, 64)
    if lanes(sizes.rank) >= 16 and sizes.heads:
        tokens, warps = 16, 4 if columns <= 256 else 8
    elif sizes.heads and (columns > 64 or not top_k):
        tokens, warps = max(1, min(2048 // columns, 16)), 4
    else:  # a row within a warp: its largest logit is found without waiting for others
        tokens = max(1, min((256 if sizes.heads else 128) // columns, 16))
        warps = min(16, max(1, columns // 1024))
    return {"BT": tokens, "BN": columns, "BK": power(top_k, 1), "num_warps": warps}


def selects_at_once(sizes: Sizes) -> bool:
    """Tell whether logits and selection of a block fit in a program's registers and memory."""
    rank, row = sizes.rank, power(sizes.experts, 16)
    return row <= 512 if lanes(rank) < 16 else row * max(16, rank) <= 8192


def query_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of anchors, warps."""
    tokens, limit = (16, 32) if lanes(sizes.rank) >= 16 else (4, 256)
    return {"BT": tokens, "BC": min(power(sizes.experts * sizes.heads, 16), limit), "num_warps": 2}


def anchors_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of anchors."""
    return {"BT": 16, "BC": min(power(sizes.experts * sizes.heads, 16), 64)}


def project_backward_blocks(sizes: Sizes) -> dict[str, int]:
    """Blocks of tokens and of d, warps."""
    row = power(sizes.hidden, 16)
    if lanes(sizes.rank) < 16:
        width = min(row, 1024)
        return {"BT": min(16, 4096 // width), "BD": width}
    return {"BT": 32, "BD": min(row, 64), "num_warps": 2}


def lanes(rank: int) -> int:
    """Lanes that a rank takes; from 16 on products over it run on the matrix units."""
    count = power(rank, 1)
    return count if count <= 4 else max(16, count)


def power(size: int, smallest: int) -> int:
    """Return the least power of 2 that is at least ``size``, and ``smallest`` at least."""
    return max(smallest, triton.next_power_of_2(max(1, size)))
