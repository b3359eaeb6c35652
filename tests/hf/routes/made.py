"""Routes with drawn experts."""

import numpy as np

from l2r.hf.routes import Fingerprint, Routes


def fingerprint(num_experts=8, top_k=2, layers=(1, 3), **more):
    more = {"hidden_layers": 4, "model_type": "olmoe", **more}
    return Fingerprint(num_experts=num_experts, top_k=top_k, layers=layers, **more)


def drawn(counts=(3, 0, 5), of=None, seed=0, **more):
    """Every token chooses different experts, drawn evenly."""
    of = of or fingerprint()
    tokens, layers = sum(counts), len(of.layers)
    values = np.random.default_rng(seed).random((tokens, layers, of.num_experts))
    experts = values.argsort(axis=-1)[..., : of.top_k]
    lengths = more.pop("lengths", counts)
    return Routes(experts, of, np.array(lengths), np.array(counts), **more)
