"""Two ranks that replay their halves of a batch have the gradients of one that replays it all."""

import pytest
import torch

from l2r import record, replay
from l2r.hf.models.version_names import checkpoint_activations
from l2r_lab.training.parallel import parallelize
from l2r_lab.training.ranks import Ranks
from tests.hf.routes.models import drawn_for, family_model, token_ids
from tests.processes import on_two_ranks

MODELS = (("qwen3_moe", False), ("olmoe", True))
ROWS = 4


def replayed(kind, number, ranks):
    """Gradients by name, and routes recorded meanwhile, of this rank's rows."""
    torch.manual_seed(0)
    model, ids = family_model(*MODELS[number]), token_ids(rows=ROWS)
    routes = drawn_for(model, (12,) * ROWS)
    checkpoint_activations(model.train())
    model = parallelize(model, kind, ranks)
    rows = slice(ranks.rank * ROWS // ranks.world, (ranks.rank + 1) * ROWS // ranks.world)
    with replay(model, routes[rows]), record(model) as recorder:
        loss = model(ids[rows], use_cache=False).logits.logsumexp(-1).mean()
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = getattr(parameter.grad, "full_tensor", lambda g=parameter.grad: g)()
            gradients[name.removeprefix("module.")] = whole.clone()
    assert recorder.routes() == routes[rows]
    return gradients


def both(rank):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    kinds = [(kind, number) for kind in ("ddp", "fsdp2") for number in range(len(MODELS))]
    return {(kind, number): replayed(kind, number, ranks) for kind, number in kinds}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return on_two_ranks(both, tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.slow("two processes")
@pytest.mark.parametrize("number", range(len(MODELS)), ids=["stock", "swapped"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_replay_their_halves(kind, number, ran):
    alone = replayed("ddp", number, Ranks(0, 1, torch.device("cpu")))
    found = ran[kind, number]
    assert found.keys() == alone.keys()
    for name, gradient in found.items():
        bound = 64 * torch.finfo(torch.float32).eps * max(1e-3, alone[name].abs().max().item())
        torch.testing.assert_close(gradient, alone[name], rtol=0, atol=bound)
