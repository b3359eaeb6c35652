"""Small models, and the experts that their blocks are given."""

from contextlib import contextmanager

import torch

from l2r import L2RConfig, L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.routes import Fingerprint
from l2r.hf.routes.layers import fingerprint_of
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from tests.hf.families import TINY, tiny_model
from tests.hf.routes.made import drawn


def family_model(name, swapped=False):
    model = tiny_model(FAMILIES[name])
    return replace_routers(model, L2RConfig(rank=2, heads=4)) if swapped else model


def own_model(**router):
    sizes = {key: value for key, value in TINY.items() if key != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=8, router=router or {"kind": "linear"})
    torch.manual_seed(0)
    return L2rOlmoeForCausalLM(config).eval()


def token_ids(rows=2, columns=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, TINY["vocab_size"], (rows, columns), generator=generator)


def drawn_for(model, counts, seed=0, **more):
    of = fingerprint_of(model)
    assert isinstance(of, Fingerprint)
    return drawn(counts, of, seed, **more)


@contextmanager
def given_experts(model):
    """Experts [T, K] that the blocks give to their experts, call after call."""
    seen, hooks = [], []
    for module in model.modules():
        inner = getattr(module, "experts", None)
        if isinstance(inner, torch.nn.Module):
            see = lambda _, args: seen.append(args[1].clone())  # noqa: E731
            hooks.append(inner.register_forward_pre_hook(see))
    yield seen
    for hook in hooks:
        hook.remove()
