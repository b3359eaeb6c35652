"""Independent float64 references in numpy, written with loops straight from the paper."""

import math

import numpy as np

EPS = 1e-6


def rms_normalized(x, gain, eps=1e-5):
    out = np.empty_like(x)
    for t, row in enumerate(x):
        out[t] = row / math.sqrt(sum(v * v for v in row) / len(row) + eps) * gain
    return out


def cosine(q, k, eps=EPS):
    norm_q, norm_k = max(math.sqrt(q @ q), eps), max(math.sqrt(k @ k), eps)
    return float(q @ k) / (norm_q * norm_k)


def score(kind, q, k, *, gamma=1.0, beta=1.0, p=4.0, rho_hat=None, eps=EPS):
    """Score of one query and one anchor: Eq. 7 (dot), cosine, Eq. 8 to 11 (sips)."""
    if kind == "dot":
        return float(q @ k)
    if kind == "cosine":
        return cosine(q, k, eps)
    rho = math.sqrt(q @ q) if rho_hat is None else rho_hat
    phi = gamma * (1 + beta * math.tanh(rho))
    psi = 1 + (math.sqrt(k @ k) - 1) / p
    return phi * psi * cosine(q, k, eps)


def expert_logits(kind, queries, anchors, rho_hat=None, **options):
    """Eq. 12 and 13 for queries [T, R] and anchors [N, H, R]."""
    out = np.empty((len(queries), len(anchors)))
    for t, q in enumerate(queries):
        rho = None if rho_hat is None else rho_hat[t]
        for n, heads in enumerate(anchors):
            z = [score(kind, q, k, rho_hat=rho, **options) for k in heads]
            top = max(z)
            out[t, n] = top + math.log(sum(math.exp(v - top) for v in z))
    return out


def softmax(z):
    out = np.empty_like(z)
    for t, row in enumerate(z):
        weights = [math.exp(v - max(row)) for v in row]
        out[t] = [w / sum(weights) for w in weights]
    return out


def balance_loss(logits, indices, variant="paper"):
    """Eq. 34 of one layer, and its variants."""
    probs = softmax(logits)
    tokens, experts = logits.shape
    chosen = indices[:, :1] if variant == "tutel" else indices
    total = 0.0
    for i in range(experts):
        used = sum(1 for row in chosen if i in row) / tokens
        total += sum(probs[t, i] for t in range(tokens)) / tokens * used
    return experts * total / (indices.shape[1] if variant == "olmoe" else 1)


def z_loss(logits):
    """Eq. 35."""
    return sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits) / len(logits)


def margin_loss(scores, top_k, gap):
    """Hinge on the k-th less the next score, in deviations of the token's scores."""
    total = 0.0
    for row in scores:
        down = sorted((float(v) for v in row), reverse=True)
        mean = sum(down) / len(down)
        sigma = math.sqrt(sum((v - mean) ** 2 for v in down) / len(down) + 1e-6)
        total += max(0.0, 1 - (down[top_k - 1] - down[top_k]) / (gap * sigma))
    return total / len(scores)
