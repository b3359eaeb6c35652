"""The page of a study and its Markdown file: verdicts, precision, arms, curves, screens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from l2r.files.atomic import write_text
from l2r.report.page import Key, Section, write_page
from l2r.report.palette import INK
from l2r.report.tables import Table
from l2r.report.verdicts import span
from l2r_lab.files.study import Study, hardware
from l2r_lab.report.evidence_figures import (
    arms_of_curves,
    curves_with_bands,
    effect_plot,
    forest,
    largest_effects,
)
from l2r_lab.report.evidence_scales import scale_plot, size_plot
from l2r_lab.report.evidence_tables import (
    arm_table,
    contrast_table,
    effect_table,
    first_table,
    method,
    precision_table,
    proposals,
    seed_tables,
)
from l2r_lab.report.screen_effects import effects_by_screen, loss_effects
from l2r_lab.report.study_verdict import of_study
from l2r_lab.stats.contrasts import NO_VERDICT, NOT_FINITE, SEEDS_MISSING
from l2r_lab.stats.effects import Effect
from l2r_lab.stats.paired_t import detectable

_TWO_INTERVALS = (
    "The difference has Stein's interval: it uses the deviation of the first {first} seeds only, "
    "and keeps its level although they set the number of all, if paired differences are normal. "
    "The plain paired t uses the deviation of all seeds and assumes besides that their number was "
    "fixed beforehand; verdicts do not use it."
)
_WHY = (
    "Why no verdict: the interval leaves out 0, but training did not add the difference (there "
    "before training), or its p-value exceeds alpha after Holm's procedure (not after Holm)."
)
_TOO_FEW = "Seeds missing: the plan's least seeds are not complete, so no contrast is decided."
_UNTRAINED = "Faint: the same models at step 0. Primary contrasts are the larger dots."
_INSIDE = ("color-mix(in srgb, " + INK + " 20%, transparent)", "inside the plan's margin", "box")
_MOST = 8  # contrasts that a first screen holds
_KEY = Key(((INK, "95% interval", "line"), _INSIDE))


def write_study(study: Study, pages: Path, texts: Path) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md``."""
    tables = [contrast_table(study, primary=True), contrast_table(study, primary=False)]
    tables = [table for table in tables if table.rows]
    effects = effects_by_screen(study)
    effect_tables = [effect_table(name, changes) for name, changes in effects.items()]
    if effects:
        effect_tables.insert(0, proposals(study))
    arms, by_seed = arm_table(study), seed_tables(study)
    method_text = _method(study) if tables else []
    sections = [
        *_size_section(study),
        *_contrast_sections(study, tables),
        *_screen_sections(study, effects, effect_tables),
        *_training_sections(study, contrasts=bool(tables)),
        Section("Every arm and seed", parts=[arms, *by_seed], folded=True),
    ]
    if tables:
        sections.append(Section("Precision", parts=[precision_table(study)], folded=True))
    registered = " ".join([*_registration(study), *method_text])
    sections.append(Section("Registration and method", registered, folded=True))
    verdict = of_study(study)
    page = write_page(
        pages / "report.html",
        title=study.title,
        summary=study.question,
        sections=sections,
        verdict=verdict,
        lead=_lead(study, tables),
    )
    parts = [f"# {study.title}", verdict.says, study.question, *_registration(study)]
    if tables:
        parts += [_chance(study), method(study), *_notes(study)]
        parts += [f"## {table.title}\n\n{table.to_markdown()}" for table in tables]
        parts.append(f"## Precision reached\n\n{precision_table(study).to_markdown()}")
    parts += [
        f"## {table.title}\n\n{table.to_markdown()}" for table in [*effect_tables, arms, *by_seed]
    ]
    text = "\n\n".join(part.strip() for part in parts if part)
    write_text(texts / "report.md", text + "\n")
    return page, texts / "report.md"


def _lead(study: Study, tables: Sequence[Table]) -> list[Any]:
    """Show the verdict: the contrasts it counts or the largest effects of the screens."""
    if not tables:
        changes = loss_effects(study)
        return [largest_effects(changes)] if changes else []
    shown = [j for j in study.judged if j.contrast.primary] or list(study.judged)
    if len(shown) > _MOST and (size := size_plot(study)) is not None:
        return [size]
    shown.sort(key=lambda j: j.verdict == NO_VERDICT)  # of many, those that are decided
    figure = forest(study, shown[:_MOST])
    return [] if figure is None else [figure, _KEY]


def _contrast_sections(study: Study, tables: Sequence[Table]) -> list[Section]:
    """Return the numbers of the primary contrasts, and folded all numbers of all."""
    if not tables:
        return []
    shown = [j for j in study.judged if j.contrast.primary] or list(study.judged)
    every = forest(study, study.judged, untrained=True)
    figures = [] if every is None else [every, _KEY]
    return [
        Section("Contrasts", parts=[first_table(shown)], folded=len(shown) > _MOST),
        Section("Every contrast and number", _UNTRAINED, [*figures, *tables], folded=True),
    ]


