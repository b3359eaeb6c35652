"""Joins a trained run with the diagnostics: the weights, the validation data, the numbers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from l2r.data.run_folder import RunFolder
from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe

_SHOWN_CLASSES = 20  # classes with a row of their own in figures; the rest share one
_DRAWN_IMAGES = 8


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> dict[str, Any]:
    """Routing summary of a finished run on its own validation data."""
    return _DIAGNOSE[type(recipe)](run, recipe)


def _diagnose_language(run: RunFolder, recipe: LanguageRecipe) -> dict[str, Any]:
    from l2r.diagnostics.summary import summarise_routing
    from l2r.models import load_causal_lm
    from l2r.training.language import LanguageTask

    model, _ = load_causal_lm(run.path)
    dataset = LanguageTask(recipe, lambda line: None).validation
    section = recipe.evaluation
    count = min(len(dataset), section.max_batches * section.batch_size)
    chosen = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    parts = np.array_split(chosen, max(1, count // section.batch_size))
    batches = ({**dataset.rows(part), "use_cache": False} for part in parts)
    return summarise_routing(model, batches, dataset.domains)


def _diagnose_vision(run: RunFolder, recipe: VisionRecipe) -> dict[str, Any]:
    """The same with the class of an image as its domain; writes patches.npz beside it."""
    from l2r.data.images import standardise
    from l2r.diagnostics.patches import patch_routing, save_patch_routing
    from l2r.diagnostics.summary import summarise_routing
    from l2r.evaluation.accuracy import sample_indices
    from l2r.models import load_image_classifier
    from l2r.training.vision import VisionTask

    model = load_image_classifier(run.path)
    dataset = VisionTask(recipe, lambda line: None).validation
    data, section = recipe.data, recipe.evaluation
    names = dataset.classes
    if len(names) > _SHOWN_CLASSES:
        names = (*names[: _SHOWN_CLASSES - 1], "other")
    chosen = sample_indices(dataset, section.max_batches * section.batch_size)
    parts = np.array_split(chosen, max(1, len(chosen) // section.batch_size))

    def inputs(indices: Any) -> dict[str, Any]:
        batch = dataset.rows(indices)
        images = standardise(batch.pixels / 255, data.mean, data.deviation)
        return {"pixel_values": images, "domain": batch.labels.clamp_max(len(names) - 1)}

    side = recipe.model.image_size // recipe.model.patch_size
    batch = dataset.rows(chosen[:: max(1, len(chosen) // _DRAWN_IMAGES)][:_DRAWN_IMAGES])
    images = standardise(batch.pixels / 255, data.mean, data.deviation)
    routing = patch_routing(model, images, (side, side))
    save_patch_routing(
        run.patches, routing, batch.pixels.numpy(), batch.labels.numpy(), dataset.classes
    )
    return summarise_routing(model, (inputs(part) for part in parts), names)


_DIAGNOSE: dict[type[Any], Callable[..., dict[str, Any]]] = {
    LanguageRecipe: _diagnose_language,
    VisionRecipe: _diagnose_vision,
}
