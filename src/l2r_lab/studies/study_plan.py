"""Plans of studies: which arms are compared, by what, over how many seeds, said before the runs.

A plan is YAML, one of ``plans/`` or a file of one's own; registration.py reads it.
"""

from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from l2r.errors import InputError
from l2r.files.folder import SEED_MARK
from l2r.files.wording import nearest
from l2r_lab.files.study import AT_THE_END, LOSSES, MEASURES, OF_IMAGES, OF_TEXT
from l2r_lab.stats.contrasts import Contrast
from l2r_lab.stats.effects import design
from l2r_lab.studies.cells import Cell, as_word
from l2r_lab.training.recipes import (
    AnyRecipe,
    CorpusVersion,
    LanguageRecipe,
    RecipeSection,
    first_problem,
    load_recipe,
)

# All held-out tokens, once, at the end; every step is in some point of the curve.
_ALWAYS = (
    "evaluation.every=0",
    "evaluation.max_batches=1000000",
    "checkpoint.every=0",
    "training.log_every=10",
)
Changes = list[str]


class Seeds(RecipeSection):
    """From ``first`` on, ``least`` = ``most`` of them; in eight closed plans from least to most."""

    first: Annotated[int, Field(ge=0, lt=2**62)] = 0
    least: Annotated[int, Field(ge=2)] = 3
    most: PositiveInt = 3

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.least > self.most:
            raise InputError(f"least must be <= most; got {self.least} and {self.most}")
        return self


class Screen(RecipeSection):
    """Arms that differ in several factors at once.

    factors: name -> level -> change of the recipe; the first level is compared with. cells: one
    level of every factor. interactions: pairs of factors.
    """

    model_config = ConfigDict(coerce_numbers_to_str=True)  # levels such as 0.02

    changes: Changes = Field([])
    factors: dict[str, dict[str, str]]
    interactions: list[tuple[str, str]] = Field([])
    cells: list[list[str]]

    @model_validator(mode="after")
    def _cells_fit(self) -> Self:
        for cell in self.cells:
            wrong = [
                v for v, names in zip(cell, self.factors.values(), strict=False) if v not in names
            ]
            if wrong or len(cell) != len(self.factors):
                raise InputError(
                    f"cells must give a level of {', '.join(self.factors)}; got {cell}"
                )
            if self.cells.count(cell) > 1:
                raise InputError(f"cells must differ; got {cell} twice")
        for factor in (f for pair in self.interactions for f in pair if f not in self.factors):
            raise InputError(
                f"interactions: unknown factor {factor}{nearest(factor, self.factors)}"
            )
        names, columns = design(self.factors_levels(), self.interactions, self.cells)
        mean = np.ones((len(self.cells), 1))
        if np.linalg.matrix_rank(np.hstack([columns, mean])) <= len(names):
            raise InputError(f"{len(self.cells)} cells do not separate {len(names)} effects")
        return self

    def factors_levels(self) -> dict[str, list[str]]:
        """Levels of every factor, in order."""
        return {name: list(levels) for name, levels in self.factors.items()}

    def arms(self, name: str) -> dict[str, Changes]:
        """Arms by name, such as ``l2r gamma=4,z=none``."""
        found = {}
        for cell in self.cells:
            words = ",".join(f"{f}={v}" for f, v in zip(self.factors, cell, strict=True))
            changes = [self.factors[f][v] for f, v in zip(self.factors, cell, strict=True)]
            found[f"{name} {words}"] = [*self.changes, *(c for c in changes if c)]
        return found


