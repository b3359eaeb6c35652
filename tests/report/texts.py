"""Text routing made of random numbers, for pages that need no model."""

import numpy as np

from l2r.files.arrays import TextRouting

WORDS = np.array([f" word{n}" for n in range(50)])


def random_text(
    *, layers=2, experts=6, chosen=2, rows=4, length=20, columns=20, seed=0, pieces=WORDS
):
    """Half of the rows are of each of two domains; all are shown."""
    draw = np.random.default_rng(seed)
    place = (layers, rows, columns)
    order = draw.random((*place, experts)).argsort(axis=-1)[..., :chosen]
    weights = -np.sort(-draw.random((*place, chosen)), axis=-1)
    tokens = np.random.default_rng(7).integers(0, len(pieces), (rows, length))
    vocabulary = draw.integers(0, len(pieces), (layers, experts, 3))
    counts = np.bincount(tokens.ravel(), minlength=len(pieces))
    return TextRouting(
        layers=np.array([f"model.layers.{n}.mlp.gate" for n in range(layers)]),
        remarks=np.array([""] * layers),
        domains=np.array(["speeches", "code"]),
        pieces=pieces,
        tokens=tokens,
        domain=np.arange(rows) * 2 // rows,
        shown=np.arange(rows),
        experts=order.astype(np.int16),
        weights=weights.astype(np.float32),
        margin=draw.exponential(size=place).astype(np.float32),
        entropy=draw.random(place).astype(np.float32),
        radius=draw.exponential(size=place).astype(np.float32),
        contexts=draw.integers(0, tokens.size, (layers, experts, 4)),
        context_weights=draw.random((layers, experts, 4)).astype(np.float32),
        vocabulary=vocabulary,
        vocabulary_counts=counts[vocabulary] // 2,
    )
