"""Numbers of a run: its routers on its own validation data, and their routing gain."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from l2r.analysis import DiagnosisSubject, Extent, diagnose_subject
from l2r.analysis.diagnostics import (
    DiagnosisSettings,
    LayerRecord,
    bf16_copy,
    collect_records,
    count_flips,
    diagnose_layers,
    measure_routing_gain,
    perturbation_stability,
)
from l2r.files.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.files.final_losses import final_losses, late_losses
from l2r.files.folder import RunFolder
from l2r.functional import load_balancing_loss
from l2r.hf.checkpoints import update_card
from l2r.machine import pick_device
from l2r.routers import capture
from l2r.stats.entropy import normalized_entropy
from l2r_lab.studies.route_costs import route_costs
from l2r_lab.training import Ranks, build_task, check_text, load_final, open_run, validation_subject
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe

# Certificates and samples are for a look at one checkpoint; over many runs they cost too much.
_SETTINGS = DiagnosisSettings(certify=0, keep_sample=False)
_GAIN_ROWS = 64  # sequences whose loss is taken three times
_PATCHES = 8  # images of a page that shows several runs
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


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> Diagnosis:
    """Diagnosis of a finished run on its validation data, made once and kept in its folder."""
    seen = run.patches if isinstance(recipe, VisionRecipe) else run.text
    if not (is_diagnosed(run.path) and seen.is_file()):
        subject = open_run(run.path, recipe)
        size = recipe.evaluation.batch_size
        extent = Extent(size, gain=_GAIN_ROWS, patches=_PATCHES, settings=_SETTINGS)
        diagnose_subject(subject, extent).save(run.path)
        update_card(run, subject.model)
    return read_diagnosis(run.path)


def measure(run: RunFolder, recipe: AnyRecipe, sample: int) -> tuple[Measures, Measures]:
    """Measures of a finished run, and those of its model before the first step.

    Losses are over all that ``recipe.evaluation`` validates on; routing over ``sample`` tokens or
    images, spread evenly. What other arithmetic costs and the losses of late quarters are of the
    end alone. Raises ValueError where the run's text has changed since it began.
    """
    task = build_task(recipe, _silent)
    check_text(run, task)
    device = torch.device(pick_device("auto"))
    torch.manual_seed(recipe.seed)  # as training did before it built the model
    model = task.build_model().to(device)
    losses = _validated(task.validate(model, device))
    routing = _routing(model, task, recipe, sample)
    untrained = {**losses, **_first_step(model, task, recipe), **routing}
    losses = {**final_losses(run), **_validated(run.read_metrics("validation")[-1])}
    model = load_final(run.path, recipe)[0].to(device)
    trained = {**losses, **late_losses(run), **_routing(model, task, recipe, sample)}
    if not isinstance(recipe, VisionRecipe):
        subject = _subject(model, task, recipe, sample)
        trained |= route_costs(subject, recipe.evaluation.batch_size)
    return trained, untrained


def _subject(model: nn.Module, task: Any, recipe: AnyRecipe, sample: int) -> DiagnosisSubject:
    return validation_subject(model, task, recipe, max(1, sample // task.item_size))


def _routing(model: nn.Module, task: Any, recipe: AnyRecipe, sample: int) -> Measures:
    subject = _subject(model, task, recipe, sample)
    batches = partial(subject.batches, recipe.evaluation.batch_size, subject.device)
    records = collect_records(model, batches(), run=subject.run)
    diagnosis = diagnose_layers(records, settings=_SETTINGS)
    mean = diagnosis.mean()
    top1 = [normalized_entropy(layer) for layer in diagnosis.by_layer("top1")]
    gain = measure_routing_gain(model, batches(), task.loss)
    flipped = count_flips(model, bf16_copy(model), batches(), subject.run)
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
    stabilities = []
    for record in records:
        x = record.as_passed()
        sigma = _RELATIVE_NOISE * float(x.float().square().mean().sqrt())
        stabilities.append(perturbation_stability(record.router, x, sigma, more=record.more))
    return {
        f"relative_{n}": sum(f[n].mean for f in stabilities) / len(stabilities)
        for n in stabilities[0]
    }


@torch.no_grad()
def _first_step(model: nn.Module, task: Any, recipe: AnyRecipe) -> Measures:
    """Training loss and balance loss of the first micro-batch, before it taught anything.

    The forward pass of a training step: it moves the running statistics of a BatchNorm.
    """
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
