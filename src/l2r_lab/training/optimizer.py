"""AdamW with its parameter groups, and the learning rate as a function of the position."""

import math

import torch
from torch import nn

from l2r_lab.training.recipes import OptimizerSection

_TOKENS = ("cls_token", "mask_token", "position_embeddings")  # of a ViT, each a single vector


def build_optimizer(model: nn.Module, section: OptimizerSection) -> torch.optim.AdamW:
    """AdamW in groups, decayed and not; OLMoE decays every parameter.

    Anchors have groups of their own where ``anchor_lr`` is not 1; a group's ``lr_factor`` times the
    learning rate is its own. A learned temperature never decays: decay of its logarithm would pull
    it to 1.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        kind = name.rpartition(".")[2]
        skip = kind == "log_temperature"
        skip = skip or (kind == "anchors" and not section.decay_anchors)
        skip = skip or (_is_norm_like(kind, parameter) and not section.decay_norms)
        factor = section.anchor_lr if kind == "anchors" else 1.0
        groups.setdefault((not skip, factor), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "weight_decay": section.weight_decay if decayed else 0.0,
                "lr": section.lr * factor,
                "lr_factor": factor,
            }
            for (decayed, factor), parameters in groups.items()
            if parameters
        ],
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        fused=True,
    )


def _is_norm_like(kind: str, parameter: nn.Parameter) -> bool:
    """Tell whether ``decay_norms`` is about a parameter, by the last part of its name.

    Gains of norms are vectors; biases of stacked experts are [N, F].
    """
    return parameter.dim() < 2 or kind.endswith("bias") or kind in _TOKENS


def learning_rate(section: OptimizerSection, position: int, end: int) -> float:
    """Learning rate after ``position`` of ``end`` tokens (or samples).

    Linear from warmup_start * lr to lr, then a cosine to final * lr. A warmup longer than the
    whole run is cut to it.
    """
    warmup = min(section.warmup, end)
    if position < warmup:
        share = section.warmup_start + (1 - section.warmup_start) * position / warmup
        return section.lr * share
    progress = min(1.0, (position - warmup) / max(1, end - warmup))
    share = section.final + (1 - section.final) * 0.5 * (1 + math.cos(math.pi * progress))
    return section.lr * share
