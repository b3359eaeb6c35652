"""Experts and dispatch: ours against transformers' implementations and a dense bound."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench import Bench, main
from benchmarks.contenders import forward_step, training_step
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.timing import Step
from l2r_lab.training.recipes import VisionRecipe, load_recipe


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer; ``skew`` sends half of the tokens to one expert first."""

    name: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    skew: bool = False


_FORMS = ("eager", "batched_mm", "grouped_mm")
_BATCHED_LIMIT = 2**31  # bytes of the weights that batched_mm copies for every assignment


def shapes(settings: BenchSettings) -> list[Shape]:
    """OLMoE's sizes, an eighth of them on a CPU, and the packaged ViT-S's; SwiGLU for both."""
    if settings.quick:
        return [Shape("tiny", 32, 16, 16, 8, 2)]
    if settings.device == "cuda":
        return [
            Shape("olmoe", 8192, 2048, 1024, 64, 8),
            Shape("olmoe, skewed", 8192, 2048, 1024, 64, 8, skew=True),
            _vit_s(images=64),
        ]
    return [
        Shape("olmoe / 8", 1024, 256, 128, 64, 8),
        Shape("olmoe / 8, skewed", 1024, 256, 128, 64, 8, skew=True),
        _vit_s(images=4),
    ]


def _vit_s(images: int) -> Shape:
    recipe = load_recipe("vit-s/l2r-sips")
    assert isinstance(recipe, VisionRecipe)
    vit = recipe.model_options()
    tokens = (vit["image_size"] // vit["patch_size"]) ** 2 + 1
    sizes = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
    return Shape("vit-s", images * tokens, *(vit[name] for name in sizes))


def run(settings: BenchSettings) -> Bench:
    """Forward and forward+backward of one layer's SwiGLU experts for given choices."""
    bench = Bench(
        "moe",
        settings,
        note="ratio: time over that of transformers' grouped_mm. dense bound: one "
        "feed-forward network with as many multiplications, no dispatch at all.",
    )
    for shape in shapes(settings):
        _shape(bench, shape)
    return bench


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def _shape(bench: Bench, shape: Shape) -> None:
    settings = bench.settings
    dtype = settings.dtype
    torch.manual_seed(0)
    x = torch.randn(shape.tokens, shape.hidden, device=settings.device, dtype=dtype)
    indices, weights = _choices(shape, settings.device, dtype)
    forms, experts = _contenders(shape, settings.device, dtype)
    expected = forms["transformers eager"](x, indices, weights).float()
    right = {}
    for name, form in forms.items():
        gap = (form(x, indices, weights).float() - expected).abs().max() / expected.abs().max()
        if name == "dense bound" or gap <= (1e-4 if dtype == torch.float32 else 3e-2):
            right[name] = form
    for phase in ("forward", "forward+backward"):
        steps = {
            name: _step(form, experts, x, indices, weights, phase) for name, form in right.items()
        }
        found = bench.compare(
            steps, "transformers grouped_mm", "ms", f"{shape.name}, {phase}", rounds=7
        )
        for name, times in found.items():
            bench.add(shape=shape.name, phase=phase, contender=name, **times)


def _step(
    form: Experts, experts: nn.Module, x: Tensor, indices: Tensor, weights: Tensor, phase: str
) -> Step:
    if phase == "forward":
        return forward_step(lambda x: form(x, indices, weights), [x])
    share = weights.clone().requires_grad_()
    return training_step(lambda x: (form(x, indices, share),), [share, *experts.parameters()], [x])


def _contenders(shape: Shape, device: str, dtype: torch.dtype) -> tuple[dict[str, Experts], Any]:
    """Make calls of the same experts under every implementation, and their module."""
    from l2r.hf.models import one_layer, register_experts

    ours = register_experts()
    model = one_layer(
        hidden_size=shape.hidden,
        intermediate_size=shape.width,
        num_experts=shape.experts,
        top_k=shape.top_k,
    )
    experts: Any = model.model.layers[0].mlp.experts.to(device, dtype)
    names = list(_FORMS)
    bytes_copied = 3 * shape.tokens * shape.top_k * shape.hidden * shape.width * dtype.itemsize
    if bytes_copied > _BATCHED_LIMIT:
        names.remove("batched_mm")

    def under(name: str) -> Experts:
        def call(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            experts.config._experts_implementation = name
            return experts(x, indices, weights)

        return call

    forms = {f"transformers {name}": under(name) for name in names}
    forms["l2r"] = under(ours)
    forms["dense bound"] = _dense(shape, experts)
    return forms, experts


def _dense(shape: Shape, experts: Any) -> Experts:
    """One expert of the layer on T k rows: the multiplications alone."""

    def call(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat(shape.top_k, 1)
        gate, up = nn.functional.linear(rows, experts.gate_up_proj[0]).chunk(2, dim=-1)
        out = nn.functional.linear(nn.functional.silu(gate) * up, experts.down_proj[0])
        return out[: x.shape[0]] * weights[:, :1]

    return call


def _choices(shape: Shape, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores = torch.rand(shape.tokens, shape.experts, device=device)
    if shape.skew:
        scores[: shape.tokens // 2, 0] = 2.0
    weights, indices = torch.softmax(scores, dim=1).topk(shape.top_k, dim=1)
    return indices, weights.to(dtype)


if __name__ == "__main__":
    raise SystemExit(main("moe", run))
