"""Numbers of a finished run: what its routers do on its own validation data, and its losses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from l2r.diagnostics.collect import LayerRecord, collect
from l2r.diagnostics.diagnose import Settings, diagnose
from l2r.diagnostics.metrics import normalized_entropy
from l2r.machine import pick_device
from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.runs.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.runs.final_losses import final_losses
from l2r.runs.folder import RunFolder

# Certificates and samples are for a look at one checkpoint; over many runs they cost too much.
_SETTINGS = Settings(certify=0, keep_sample=False)
Collected = tuple[list[LayerRecord], Sequence[str]]


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> Diagnosis:
    """Diagnosis of a finished run on its validation data, made once and kept in its folder."""
    if not is_diagnosed(run.path):
        records, domains = _COLLECT[type(recipe)](run, recipe)
        diagnose(records, domains=domains, settings=_SETTINGS).save(run.path)
    return read_diagnosis(run.path)


def measure(run: RunFolder, recipe: AnyRecipe) -> dict[str, float]:
    """What claims are about: routing means over layers, and the losses at the end."""
    diagnosis = diagnose_run(run, recipe)
    top1 = [normalized_entropy(torch.from_numpy(layer)) for layer in diagnosis.usage("top1")]
    return {**diagnosis.mean(), **final_losses(run), "top1_entropy": sum(top1) / len(top1)}


def _collect_language(run: RunFolder, recipe: LanguageRecipe) -> Collected:
    from l2r.checkpoints import load_causal_lm
    from l2r.training.language import LanguageTask

    device = pick_device("auto")
    model, _ = load_causal_lm(run.path)
    dataset = LanguageTask(recipe, lambda line: None).validation
    section = recipe.evaluation
    count = min(len(dataset), section.max_batches * section.batch_size)
    chosen = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    parts = np.array_split(chosen, max(1, count // section.batch_size))
    records = collect(
        model.to(device),
        ({n: v.to(device) for n, v in dataset.rows(part).items()} for part in parts),
        domains=dataset.domains,
        run=lambda module, inputs: module(**inputs, use_cache=False),
    )
    return records, dataset.domains


def _collect_vision(run: RunFolder, recipe: VisionRecipe) -> Collected:
    """The same with the class of an image as its domain; writes patches.npz beside it."""
    from l2r.checkpoints import load_image_classifier
    from l2r.checkpoints.image_input import open_image_input
    from l2r.diagnostics.patches import validation_patches

    model = load_image_classifier(run.path).to(pick_device("auto"))
    images = open_image_input(run.path, model.config, None)
    validation_patches(model, images, count=8).save(run.patches)
    section = recipe.evaluation
    batches = images.batches(
        section.max_batches * section.batch_size, section.batch_size, model.device
    )
    return collect(model, batches, domains=images.domains), images.domains


_COLLECT: dict[type[Any], Callable[..., Collected]] = {
    LanguageRecipe: _collect_language,
    VisionRecipe: _collect_vision,
}
