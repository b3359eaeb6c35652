"""The page of a study and its Markdown file: verdicts, precision, arms, curves, screens."""

from pathlib import Path

from l2r.files.atomic import write_text
from l2r.report.page import Key, Section, write_page
from l2r.report.palette import INK, VERDICT_COLORS
from l2r.report.verdicts import span
from l2r_lab.files.study import Study, hardware
from l2r_lab.report.evidence_figures import arms_of_curves, curves_with_bands, effect_plot, forest
from l2r_lab.report.evidence_scales import scale_plot, size_plot
from l2r_lab.report.evidence_tables import (
    arm_table,
    contrast_table,
    effect_table,
    effects_by_screen,
    method,
    precision_table,
    proposals,
    seed_tables,
)
from l2r_lab.report.verdicts import of_study
from l2r_lab.stats.contrasts import NOT_FINITE, SEEDS_MISSING
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
_BARS = "Bars are 95% intervals; primary contrasts are bold."
_KEY = Key(
    (
        *((color, verdict, "line") for verdict, color in VERDICT_COLORS.items()),
        ("color-mix(in srgb, " + INK + " 60%, transparent)", "the same at step 0", "line"),
        ("color-mix(in srgb, " + INK + " 20%, transparent)", "inside the margin", "box"),
    )
)


def write_study(study: Study, pages: Path, texts: Path) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md``."""
    tables = [contrast_table(study, primary=True), contrast_table(study, primary=False)]
    tables = [table for table in tables if table.rows]
    effects = effects_by_screen(study)
    effect_tables = [effect_table(name, changes) for name, changes in effects.items()]
    if effects:
        effect_tables.insert(0, proposals(study))
    sections = list[Section]()
    if tables:
        forests = [forest(study, margins=margins) for margins in (True, False)]
        figures = [figure for figure in forests if figure is not None]
        sections.append(Section("Contrasts", _BARS, [_KEY, *figures, *tables]))
    if effect_tables:
        text = (
            "Least squares over cells and seeds: change from a factor's first level, 95%; losses "
            "and gains in nats, load entropy as a share of the largest possible. What the "
            "model leaves, lack of fit included, is the error. Unadjusted: a screen chooses what "
            f"to test, it tests nothing. Reference levels: {_references(study)}."
        )
        figures = [effect_plot(effects), scale_plot(study)]
        sections.append(Section("Main effects", text, [*figures, *effect_tables]))
    arms, by_seed = arm_table(study), seed_tables(study)
    sections.append(Section("Precision", parts=[precision_table(study)])) if tables else None
    size = size_plot(study)
    if size is None:
        sections.append(Section("Arms", parts=[arms, *by_seed]))
    else:
        text = "Bars of the figure end at the smallest and the largest loss of an arm's seeds."
        sections.append(Section("Arms", text, [size, arms, *by_seed]))
    if study.results:
        text = "Mean of all steps between two points; bands are 95% intervals over the seeds."
        drawn, ran = len(arms_of_curves(study)), len(arms.rows)
        if drawn < ran:
            which = "those of contrasts" if tables else "the least losses of the first seed"
            text += f" {drawn} of {ran} arms are drawn: {which}."
        sections.append(Section("Training", text, [curves_with_bands(study)]))
    judged = [method(study), *_notes(study), _chance(study)] if tables else []
    sections.append(Section("Registration and method", " ".join([*_registration(study), *judged])))
    verdict = of_study(study)
    page = write_page(
        pages / "report.html",
        title=study.title,
        summary=study.question,
        sections=sections,
        verdict=verdict,
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