def _screen_sections(
    study: Study,
    effects: Mapping[str, Mapping[str, Sequence[Effect]]],
    tables: Sequence[Table],
) -> list[Section]:
    if not effects:
        return []
    text = (
        "Least squares over cells and seeds: change from a factor's first level, 95%; losses "
        "and gains in nats, load entropy as a share of the largest possible. What the "
        "model leaves, lack of fit included, is the error. Unadjusted: a screen chooses what "
        f"to test, it tests nothing. Reference levels: {_references(study)}."
    )
    proposed, *by_screen = tables
    return [
        Section("Proposed", parts=[replace(proposed, title="", digits=3)]),
        Section("Every effect", text, [effect_plot(effects), *by_screen], folded=True),
        Section("Loss and scales of every arm", parts=[scale_plot(study)], folded=True),
    ]


def _size_section(study: Study) -> list[Section]:
    size = size_plot(study)
    text = "Bars end at the smallest and the largest loss of an arm's seeds. Named: every arm, or "
    text += "of many those of which no other has both a smaller router and a lower loss."
    return [] if size is None else [Section("Loss and size of the router", text, [size])]


def _training_sections(study: Study, *, contrasts: bool) -> list[Section]:
    if not study.results:
        return []
    text = "Mean of all steps between two points; bands are 95% intervals over the seeds."
    drawn = len(arms_of_curves(study))
    ran = sum(bool(study.values(arm, "validation_ce")) for arm in study.arms)
    if drawn < ran:
        which = "those of contrasts" if contrasts else "the least losses of the first seed"
        text += f" {drawn} of {ran} arms are drawn: {which}."
    return [Section("Training", text, [curves_with_bands(study)], folded=True)]


def _method(study: Study) -> list[str]:
    return [method(study), *_notes(study), _chance(study)]


def _registration(study: Study) -> list[str]:
    """Paragraphs on the plan, the runs, the machine and the differences it could find."""
    ran = (
        f"{len(study.results)} runs: {len(study.arms)} arms, {study.seeds} whole "
        f"seed{'' if study.seeds == 1 else 's'} of {span((study.least, study.most))} in the plan."
    )
    if study.closed:
        ran += (
            " Closed: its number of seeds followed from the first of them, by a rule that needs "
            "more seeds than the plan allows. It is run no more."
        )
    if study.ended:
        ran += " Ended early."
    if study.seeds < study.least:
        yet = "" if study.ended else " yet"
        ran += f" Fewer than registered: no verdicts{yet}, and nothing here is the study's result."
    hours = sum(result.facts["seconds"] or 0 for result in study.results) / 3600
    machines = sorted({hardware(result.facts) for result in study.results})
    torch = sorted({str(result.facts["packages"]["torch"]) for result in study.results})
    if study.results:
        timed = f"{hours:.1f} hours of runs" if hours else "Run"  # resumed runs have no time
        ran += f" {timed} on {', '.join(machines)}, torch {', '.join(torch)}."
    lines = [f"Plan {study.name}, {study.state}.", ran]
    if study.prediction:
        lines.append(f"Predicted, said before: {study.prediction}")
    tests = sum(j.contrast.primary for j in study.judged)
    if tests and study.sd is not None:
        found = [
            f"{detectable(study.sd, n, study.alpha / tests, first=study.first):.3f} with {n} seeds"
            for n in dict.fromkeys((study.least, study.most))
        ]
        lines.append(
            f"Power, said before: at a deviation of {study.sd:g} of paired differences, each of "
            f"{tests} primary contrasts finds with probability 0.8 a difference of "
            f"{' and '.join(found)} (level {study.alpha:g} / {tests})."
        )
    return lines


def _notes(study: Study) -> list[str]:
    """Explain the second interval and the reasons, a sentence each, if the tables have them."""
    notes = []
    if any(j.plain is not None for j in study.judged):
        notes.append(_TWO_INTERVALS.format(first=study.first))
    reasons = {j.reason for j in study.judged}
    if reasons - {"", NOT_FINITE, SEEDS_MISSING}:
        notes.append(_WHY)
    if SEEDS_MISSING in reasons:
        notes.append(_TOO_FEW)
    return notes


def _chance(study: Study) -> str:
    if not study.judge_secondary:
        return ""
    count = sum(not j.contrast.primary for j in study.judged)
    return (
        f"Of {count} secondary contrasts without any difference, "
        f"{study.alpha * count:.1f} would be decided by chance."
    )


def _references(study: Study) -> str:
    """Find the first level of every factor of every screen."""
    firsts = [
        ", ".join(f"{factor} {levels[0]}" for factor, levels in screen.levels.items())
        for screen in study.screens.values()
    ]
    return "; ".join(dict.fromkeys(firsts))
