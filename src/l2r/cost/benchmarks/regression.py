"""Whether a contender became slower since a benchmark was saved, beyond the noise of its turns.

Every turn gives one ratio: a contender's time over that of the group's base, a moment apart. The
ratios of the turns then and now are compared by a permutation test, Holm's over all contenders.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError
from l2r.stats.paired_t import holm
from l2r.stats.permutation import larger_by_chance

REGRESSION_ALPHA = 0.01
LEAST = 0.05  # slower by less is no regression: processes differ by as much in where memory lies


@dataclass(frozen=True)
class Change:
    """A contender's ratio over the base of its group, then and now: the median over the turns.

    p: of the ratio being larger now by chance, after Holm. least_p: the least that so few turns
    could give.
    """

    group: str
    contender: str
    base: str
    before: float
    now: float
    p: float
    least_p: float

    def __str__(self) -> str:
        return (
            f"{self.contender}, {self.before:.2f} to {self.now:.2f} of {self.base} "
            f"({self.group}; p {self.p:.2g})"
        )

    @property
    def regressed(self) -> bool:
        """Whether it is slower, by more than ``LEAST`` and than chance."""
        return self.p < REGRESSION_ALPHA and self.now > (1 + LEAST) * self.before


def bench_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every contender of two saved benchmarks but the bases, in the order of the later one.

    Raises ValueError where they are not of the same benchmark, settings and groups, or where the
    earlier one has no turns (versions before 0.3 saved none).
    """
    for field in ("name", "settings"):
        if before[field] != now[field]:
            raise InputError(
                f"baseline must have the same {field}; got {before[field]} and {now[field]}"
            )
    if not before.get("turns"):
        raise InputError("baseline must have turns; make it again with l2r bench --out")
    earlier = {group["group"]: group for group in before["turns"]}
    pairs: list[tuple[str, str, str, list[float], list[float]]] = []
    for group in now["turns"]:
        label, base = group["group"], group["base"]
        if label not in earlier or base not in earlier[label]["seconds"]:
            raise InputError(f"baseline must have the group {label!r} with {base!r}")
        then = ratios(earlier[label]["seconds"], base)
        for contender, values in ratios(group["seconds"], base).items():
            if contender != base and contender in then:
                pairs.append((label, contender, base, then[contender], values))
    p = holm([larger_by_chance(_logs(old), _logs(new)) for *_, old, new in pairs])
    return [
        Change(
            label,
            contender,
            base,
            before=statistics.median(old),
            now=statistics.median(new),
            p=value,
            least_p=len(pairs) / math.comb(len(old) + len(new), len(new)),
        )
        for (label, contender, base, old, new), value in zip(pairs, p, strict=True)
    ]


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, list[float]]:
    """Time over the base's, turn by turn."""
    return {
        name: [time / unit for time, unit in zip(times, seconds[base], strict=True)]
        for name, times in seconds.items()
    }


def _logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]
