"""One run of a model over rows of tokens: routes, inputs and gaps of its routers, and its logits.

Shape letters: T tokens of a batch, D hidden size, B rows, S tokens a row, V words.
"""

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.analysis.certificates.attack import decision_gap
from l2r.hf.routes import Routes, record, replay
from l2r.hf.swap import running_sites
from l2r.routers import RouterOutput
from l2r.routers.observe import evaluating, watched


class Reading(NamedTuple):
    """One run. routes: experts of its sequences. inputs [T, D] and gaps [T] of every router:
    smallest logit of the chosen experts minus largest of the others. logits [B, S, V]."""

    routes: Routes
    inputs: list[Float[Tensor, "T D"]]
    gaps: list[Float[Tensor, " T"]]
    logits: Float[Tensor, "B S V"]


@torch.no_grad()
def read_routing(
    model: nn.Module, ids: Int[Tensor, "B S"], routes: Routes | None = None
) -> Reading:
    """Run rows of tokens without padding, with the experts of ``routes`` where they are given."""
    sites = running_sites(model)
    inputs: list[Tensor] = []
    gaps: list[Tensor] = []

    def keep(x: Tensor, output: RouterOutput, name: str) -> None:
        logits, _, indices = output
        inside = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, indices, True)
        inputs.append(x.detach().reshape(len(logits), -1))
        gaps.append(decision_gap(logits.double(), inside).float())

    with evaluating(model), ExitStack() as stack:
        stack.enter_context(watched({site.path: site.router for site in sites}, keep))
        if routes is not None:
            stack.enter_context(replay(model, routes))
        recorder = stack.enter_context(record(model))
        output: Any = model(input_ids=ids, use_cache=False)
    return Reading(recorder.routes(), inputs, gaps, output.logits.float())
