"""What transformers says of a checkpoint: its own forward, and numbers worked out from it.

The references of cells.py: of l2r it imports the table of families alone, for names.
"""

import json
import math
from contextlib import contextmanager
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from l2r.hf.swap.families import FAMILIES
from tests.hf.families import auto_class

# Families whose routers multiply what they get by their weights as they are, without a conversion.
SAME_DTYPE = (
    "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "qwen3_next", "mellum", "jamba", "mixtral",
    "minimax", "qwen3_5_moe_text", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "cohere2_moe", "phimoe", "laguna", "lfm2_moe", "afmoe", "qwen4_exp_text",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "aria_text", "granitemoe_swa", "mistral4",
    "deepseek_v4",
)  # fmt: skip
BY_TOKEN = ("DeepseekV4HashRouter",)
OURS = ("L2RRouter", "LinearRouter")


class Call(NamedTuple):
    """One call of a router: what its block passed, and what it returned."""

    router: nn.Module
    x: Tensor
    more: tuple[Tensor, ...]
    logits: Tensor
    weights: Tensor
    chosen: Tensor

    def first(self):
        return self.chosen.gather(1, self.weights.argmax(dim=1, keepdim=True))[:, 0]

    def sets(self):
        return self.chosen.sort(dim=1).values


def opened(folder, dtype):
    """By the class that wrote it, or the Auto class in which ours of that name stands."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = getattr(transformers, name, None)
    kind = kind or auto_class(AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, dtype=dtype).eval()


def routers_of(family, model):
    """The routers of text by their paths, whatever the rest of the model has."""
    kinds = (FAMILIES[family].router, *BY_TOKEN, *OURS)
    return {
        path: part
        for path, part in model.named_modules()
        if type(part).__name__ in kinds and "vision_moe" not in path
    }


@torch.no_grad()
def forward(family, model, ids):
    """Logits [B, S, V] and the calls of all routers."""
    with calls_of(family, model) as calls:
        logits = model(input_ids=ids, use_cache=False).logits
    return logits.float(), calls


@contextmanager
def calls_of(family, model):
    """The calls of all routers inside the block, in their order."""
    calls, hooks = [], []
    for router in routers_of(family, model).values():

        def keep(module, args, named, output):
            x, *more = (*args, *named.values())
            calls.append(Call(module, x, tuple(more), *output))

        hooks.append(router.register_forward_hook(keep, with_kwargs=True))
    yield calls
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def forced(family, model, ids, calls):
    """Logits of a forward whose routers choose and weigh as in ``calls``, but those by token id."""
    hooks = []
    for router, call in zip(routers_of(family, model).values(), calls, strict=True):
        if type(router).__name__ in BY_TOKEN:
            continue

        def give(module, args, output, call=call):
            return (output[0], call.weights, call.chosen)

        hooks.append(router.register_forward_hook(give))
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits.float()


@torch.no_grad()
def plain_numbers(call):
    """Margins, loads and directions of one router's tokens, in float64."""
    logits, weights, chosen = call.logits.double(), call.weights.double(), call.chosen
    x = compared(call)
    best = logits.topk(2).values
    margin, spread = best[:, 0] - best[:, 1], logits.std(dim=1, unbiased=False)
    count = logits.shape[1]
    load = torch.bincount(chosen.flatten(), minlength=count).double()
    importance = torch.zeros(count).double().scatter_add(0, chosen.flatten(), weights.flatten())

    def entropy(part):
        share = part / part.sum()
        return -(share * share.clamp_min(1e-300).log()).sum() / math.log(count)

    units = x / x.norm(dim=1, keepdim=True)
    between = (units @ units.T)[~torch.eye(len(x), dtype=torch.bool)]
    return {
        "mean_margin": margin.mean(),
        "low_margin_rate": (margin < 0.2).double().mean(),
        "scale_free_margin": (margin / spread).mean(),
        "logit_spread": spread.mean(),
        "entropy": entropy(load),
        "cv": load.std(unbiased=False) / load.mean(),
        "max_over_mean": load.max() / load.mean(),
        "min_over_mean": load.min() / load.mean(),
        "dead_experts": (load == 0).sum(),
        "importance_entropy": entropy(importance),
        "importance_cv": importance.std(unbiased=False) / importance.mean(),
        "first_experts": len(call.first().unique()),
        "weight_sum": weights.sum(dim=1).mean(),
        "cosine_variance": between.var(unbiased=False),
    }


def losses(calls):
    """L_bal and L_z of the paper's Eq. 34 and 35, the mean over calls, in float64."""
    balance, z = [], []
    for call in calls:
        logits = call.logits.detach().double()
        used = torch.bincount(call.chosen.flatten(), minlength=logits.shape[1]) / len(logits)
        balance.append(logits.shape[1] * (logits.softmax(dim=1).mean(dim=0) * used).sum())
        z.append(logits.logsumexp(dim=1).square().mean())
    return float(sum(balance) / len(balance)), float(sum(z) / len(z))


