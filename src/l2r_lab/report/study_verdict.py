"""The verdict of a study: what its primary contrasts came to, with numbers and units."""

from collections.abc import Iterable

from l2r.report.verdicts import Verdict
from l2r_lab.files.study import Study
from l2r_lab.report.metric_names import METRICS, NATS, SMALL
from l2r_lab.report.screen_effects import loss_effects
from l2r_lab.report.verdicts import seeds_in_words
from l2r_lab.stats.contrasts import NO_VERDICT, Judged

_CANNOT = "Anything outside its plan: other sizes, data, budgets and settings."
_NAMED = 4  # contrasts of a kind; a sentence of more is not read


def of_study(study: Study) -> Verdict:
    """Say what the primary contrasts of a plan came to; what a screen found without any."""
    if study.results and not study.judged:
        return _of_screen(study)
    return Verdict(_no_verdicts(study) or _verdicts(study), _CANNOT)


def _no_verdicts(study: Study) -> str:
    """Say why a study has no verdicts; nothing where it has."""
    some, least = seeds_in_words(study.seeds), study.least
    if not study.results:
        return "Nothing was run yet."
    if study.seeds < least:
        if study.ended:
            return f"Ended after {some} of at least {least}, without a verdict. {study.ended}"
        are = "is" if study.seeds == 1 else "are"
        return f"No verdict yet: {some} of at least {least} {are} complete."
    if study.judge_secondary or any(j.contrast.primary for j in study.judged):
        return ""
    return f"Intervals and no verdicts: {some}."


def _verdicts(study: Study) -> str:
    primary = [j for j in study.judged if j.contrast.primary]
    judged = primary or study.judged
    decided = [j for j in judged if j.verdict != NO_VERDICT]
    without = [j for j in judged if j.verdict == NO_VERDICT]
    kind = "primary contrast" if primary else "contrast"
    contrasts = f"{len(judged)} {kind}{'s' * (len(judged) > 1)}"
    if not decided:
        none = f"None of {contrasts} is" if len(judged) > 1 else f"The only {kind} is not"
        return f"{none} decided: {_listed(map(_open, without))}."
    are = "is" if len(decided) == 1 else "are"
    says = f"{len(decided)} of {contrasts} {are} decided: {_listed(map(in_numbers, decided))}."
    pairs = dict.fromkeys(f"{j.contrast.first} against {_second(j)}" for j in without)
    return says + (f" Without a verdict: {_listed(pairs)}." if without else "")


def in_numbers(j: Judged) -> str:
    """``l2r is 0.289 nats below low-rank in validation CE (better)``."""
    metric = j.contrast.metric
    name, digits = METRICS.get(metric, metric), ".2g" if metric in SMALL else ".3f"
    pair = f"{j.contrast.first} %s {_second(j)} in {name}"
    if j.verdict == "equivalent":
        return f"{pair % 'is equivalent to'} ({j.says().partition(', ')[2]})"
    size = f"{abs(j.difference.mean):{digits}}" + (" nats" if metric in NATS else "")
    side = "below" if j.difference.mean < 0 else "above"
    return f"{pair % f'is {size} {side}'} ({j.verdict})"


def _open(j: Judged) -> str:
    """``l2r against linear in validation CE (no gain above 0.020, no loss above 0.017)``."""
    metric = j.contrast.metric
    says = j.says(".2g" if metric in SMALL else ".3f")
    why = f"; {j.reason}" if j.reason and j.reason != says else ""
    name = METRICS.get(metric, metric)
    return f"{j.contrast.first} against {_second(j)} in {name} ({says}{why})"


def _second(j: Judged) -> str:
    """Name the second arm, or for a change of a difference also the pair before it."""
    since = j.contrast.since
    return j.contrast.second + (f", since {since[0]} and {since[1]}," if since else "")


def _of_screen(study: Study) -> Verdict:
    cannot = f"{_CANNOT} Its best cell is the best of many, so its loss is optimistic."
    proposes = "A screen proposes what to test next and decides nothing."
    effects = loss_effects(study)
    if not effects or effects[0][1].change.mean >= 0:
        none = f"None of {len(effects)} settings lowers the validation CE. " if effects else ""
        return Verdict(f"{none}{proposes}", cannot)
    screen, effect = effects[0]
    return Verdict(
        f"In {screen}, {effect.factor} {effect.level} lowers the validation CE by "
        f"{-effect.change.mean:.3f} nats, the most of {len(effects)} settings. {proposes}",
        cannot,
    )


def _listed(every: Iterable[str]) -> str:
    parts = list(every)
    more = f"; and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return "; ".join(parts[:_NAMED]) + more
