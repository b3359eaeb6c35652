"""Write the table of costs in docs/re-run-the-paper.md, from the planner.

    PYTHONPATH=. python -m scripts.pages.costs

Hours and memory of a GPU are the planner's, by formula; the rest is arithmetic on the model's size.
A test computes the table again.
"""

from dataclasses import dataclass
from pathlib import Path

from l2r_lab.planning import Assumptions, find_gpu, make_plan, planned_steps
from l2r_lab.training.data.olmoe_mix import plan_subset
from l2r_lab.training.recipes import VisionRecipe, load_recipe
from scripts.pages.marks import with_section

PAGE = Path(__file__).resolve().parents[2] / "docs" / "re-run-the-paper.md"
SECTION = "costs"
_WIDE = 4  # bytes of fp32
# Text by the dataset's card, 16.7 TB for the 3.86T tokens of dclm; that gzip and zstandard make a
# third of it is assumed.
_TEXT, _PACKED = 16.7 / 3.86, 3
SUBSET, SHARE, HOLD_OUT = 200_000_000_000, 0.06, 0.001  # of the page's commands
_IMAGENET = 145e9  # bytes of its two archives
_DECODED = 420  # images that one core decodes a second (docs/vision.md)


@dataclass(frozen=True)
class Costs:
    """One run: hours, GPUs, and bytes. peak: on a GPU. disk_training: while it writes the last
    checkpoint. host: of the machine, while a checkpoint is written. images: per second, read.
    """

    runs: int
    gpus: int
    gpu: str
    hours: float
    peak: float
    weights: float
    checkpoint: float
    finished: float
    disk_training: float
    host: float
    data: float
    download: float
    images: float | None

    @property
    def gpu_hours(self) -> float:
        """Hours of all GPUs of a run."""
        return self.hours * self.gpus


def costs(recipe_name: str, runs: int, gpus: int, gpu: str) -> Costs:
    """Costs of a recipe as it is committed, in its own form of parallel training."""
    recipe = load_recipe(recipe_name)
    given = Assumptions(find_gpu(gpu))
    plan = make_plan(
        recipe, gpus, given, parallel=recipe.training.parallel, scale=(gpus,), simulated=False
    )
    steps = planned_steps(recipe, plan.sizes)
    assert steps is not None
    seconds = steps * plan.best.step.seconds
    averaged = recipe.training.ema_decay > 0
    weights = _WIDE * plan.sizes.numbers
    checkpoint = (3 + averaged) * weights  # weights and AdamW's two slots
    exports = (1 + averaged) * weights
    keep = recipe.checkpoint.keep
    vision = isinstance(recipe, VisionRecipe)
    tokens = sum(domain.tokens for domain in plan_subset(SUBSET).domains)
    return Costs(
        runs=runs,
        gpus=gpus,
        gpu=gpu,
        hours=seconds / 3600,
        peak=plan.best.peak,
        weights=weights,
        checkpoint=checkpoint,
        finished=keep * checkpoint + exports,
        disk_training=(keep + 1) * checkpoint,
        # The writer holds tensors off the GPU, their bytes, and the file that it makes of them.
        host=3 * checkpoint,
        data=_IMAGENET if vision else 2 * tokens * (SHARE + HOLD_OUT),
        download=_IMAGENET if vision else tokens * _TEXT / _PACKED,
        images=steps * recipe.training.global_batch / seconds if vision else None,
    )


def language() -> Costs:
    """Costs of a language run on the paper's GPUs."""
    return costs("olmoe-1b-7b/l2r-sips", 13, 8, "b200")


def vision() -> Costs:
    """Costs of a ViT run on the paper's GPUs."""
    return costs("vit-s/l2r-sips", 10, 4, "a100")


def table() -> str:
    """Return the section of the page."""
    both = (language(), vision())
    head = "| | " + " | ".join(
        f"a {name} run, {c.gpus} {c.gpu.upper()} | all {c.runs}"
        for name, c in zip(("language", "ViT"), both, strict=True)
    )
    rows = [
        ("hours", *(_both(c, c.hours) for c in both)),
        ("GPU hours", *(_both(c, c.gpu_hours) for c in both)),
        ("memory of a GPU, GB", *(_one(c.peak / 1e9) for c in both)),
        ("memory of the host, GB", *(_one(c.host / 1e9) for c in both)),
        ("disk: a checkpoint, GB", *(_one(c.checkpoint / 1e9) for c in both)),
        ("disk: a run while it trains, GB", *(_one(c.disk_training / 1e9) for c in both)),
        ("disk: a finished run, GB", *(_both(c, c.finished / 1e9) for c in both)),
        ("disk: its exported weights alone, GB", *(_both(c, c.weights / 1e9) for c in both)),
        ("disk: data, once, GB", *(_all(c.data / 1e9) for c in both)),
        ("download, once, GB", *(_all(c.download / 1e9) for c in both)),
    ]  # fmt: skip
    lines = [f"{head} |", "|---" * 5 + "|"]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, *cells in rows]
    images = both[1].images
    assert images is not None
    note = (
        f"Images must come at {images:,.0f} per second, which takes {images / _DECODED:.0f} cores."
    )
    return "\n".join(lines) + f"\n\n{note}\n"


def _both(one: Costs, value: float) -> str:
    return f"{_number(value)} | {_number(one.runs * value)}"


def _one(value: float) -> str:
    return f"{_number(value)} | "


def _all(value: float) -> str:
    return f" | {_number(value)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the section."""
    PAGE.write_text(with_section(PAGE.read_text("utf-8"), SECTION, table()), "utf-8")


if __name__ == "__main__":
    main()