def next_token_loss(logits, ids):
    """Cross-entropy of the next token, in nats."""
    return float(cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def compared(call):
    """What the scores of a router compare: its inputs, or the queries of ours with anchors."""
    x = call.x.double().flatten(0, -2)
    tensors = {name: tensor.double() for name, tensor in call.router.named_parameters()}
    if "anchors" not in tensors:
        return x
    scale = (x.square().mean(dim=1, keepdim=True) + call.router.config.norm_eps).rsqrt()
    return (x * scale * tensors["norm.weight"]) @ tensors["projection.weight"].T


@torch.no_grad()
def under_noise(call, sigma=0.02, repeats=5):
    """Shares of tokens with the same first expert, and of experts in both sets, by Jaccard."""
    # a sample of all tokens, in the order of their keys
    keys = torch.rand(len(call.logits), dtype=torch.float64, generator=seeded())
    x = call.x.reshape(len(keys), -1)[keys.argsort()]
    x = x[None] if call.x.dim() == 3 else x
    noise = seeded()
    _, weights, chosen = call.router(x, *call.more)
    same, overlap = [], []
    for _ in range(repeats):
        moved = x + sigma * torch.randn(x.shape, generator=noise).to(x.dtype)
        _, other_weights, other = call.router(moved, *call.more)
        firsts = [
            c.gather(1, w.argmax(dim=1, keepdim=True))
            for w, c in ((weights, chosen), (other_weights, other))
        ]
        same.append((firsts[0] == firsts[1]).double().mean())
        both = [len({*a} & {*b}) for a, b in zip(chosen.tolist(), other.tolist(), strict=True)]
        k = chosen.shape[1]
        overlap.append(sum(n / (2 * k - n) for n in both) / len(both))
    return {"stability": torch.stack(same).mean(), "topk_overlap": sum(overlap) / repeats}


def seeded():
    return torch.Generator().manual_seed(0)


@torch.no_grad()
def assert_certified(call, arrays, layer):
    """No radius is above the distance to the nearest tie, and none is broken by the router."""
    keys = torch.rand(len(call.logits), dtype=torch.float64, generator=seeded())
    radii = [torch.from_numpy(arrays[f"{layer}.certified_{name}"]) for name in ("top1", "topk")]
    x = call.x.reshape(len(keys), -1)[keys.argsort()][: len(radii[0])]
    matrix = next(p for p in call.router.parameters() if p.dim() == 2).double()
    bias = getattr(call.router, "bias", None)
    _, weights, chosen = call.router(x)
    first = chosen.gather(1, weights.argmax(dim=1, keepdim=True))
    is_linear = not hasattr(call.router, "anchors")
    logits = x.double() @ matrix.T + (0 if bias is None else bias.double()) if is_linear else None
    for radius, kept in zip(radii, (first, chosen), strict=True) if is_linear else ():
        for token, (within, experts) in enumerate(zip(radius, kept.tolist(), strict=True)):
            others = [n for n in range(len(matrix)) if n not in experts]
            ties = [
                (logits[token, i] - logits[token, j]) / (matrix[i] - matrix[j]).norm()
                for i in experts
                for j in others
            ]
            assert 0 <= within <= max(0.0, float(min(ties)))
    generator = seeded()
    for _ in range(20):
        way = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for radius, kept in zip(radii, (first, chosen), strict=True):
            point = (x.double() + radius[:, None] * way / way.norm(dim=1, keepdim=True)).to(x.dtype)
            inside = (point.double() - x.double()).norm(dim=1) <= radius
            _, w, c = call.router(torch.where(inside[:, None], point, x))
            now = c.gather(1, w.argmax(dim=1, keepdim=True)) if kept is first else c
            assert torch.equal(now.sort(dim=1).values, kept.sort(dim=1).values)


def with_routers_of(family, model, other):
    """Give a model in bf16 the routers of another, and the biases that its blocks pass."""
    for path, router in routers_of(family, model).items():
        copy, block = other.get_submodule(path), path.rpartition(".")[0]
        dtype, plain = next(router.parameters()).dtype, copy.forward
        own = type(router).__name__ in OURS  # which convert what they get to their own dtype
        if family in SAME_DTYPE and dtype != torch.bfloat16 and not own:

            def in_own(x, *more, plain=plain, dtype=dtype):
                logits, weights, chosen = plain(x.to(dtype), *more)
                return logits, weights.to(x.dtype), chosen

            copy.forward = in_own
        copy.load_state_dict(router.state_dict(), assign=True)
        for name in ("e_score_correction_bias", "expert_bias"):
            given = getattr(model.get_submodule(block), name, None)
            if given is not None:
                getattr(other.get_submodule(block), name).data = given.data


def round_to_int8(family, model):
    """Linear layers and experts rounded to 255 steps of each output's largest weight."""
    skipped = (*routers_of(family, model), "lm_head")
    for path, part in model.named_modules():
        if path.startswith(skipped):
            continue
        inputs = -2 if getattr(part, "is_transposed", False) else -1
        weights = [part.weight] if isinstance(part, nn.Linear) else []
        if path.endswith("experts"):
            weights = [p for p in part.parameters(recurse=False) if p.dim() == 3]
        for weight in weights:
            step = weight.data.float().abs().amax(dim=inputs, keepdim=True).clamp_min(1e-30) / 127
            weight.data = ((weight.data.float() / step).round() * step).to(weight.dtype)
