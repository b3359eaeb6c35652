"""Routers of every form that certificates know, with parameters away from their start."""

import torch

from l2r import build_router

HIDDEN, EXPERTS, TOP_K = 12, 6, 2

FORMS = {
    "linear": ("linear", {}),
    "linear_sips": ("linear_sips", {}),
    "linear_sips, batchnorm": ("linear_sips", {"query_norm": "batchnorm"}),
    "xmoe": ("xmoe", {}),
    "xmoe, bias": ("xmoe", {"bias": True, "temperature": 0.5}),
    "xmoe, raw query": ("xmoe", {"normalize_query": False, "rank": 5}),
    "dot, one anchor": ("l2r_dot", {"heads": 1}),
    "cosine, one anchor": ("l2r_cosine", {"heads": 1}),
    "sips, one anchor": ("l2r_sips", {"heads": 1}),
    "dot": ("l2r_dot", {"heads": 4}),
    "cosine": ("l2r_cosine", {"heads": 4}),
    "sips": ("l2r_sips", {"heads": 4}),
    "sips, no norm": ("l2r_sips", {"heads": 4, "query_norm": "none"}),
    "sips, batchnorm": ("l2r_sips", {"heads": 4, "query_norm": "batchnorm"}),
    "sips, rank 4": ("l2r_sips", {"heads": 3, "rank": 4, "gamma": 2.0, "beta": 0.5}),
    "dot, rank 4": ("l2r_dot", {"heads": 3, "rank": 4, "query_norm": "none"}),
    "cosine, rank 4": ("l2r_cosine", {"heads": 3, "rank": 4}),
}


def make(name, *, seed=0, hidden=HIDDEN, experts=EXPERTS, top_k=TOP_K):
    kind, options = FORMS[name]
    torch.manual_seed(seed)
    router = build_router(kind, hidden_size=hidden, num_experts=experts, top_k=top_k, **options)
    generator = torch.Generator().manual_seed(seed)

    def noise(value):
        return torch.randn(value.shape, generator=generator)

    with torch.no_grad():
        for part, value in router.named_parameters():
            if part == "anchors":
                value.mul_(1 + 0.4 * noise(value[..., :1]).abs())
            if part == "norm.weight":
                value.add_(0.3 * noise(value))
            if part == "magnitude_norm.weight":
                value.fill_(-0.4)
            if part == "magnitude_norm.bias":
                value.fill_(0.4)
        for part, value in router.named_buffers():
            if part.endswith("running_mean"):
                value.fill_(0.7)
            if part.endswith("running_var"):
                value.fill_(0.5)
    return router.eval()


def inputs(tokens, *, seed=1, hidden=HIDDEN, scale=1.3):
    return scale * torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
