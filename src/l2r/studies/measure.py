"""Numbers of a run: what its routers do on its own validation data, and what that is worth."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from l2r.analysis.diagnostics.choices import ChoiceLog
from l2r.analysis.diagnostics.collect import LayerRecord, collect
from l2r.analysis.diagnostics.diagnose import Settings, diagnose
from l2r.analysis.diagnostics.flips import bf16_copy, flips
from l2r.analysis.diagnostics.metrics import normalized_entropy
from l2r.analysis.diagnostics.reading import Batch
from l2r.analysis.diagnostics.robustness import perturbation_stability
from l2r.analysis.diagnostics.routing_gain import batch_loss, routing_gain, spread
from l2r.analysis.diagnostics.text_routing import TextTrace
from l2r.functional import load_balancing_loss
from l2r.hf.checkpoints.run_card import update_card
from l2r.machine import pick_device
from l2r.routers import capture
from l2r.runs.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.runs.final_losses import final_losses
from l2r.runs.folder import RunFolder
from l2r.training.ranks import Ranks
from l2r.training.recipes.load import AnyRecipe
from l2r.training.recipes.schema import LanguageRecipe
from l2r.training.recipes.vision import VisionRecipe
from l2r.training.task import build_task

# Certificates and samples are for a look at one checkpoint; over many runs they cost too much.
_SETTINGS = Settings(certify=0, keep_sample=False)
_GAIN_ROWS = 64  # sequences whose loss is taken three times
_RELATIVE_NOISE = 0.1  # of the root mean square of the router's inputs
_OF_DIAGNOSIS = {
    "load_entropy": "entropy",
    "max_over_mean": "max_over_mean",
    "dead_experts": "dead_experts",
    **{
        name: name
        for name in ("scale_free_margin", "mean_margin", "low_margin_rate", "cosine_variance")
    },
    "stability": "stability",
    "topk_overlap": "topk_overlap",
    **{name: name for name in ("logit_spread", "weight_sum", "first_experts")},
}
Measures = dict[str, float]
Batches = tuple[Callable[[], Iterator[Batch]], Sequence[str]]  # and the names of their domains


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> Diagnosis:
    """Diagnosis of a finished run on its validation data, made once and kept in its folder."""
    seen = run.patches if isinstance(recipe, VisionRecipe) else run.text
    if not (is_diagnosed(run.path) and seen.is_file()):
        section, kind = recipe.evaluation, type(recipe)
        model, tokenizer = _LOAD[kind](run.path)
        model = model.to(pick_device("auto"))
        rows = section.max_batches * section.batch_size
        batches, domains = _BATCHES[kind](build_task(recipe, _silent), recipe, rows, _device(model))
        log, few = ChoiceLog(), spread(batches(), rows, _GAIN_ROWS, section.batch_size)
        if isinstance(recipe, VisionRecipe):
            _save_patches(run, model)
            records = collect(model, batches(), domains=domains, run=_RUN[kind], reducers=[log])
        else:
            text = TextTrace(model, domains=domains)
            records = collect(
                model, batches(), domains=domains, run=_RUN[kind], reducers=[log, text]
            )
            text.result(tokenizer).save(run.text)
        diagnose(
            records,
            domains=domains,
            settings=_SETTINGS,
            choices=log.choices(),
            gain=routing_gain(model, few, batch_loss),
        ).save(run.path)
        update_card(run, model)
    return read_diagnosis(run.path)


def measure(run: RunFolder, recipe: AnyRecipe, sample: int) -> tuple[Measures, Measures]:
    """Measures of a finished run, and the same ones of its model before the first step.

    Losses are over all that ``recipe.evaluation`` validates on; routing over ``sample`` tokens or
    images, spread evenly.
    """
    task = build_task(recipe, _silent)
    device = torch.device(pick_device("auto"))
    torch.manual_seed(recipe.seed)  # as training did before it built the model
    model = task.build_model().to(device)
    losses = {**_validated(task.validate(model, device)), **_first_step(model, task, recipe)}
    untrained = {**losses, **_routing(model, task, recipe, sample)}
    losses = {**final_losses(run), **_validated(run.read_metrics("validation")[-1])}
    model = _LOAD[type(recipe)](run.path)[0].to(device)
    return {**losses, **_routing(model, task, recipe, sample)}, untrained


def _routing(model: nn.Module, task: Any, recipe: AnyRecipe, sample: int) -> Measures:
    kind = type(recipe)
    rows = max(1, sample // task.item_size)
    batches, _ = _BATCHES[kind](task, recipe, rows, _device(model))
    records = collect(model, batches(), run=_RUN[kind])
    diagnosis = diagnose(records, settings=_SETTINGS)
    mean = diagnosis.mean()
    top1 = [normalized_entropy(torch.from_numpy(layer)) for layer in diagnosis.by_layer("top1")]
    gain = routing_gain(model, batches(), task.loss)
    flipped = flips(model, bf16_copy(model), batches(), _RUN[kind])
    return {
        "routing_gain": gain.random,
        "shuffled_gain": gain.shuffled,
        **{name: mean[theirs] for name, theirs in _OF_DIAGNOSIS.items()},
        "top1_entropy": sum(top1) / len(top1),
        "flipped_decisions": flipped.decisions,
        "flipped_tokens": flipped.tokens,
        **_relative_robustness(records),
    }


def _relative_robustness(records: Sequence[LayerRecord]) -> Measures:
    """Stability and overlap under noise in proportion to what each router sees."""
    found = []
    for record in records:
        x = record.sample["x"]
        sigma = _RELATIVE_NOISE * float(x.float().square().mean().sqrt())
        found.append(perturbation_stability(record.router, x, sigma))
    return {f"relative_{n}": sum(f[n].mean for f in found) / len(found) for n in found[0]}


@torch.no_grad()
def _first_step(model: nn.Module, task: Any, recipe: AnyRecipe) -> Measures:
    """Training loss and balance loss of the first micro-batch, before it taught anything."""
    batch = task.micro_batches(0, Ranks(0, 1, _device(model)))[0]
    with capture(model) as captured:
        loss = float(task.loss(model, batch))
    variant = recipe.losses.balance_variant
    balance = load_balancing_loss(captured.logits(), captured.indices(), variant=variant)
    return {"train_ce": loss, "balance": float(balance)}


def _validated(numbers: dict[str, float]) -> Measures:
    """Cross-entropy, the mean over domains for language, and top-1 of images."""
    ce = numbers["ce/mean"] if "ce/mean" in numbers else numbers["ce"]
    return {"validation_ce": ce, **{n: v for n, v in numbers.items() if n == "top1"}}


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _silent(line: str) -> None:
    del line


def _language_batches(
    task: Any, recipe: LanguageRecipe, rows: int, device: torch.device
) -> Batches:
    """Instances of the held-out tokens, chosen as for validation."""
    dataset, size = task.validation, recipe.evaluation.batch_size
    chosen = task.choose_rows(dataset, rows)
    parts = np.array_split(chosen, max(1, len(chosen) // size))

    def batches() -> Iterator[Batch]:
        for part in parts:
            yield {name: value.to(device) for name, value in dataset.rows(part).items()}

    return batches, dataset.domains


def _vision_batches(task: Any, recipe: VisionRecipe, rows: int, device: torch.device) -> Batches:
    """Images spread evenly, with the class as the domain."""
    from l2r.training.image_input import ImageInput

    images = ImageInput(task.validation, task.recipe.data)
    return partial(images.batches, rows, recipe.evaluation.batch_size, device), images.domains


def _load_language(path: Path) -> tuple[nn.Module, Any]:
    from l2r.hf.checkpoints import load_causal_lm

    return load_causal_lm(path)


def _load_vision(path: Path) -> tuple[nn.Module, Any]:
    from l2r.hf.checkpoints import load_image_classifier

    return load_image_classifier(path), None


def _save_patches(run: RunFolder, model: nn.Module) -> None:
    from l2r.analysis.diagnostics.patches import validation_patches
    from l2r.training.image_input import open_image_input

    images = open_image_input(run.path, model.config, None)
    validation_patches(model, images, count=8).save(run.patches)


def _run_language(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(input_ids=inputs["input_ids"], use_cache=False)


def _run_vision(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    return model(pixel_values=inputs["pixel_values"])


_BATCHES: dict[type[Any], Callable[..., Batches]] = {
    LanguageRecipe: _language_batches,
    VisionRecipe: _vision_batches,
}
_LOAD: dict[type[Any], Callable[[Path], tuple[nn.Module, Any]]] = {  # with its tokenizer
    LanguageRecipe: _load_language,
    VisionRecipe: _load_vision,
}
_RUN: dict[type[Any], Callable[..., Any]] = {
    LanguageRecipe: _run_language,
    VisionRecipe: _run_vision,
}