class StudyPlan(RecipeSection):
    """Fields of a plan's file.

    prediction: what is expected, said before the runs. recipe, changes: what all arms share.
    tokens: budget of a run, None for the recipe's own. arms: name -> changes. margins: metric ->
    difference too small to matter; every primary contrast's metric has one. half_width: in closed
    plans alone, of the primary intervals from the deviation of the least seeds, at which no more
    seeds were added. sd: expected deviation of the paired differences of the primary contrasts,
    from which the page says what the study can find. sample: held-out tokens or images for routing
    gain and routing metrics; losses are over all. corpus_version: of the text of recipes that do
    not give one; a plan that does not either has the first, whatever version of the package runs
    it. added_by_training: metrics whose better and worse need that training added the difference:
    losses, or in earlier plans all. judge_secondary: whether secondary contrasts have verdicts, or
    intervals alone. whole_seeds: whether all arms of a seed run one
    after another in one process, and an interrupted seed is run again whole.
    """

    title: str
    question: str
    prediction: str = ""
    recipe: str
    changes: Changes = Field([])
    tokens: PositiveInt | None = None
    seeds: Seeds = Seeds()
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    margins: dict[str, PositiveFloat] = Field({})
    half_width: PositiveFloat | None = None
    sd: PositiveFloat | None = None
    sample: PositiveInt = 65_536
    corpus_version: CorpusVersion = 1
    added_by_training: Literal["all", "losses"] = "losses"
    judge_secondary: bool = True
    whole_seeds: bool = False
    arms: dict[str, Changes] = Field({})
    screens: dict[str, Screen] = Field({})
    contrasts: list[Contrast] = Field([])

    @model_validator(mode="after")
    def _contrasts_fit(self) -> Self:
        arms = self.all_arms()
        if not arms:
            raise InputError("arms: give at least 1, or a screen")
        for contrast in self.contrasts:
            for arm in (contrast.first, contrast.second, *(contrast.since or ())):
                if arm not in arms:
                    raise InputError(f"contrasts: unknown arm {arm!r}{nearest(arm, arms)}")
            if contrast.metric not in (measures := (*MEASURES, *AT_THE_END, *OF_IMAGES, *OF_TEXT)):
                hint = nearest(contrast.metric, measures)
                raise InputError(
                    f"contrasts: unknown metric {contrast.metric!r}{hint}; measured are "
                    f"{', '.join(measures)}"
                )
            if contrast.primary and contrast.metric not in self.margins:
                raise InputError(f"margins: a primary contrast needs one of {contrast.metric}")
        if self.half_width is not None and not any(c.primary for c in self.contrasts):
            raise InputError("half_width: needs a primary contrast, whose interval it bounds")
        return self

    @model_validator(mode="after")
    def _folders_differ(self) -> Self:
        by_folder: dict[str, str] = {}
        of_screens = [arm for name, screen in self.screens.items() for arm in screen.arms(name)]
        for arm in (*self.arms, *of_screens):
            folder = as_word(arm)
            if folder in by_folder:
                raise InputError(
                    f"arms: {by_folder[folder]!r} and {arm!r} have one folder name, {folder!r}; "
                    "rename one"
                )
            by_folder[folder] = arm
        return self

    def all_arms(self) -> dict[str, Changes]:
        """Arms by name, those of the screens too."""
        arms = dict(self.arms)
        for name, screen in self.screens.items():
            arms |= screen.arms(name)
        return arms

    def seeds_that_decide(self) -> int | None:
        """Seeds from whose deviation the number of all follows, where the plan adds seeds."""
        adds = self.half_width is not None and self.seeds.least < self.seeds.most
        return self.seeds.least if adds else None

    def learned_metrics(self) -> tuple[str, ...] | None:
        """Metrics whose difference training must have added; None for all."""
        return LOSSES if self.added_by_training == "losses" else None

    def cells(self, seeds: int) -> list[Cell]:
        """All arms with the first seed, then with the next. Raises ValueError for a bad recipe."""
        length = [] if self.tokens is None else [f"training.tokens={self.tokens}"]
        shared = [*_ALWAYS, *self.changes, *length]
        recipes = {n: load_recipe(self.recipe, [*shared, *c]) for n, c in self.all_arms().items()}
        return [
            Cell(
                arm,
                f"{as_word(arm)}{SEED_MARK}{seed}",
                self._with_corpus(recipe).model_copy(update={"seed": seed}),
                {},
            )
            for seed in range(self.seeds.first, self.seeds.first + seeds)
            for arm, recipe in recipes.items()
        ]

    def _with_corpus(self, recipe: AnyRecipe) -> AnyRecipe:
        if not isinstance(recipe, LanguageRecipe) or recipe.data.tokens:
            return recipe
        if "corpus_version" in recipe.data.model_fields_set:
            return recipe
        data = recipe.data.model_copy(update={"corpus_version": self.corpus_version})
        return recipe.model_copy(update={"data": data})


def validated_plan(name: str, values: Any, *, earlier: bool = False) -> StudyPlan:
    """Plan of a mapping. Raises ValueError, in one line, for a bad one.

    ``earlier``: it is one of ``earlier_plans``, which may add seeds and ask of every metric that
    training added the difference.
    """
    if earlier and isinstance(values, dict):
        values = {"added_by_training": "all", **values}
    try:
        plan = StudyPlan.model_validate(values)
    except ValidationError as error:
        raise InputError(f"plan {name}: {first_problem(error, StudyPlan)}") from error
    if not earlier:
        _check_rules(name, plan)
    return plan


def _check_rules(name: str, plan: StudyPlan) -> None:
    """Raise InputError for a rule that plans may not have any more."""
    least, most = plan.seeds.least, plan.seeds.most
    if plan.half_width is not None or least != most:
        got = f"least={least}, most={most}, half_width={plan.half_width}"
        raise InputError(
            f"plan {name}: the number of seeds must be fixed: seeds.least = seeds.most and no "
            f"half_width; got {got}"
        )
    if plan.added_by_training != "losses":
        raise InputError(
            f"plan {name}: added_by_training must be losses; got {plan.added_by_training}: flips "
            "and loads cost what they cost, whatever they were at step 0"
        )
