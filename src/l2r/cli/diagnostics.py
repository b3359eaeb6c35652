"""Joins a trained run with the diagnostics: the weights, the validation data, the numbers."""

from typing import Any

import numpy as np

from l2r.data.run_folder import RunFolder
from l2r.recipes.load import AnyRecipe


def diagnose_run(run: RunFolder, recipe: AnyRecipe) -> dict[str, Any]:
    """Routing summary of a finished run on its own validation data."""
    from l2r.diagnostics.summary import summarise_routing
    from l2r.models import load_causal_lm
    from l2r.training.language import LanguageTask

    model, _ = load_causal_lm(run.path)
    dataset = LanguageTask(recipe, lambda line: None).validation
    section = recipe.evaluation
    count = min(len(dataset), section.max_batches * section.batch_size)
    chosen = np.linspace(0, len(dataset) - 1, count).astype(np.int64)
    parts = np.array_split(chosen, max(1, count // section.batch_size))
    return summarise_routing(model, (dataset.rows(part) for part in parts), dataset.domains)
