"""Effects of the screens of a study, by screen and metric."""

from l2r_lab.files.study import ScreenDesign, Study
from l2r_lab.stats.effects import Effect, effects_of

_SCREENED = ("validation_ce", "flipped_tokens", "routing_gain", "load_entropy")


def effects_by_screen(study: Study) -> dict[str, dict[str, list[Effect]]]:
    """Effects by screen and metric, of the screens whose runs so far separate them."""
    by_screen = {name: _effects_of(study, screen) for name, screen in study.screens.items()}
    return {name: effects for name, effects in by_screen.items() if effects}


def _effects_of(study: Study, screen: ScreenDesign) -> dict[str, list[Effect]]:
    own = [result for result in study.results if result.arm in screen.arms]
    cells, seeds = [screen.arms[r.arm] for r in own], [r.seed for r in own]
    effects = {}
    for metric in _SCREENED:
        if any(metric not in r.trained for r in own):
            continue  # older than the metric
        values = [r.trained[metric] for r in own]
        try:
            effects[metric] = effects_of(screen.levels, screen.interactions, cells, seeds, values)
        except ValueError:
            return {}
    return effects


def loss_effects(study: Study) -> list[tuple[str, Effect]]:
    """Effects on the validation loss with their screens, largest fall first, rises last."""
    every = [
        (screen, effect)
        for screen, effects in effects_by_screen(study).items()
        for effect in effects.get("validation_ce", [])
    ]
    return sorted(every, key=lambda one: one[1].change.mean)
