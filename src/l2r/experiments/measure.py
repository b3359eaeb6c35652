"""Joins a trained run with the diagnostics: the weights, the validation data, the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from l2r.machine import pick_device
from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.runs.folder import RunFolder


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> dict[str, Any]:
    """Routing summary of a finished run on its own validation data."""
    return _DIAGNOSE[type(recipe)](run, recipe)


def _diagnose_language(run: RunFolder, recipe: LanguageRecipe) -> dict[str, Any]:
    from l2r.checkpoints import load_causal_lm
    from l2r.diagnostics.collect import collect
    from l2r.diagnostics.summary import summarise_routing
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
    return summarise_routing(records, dataset.domains)


def _diagnose_vision(run: RunFolder, recipe: VisionRecipe) -> dict[str, Any]:
    """The same with the class of an image as its domain; writes patches.npz beside it."""
    from l2r.checkpoints import load_image_classifier
    from l2r.checkpoints.image_input import open_image_input
    from l2r.diagnostics.collect import collect
    from l2r.diagnostics.patches import save_patches
    from l2r.diagnostics.summary import summarise_routing

    model = load_image_classifier(run.path).to(pick_device("auto"))
    images = open_image_input(run.path, model.config, None)
    save_patches(run.patches, model, images, count=8)
    section = recipe.evaluation
    batches = images.batches(
        section.max_batches * section.batch_size, section.batch_size, model.device
    )
    records = collect(model, batches, domains=images.domains)
    return summarise_routing(records, images.domains)


_DIAGNOSE: dict[type[Any], Callable[..., dict[str, Any]]] = {
    LanguageRecipe: _diagnose_language,
    VisionRecipe: _diagnose_vision,
}
