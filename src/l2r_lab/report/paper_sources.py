"""Finished runs by router, and diagnoses: the sources of the paper's tables and figures."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.files.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.files.folder import RunFolder
from l2r.files.reading import read_json
from l2r_lab.files.progress import read_progress

# Where docs/re-run-the-paper.md writes them.
LANGUAGE_RUNS = ("runs/olmoe-1b-7b", "runs/rank", "runs/heads")
IMAGE_RUNS = ("runs/vit-s", "runs/vit-rank", "runs/vit-heads")
DIAGNOSES, INFERENCE, PLAN = "diagnosis", "inference/inference.json", "plan.json"


@dataclass(frozen=True)
class PaperRouter:
    """A router of the paper's runs; rank and heads are None where any will do."""

    name: str
    kind: str
    rank: int | None = None
    heads: int | None = None

    def is_of(self, router: dict[str, Any]) -> bool:
        """Tell whether it is the router of a recipe."""
        given = {"kind": self.kind, "rank": self.rank, "heads": self.heads}
        return all(router.get(field) == v for field, v in given.items() if v is not None)


class PaperSources:
    """Runs and files of a folder in which the commands of the page ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def language(self, router: PaperRouter) -> RunFolder:
        """Find the language run with a router. Raises ValueError where none is finished."""
        return _find(self._language, router, LANGUAGE_RUNS)

    def images(self, router: PaperRouter) -> RunFolder:
        """Find the ViT with a router. Raises ValueError where none is finished."""
        return _find(self._images, router, IMAGE_RUNS)

    def diagnosis(self, router: PaperRouter) -> Diagnosis:
        """Read a language run's diagnosis. Raises ValueError where there is none."""
        name = self.language(router).name
        place = self.folder / DIAGNOSES / name
        if not is_diagnosed(place):
            raise InputError(f"{DIAGNOSES}/ has no diagnosis of {name}; l2r diagnose writes it")
        return read_diagnosis(place)

    def usage(self, router: PaperRouter) -> Diagnosis:
        """Read the diagnosis that a sweep made. Raises ValueError where there is none."""
        run = self.language(router)
        if not is_diagnosed(run.path):
            raise InputError(f"{run.path} has no diagnosis; the sweep with its router writes it")
        return read_diagnosis(run.path)

    def json(self, name: str, command: str) -> Any:
        """Read a file of the folder. Raises ValueError where it is not there."""
        path = self.folder / name
        if not path.is_file():
            raise InputError(f"there is no {name}; {command} writes it")
        return read_json(path)

    @cached_property
    def _language(self) -> list[RunFolder]:
        return _runs_in(self.folder, LANGUAGE_RUNS)

    @cached_property
    def _images(self) -> list[RunFolder]:
        return _runs_in(self.folder, IMAGE_RUNS)


def _runs_in(folder: Path, places: tuple[str, ...]) -> list[RunFolder]:
    inside = [path for place in places for path in sorted((folder / place).glob("*"))]
    return [run for run in map(RunFolder, inside) if run.is_run()]


def _find(runs: list[RunFolder], router: PaperRouter, places: tuple[str, ...]) -> RunFolder:
    late = []
    for run in runs:
        if router.is_of(run.read_recipe().get("router") or {}):
            state = read_progress(run)
            if state.ended and run.is_finished():
                return run
            late.append(f"{run.path} is at step {state}")
    raise InputError("; ".join(late) or f"no run of {router.name} in {', '.join(places)}")
