"""New plans: arms, a metric and a margin as a YAML file, with the seeds and hours that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import yaml

from l2r.errors import InputError
from l2r.files.atomic import write_text
from l2r.machine import describe_machine
from l2r_lab.files.study import StudyResults, hardware
from l2r_lab.stats.paired_t import detectable
from l2r_lab.studies.study_plan import StudyPlan, validated_plan
from l2r_lab.training.recipes import load_sections

PLANNED_POWER = 0.8  # share of studies that are to find the difference, if it is there


@dataclass(frozen=True)
class Question:
    """Arms that a study compares, and what it takes for a difference.

    arms: name -> changes of the recipe; every arm is compared with the first. metric: one of
    ``l2r_lab.files.study``. margin: smallest difference of the metric that matters, in its unit
    (nats for losses). sd: expected deviation of the paired differences over seeds. tokens: budget
    of a run, None for the recipe's own.
    """

    title: str
    recipe: str
    arms: Mapping[str, Sequence[str]]
    metric: str = "validation_ce"
    better: Literal["smaller", "larger"] = "smaller"
    margin: float = 0.02
    sd: float = 0.018
    tokens: int | None = None
    first_seed: int = 0
    alpha: float = 0.05

    def strictest_alpha(self) -> float:
        """Level of the first step of Holm's procedure over all contrasts."""
        return self.alpha / max(1, len(self.arms) - 1)

    def detectable(self, seeds: int) -> float:
        """Smallest difference that ``seeds`` seeds find with power 0.8."""
        return detectable(self.sd, seeds, self.strictest_alpha(), PLANNED_POWER)

    def seeds_needed(self, most: int = 200) -> int:
        """Fewest seeds that find a difference of the margin with power 0.8.

        Raises ValueError where ``most`` do not.
        """
        for seeds in range(2, most + 1):
            if self.detectable(seeds) <= self.margin:
                return seeds
        raise InputError(
            f"margin must be at least {self.detectable(most):.3g} for at most {most} seeds at "
            f"sd={self.sd:g}; got {self.margin:g}"
        )

    def check(self) -> None:
        """Raise ValueError for a bad arm, metric or recipe; routers' options are read in ``plan``.

        Imports neither torch nor scipy.
        """
        self._validated(seeds=2)
        for changes in self.arms.values():
            load_sections(self.recipe, changes)

    def plan(self, seeds: int) -> StudyPlan:
        """Plan this number of seeds. Raises ValueError for a bad arm, metric or recipe."""
        plan = self._validated(seeds)
        plan.cells(1)  # reads the recipe of every arm
        return plan

    def _validated(self, seeds: int) -> StudyPlan:
        baseline, *others = self.arms
        contrast = {"second": baseline, "metric": self.metric, "better": self.better}
        values: dict[str, Any] = {
            "title": self.title,
            "question": f"Is {self.metric} of {', '.join(others)} {self.better} than that of "
            f"{baseline}, by {self.margin:g} or more?",
            "recipe": self.recipe,
            **({} if self.tokens is None else {"tokens": self.tokens}),
            "corpus_version": 2,
            "added_by_training": "losses",
            "seeds": {"first": self.first_seed, "least": seeds, "most": seeds},
            "alpha": self.alpha,
            "sd": self.sd,
            "margins": {self.metric: self.margin},
            "arms": {name: list(changes) for name, changes in self.arms.items()},
            "contrasts": [{"first": name, **contrast, "primary": True} for name in others],
        }
        return validated_plan(self.title, values)


def write_plan(path: Path, question: Question) -> StudyPlan:
    """Write the plan with the seeds that its margin needs; the file must be new.

    Raises ValueError for a name without .yaml, a file that exists, fewer than two arms, a margin
    out of reach, and as ``Question.plan``.
    """
    if path.suffix not in {".yaml", ".yml"}:
        raise InputError(f"plan must be a file that ends in .yaml; got {path}")
    if path.exists():
        raise InputError(f"plan must be a new file; {path} exists")
    if len(question.arms) < 2:
        raise InputError(f"arm must be given at least twice; got {len(question.arms)}")
    question.check()
    seeds = question.seeds_needed()
    plan = question.plan(seeds)
    head = (
        f"# {len(question.arms)} arms, {seeds} seeds. At the expected deviation of the paired "
        f"differences, {question.sd:g},\n# {seeds} seeds find a difference of "
        f"{question.detectable(seeds):.3g} in {question.metric} with power {PLANNED_POWER:g}, in "
        "the strictest\n# step of Holm's procedure. Commit this file before the first run.\n"
    )
    values = plan.model_dump(mode="json", exclude_defaults=True)
    write_text(path, head + yaml.safe_dump(values, sort_keys=False, allow_unicode=True))
    return plan


def seconds_per_run(plan: StudyPlan, results: Path) -> float | None:
    """Median seconds of a run, from stored runs of the same model on this kind of machine.

    Time is taken as proportional to tokens. None where no such run is stored in the studies of
    ``results``, or the plan's length is not given in tokens.
    """
    recipe = plan.cells(1)[0].recipe
    model, here = recipe.model.model_dump(mode="json"), hardware(describe_machine())
    rates = [
        result.facts["seconds"] / result.facts["units"]
        for folder in sorted(results.glob("*/"))
        for result in StudyResults(folder).read()
        if hardware(result.facts) == here and result.facts["seconds"]
        if result.recipe["model"] == model
    ]
    tokens = recipe.training.tokens
    return median(rates) * tokens if rates and tokens else None
