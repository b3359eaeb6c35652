"""A benchmark's settings and result: records that JSON, tables and figures read."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from l2r.benchmarks.timing import CLOCKS
from l2r.machine import describe_machine


def environment() -> dict[str, Any]:
    """The machine, in one level: a benchmark prints it as one line."""
    machine = describe_machine()
    gpus = machine.pop("gpus")
    return {**machine.pop("packages"), **machine, "gpu": ", ".join(gpus) or None}


@dataclass(frozen=True)
class Settings:
    """device: cpu or cuda. seconds: for one group of contenders. quick: small shapes, for tests.

    compiled: also time torch.compile of the plain code, which costs tens of seconds.
    clock: wall, or cpu for processor time (steady on a busy machine, meant for one thread).
    """

    device: str = "cpu"
    seconds: float = 4.0
    quick: bool = False
    compiled: bool = False
    clock: str = "wall"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda; got device={self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device must be cpu here, no GPU was found; got device='cuda'")
        if self.clock not in CLOCKS:
            raise ValueError(f"clock must be wall or cpu; got clock={self.clock!r}")
        if self.seconds <= 0:
            raise ValueError(f"seconds must be > 0; got seconds={self.seconds}")


@dataclass
class Bench:
    """Records of one benchmark, all with the same keys, and where they were taken."""

    name: str
    settings: Settings
    note: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=environment)

    def add(self, **record: Any) -> None:
        """Append one record."""
        self.records.append(record)

    def as_dict(self) -> dict[str, Any]:
        """What ``save`` writes."""
        return asdict(self)


def save(found: dict[str, Any], folder: Path) -> Path:
    """Write ``as_dict``'s form to ``<name>.json``, under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found['name']}.json"
    temporary = path.with_suffix(".json.part")
    temporary.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def fastest(times: dict[str, float], prefix: str) -> float:
    """Smallest time among the contenders whose name starts with ``prefix``."""
    return min(value for name, value in times.items() if name.startswith(prefix))
