"""Agreement of new routers with the old ones in whose place they would be.

Shape letters: T tokens, N experts, K chosen.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.hf.swap import Site
from l2r.routers import Router, RouterOutput
from l2r.routers.observe import block_bias, chosen_too, watched


def divergence(
    teacher: Float[Tensor, "T N"], student: Float[Tensor, "T N"], *, gate: str = "softmax"
) -> Float[Tensor, ""]:
    """Mean over tokens of KL(teacher | student) in nats, of the probabilities behind the logits.

    Another gate than ``softmax``: the sum over experts of the divergence of two coins, since each
    expert has a gate of its own.
    """
    if gate == "softmax":
        p, q = torch.log_softmax(teacher, -1), torch.log_softmax(student, -1)
        return (p.exp() * (p - q)).sum(-1).mean()
    split = nn.functional.logsigmoid
    yes, no = split(teacher), split(-teacher)
    coin = yes.exp() * (yes - split(student)) + no.exp() * (no - split(-student))
    return coin.sum(-1).mean()


@torch.no_grad()
def agreement(
    model: Any,
    site: Site,
    student: Router,
    x: Float[Tensor, "T D"],
    indices: Int[Tensor, "T K"],
) -> Float[Tensor, ""]:
    """Mean share of a token's K experts in ``indices`` that the student chooses too, float64."""
    chosen = student(x, *block_bias(model, site.path)).indices
    return chosen_too(chosen, indices).double().mean()


@torch.no_grad()
def compare(
    model: Any, sites: Sequence[Site], students: Sequence[Router], batches: Sequence[Tensor]
) -> list[tuple[float, float]]:
    """(agreement, divergence) per layer, what the students would do where the teachers are.

    Means over all tokens: batches may differ in their number.
    """
    sums, tokens = torch.zeros(len(sites), 2, dtype=torch.float64), 0
    for ids in batches:
        tokens += ids.numel()
        for row, (site, student, (x, logits, indices)) in enumerate(
            zip(sites, students, observe(model, sites, ids), strict=True)
        ):
            both = agreement(model, site, student, x, indices)
            apart = divergence(logits, student.logits(x), gate=site.selection.gate)
            sums[row] += ids.numel() * torch.stack([both.cpu(), apart.double().cpu()])
    return [(float(a), float(d)) for a, d in sums / tokens]


def observe(model: Any, sites: Sequence[Site], ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Input [T, D], logits [T, N] in float32 and indices [T, K] of every site's router.

    Of a layer that runs several times in a call, the tokens of all its passes.
    """
    seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {site.path: [] for site in sites}

    def keep(x: Tensor, output: RouterOutput, name: str) -> None:
        logits = output.logits.detach().float()
        seen[name].append((x.detach().flatten(0, -2), logits, output.indices.detach()))

    with watched({site.path: site.router for site in sites}, keep), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return [
        passes[0]
        if len(passes) == 1
        else (_joined(passes, 0), _joined(passes, 1), _joined(passes, 2))
        for passes in seen.values()
    ]


def _joined(passes: Sequence[tuple[Tensor, ...]], part: int) -> Tensor:
    return torch.cat([each[part] for each in passes])
