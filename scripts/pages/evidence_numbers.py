"""Numbers of README and docs/evidence.md, from results/evidence, each rounded once.

    PYTHONPATH=. python -m scripts.pages.evidence_numbers           # print claims as they must be
    PYTHONPATH=. python -m scripts.pages.evidence_numbers --write   # write them and the table

Differences are plain paired t over all whole seeds: mean and 95% interval, not adjusted. The tests
look for every claim on its page, and for numbers that no claim accounts for.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add
from statistics import fmean
from typing import NamedTuple

from l2r.stats.intervals import Interval
from l2r_lab.files.study import ARITHMETICS, CellResult, StudyResults
from l2r_lab.stats.paired_t import estimate, holm
from l2r_lab.studies.registration import parse_plan
from scripts.pages.marks import with_section
from scripts.pages.needed_rank import MARGIN, RANKS, SEEDS, THOUSAND
from scripts.pages.routers_by_experts import (
    ROOT,
    STORED,
    difference,
    router_times,
    study_in_results,
)

README, EVIDENCE = ROOT / "README.md", ROOT / "docs" / "evidence.md"
SECTION = "L2R by experts"
HEAD = (
    "| experts | tokens | seeds | settings searched | L2R - linear | L2R - X-MoE "
    "| tokens that bf16 changes: L2R, linear, X-MoE | parameters | time | verdict |\n"
    "|---|---|---|---|---|---|---|---|---|---|\n"
)
LOSS, FLIPS = "validation_ce", "flipped_tokens"


class Row(NamedTuple):
    """One row of the table: a study, its arms, and what results do not say of it.

    time: study and arm of results/router-time.md.
    """

    study: str
    l2r: str
    linear: str
    xmoe: str | None
    experts: str
    searched: str
    time: tuple[str, str] | None


_FIELD, _NUMBER = re.compile(r"{[^}]*}"), r"[-+]?\d+(?:\.\d+)?"
BEST = ("l2r-best", "linear-best")
PLAIN = ("l2r", "linear")
ROWS = (
    Row("decision", *BEST, "xmoe-best", "16", "15 each", ("decision", "l2r-best")),
    Row(
        "width-256", *BEST, None, "16, width 256", "those of 16", ("width-256", "l2r-best"),
    ),
    Row("experts-64", *BEST, None, "64", "those of 16", ("experts-64", BEST[0])),
    Row("experts-64-width-256", *BEST, None, "64, width 256", "those of 16", None),
    Row("ranked-64", *PLAIN, "xmoe", "64", "5 each", ("ranked-64", "l2r")),
    Row(
        "rank-8-of-256", *PLAIN, "xmoe", "256, rank 8", "10, L2R 5", ("rank-8-of-256", "l2r"),
    ),
    Row(
        "transfer", *PLAIN, "xmoe", "256, rank 8, other text, width 256", "those of 256",
        ("transfer", "l2r"),
    ),
    Row(
        "tokens-256", "l2r-4m", "linear-4m", None, "256, rank 8", "those of 256",
        ("rank-8-of-256", "l2r"),
    ),
    Row("experts-1024", *PLAIN, "xmoe", "1,024, rank 8", "none", ("experts-1024", "l2r")),
    Row(
        "ranked-1024", *PLAIN, "xmoe", "1,024, rank 32", "5 each", ("ranked-1024", "l2r"),
    ),
)  # fmt: skip


@cache
def runs(study: str) -> dict[str, dict[int, CellResult]]:
    """Results of a study by arm and seed."""
    found: dict[str, dict[int, CellResult]] = {}
    for result in StudyResults(STORED / study).read():
        found.setdefault(result.arm, {})[result.seed] = result
    return found


def values(study: str, arm: str, metric: str = LOSS) -> list[float]:
    """One measure of an arm at the end of its runs, by seed."""
    by_seed = runs(study)[arm]
    return [by_seed[s].trained[metric] for s in sorted(by_seed) if metric in by_seed[s].trained]


def mean(study: str, arm: str, metric: str = LOSS) -> float:
    """Mean over the seeds."""
    return fmean(values(study, arm, metric))


def gaps(study: str, first: str, second: str, metric: str = LOSS) -> list[float]:
    """Differences first - second, paired by seed."""
    arms = [runs(study)[arm] for arm in (first, second)]
    both = [{s for s, run in arm.items() if metric in run.trained} for arm in arms]
    seeds = sorted(both[0] & both[1])
    return [arms[0][s].trained[metric] - arms[1][s].trained[metric] for s in seeds]


def interval(differences: Sequence[float], scale: float = 1) -> Interval:
    """Mean and 95% interval by Student's t, times ``scale`` (100 for points)."""
    return estimate([scale * value for value in differences]).interval()


def ends(differences: Sequence[float], scale: float = 1) -> tuple[float, float, float]:
    """Mean, low and high end of the interval."""
    found = interval(differences, scale)
    return found.mean, found.low, found.high


def tuned_pool() -> list[float]:
    """L2R tuned - linear tuned in every run of 3.28M tokens."""
    studies = ("decision", "width-256", "experts-64", "experts-64-width-256")
    return [gap for study in studies for gap in gaps(study, *BEST)]


def late_gap(study: str, arms: Sequence[str], part: int, parts: int = 4) -> list[float]:
    """Gap of the first arm to the second in training CE over a part of the runs, by seed."""
    by_arm = [runs(study)[arm] for arm in arms]
    found = []
    for seed in sorted(set(by_arm[0]) & set(by_arm[1])):
        pair = (by_arm[0][seed].curve, by_arm[1][seed].curve)
        curve = [a - b for (_, a), (_, b) in zip(*pair, strict=True)]
        found.append(fmean(curve[part * len(curve) // parts : (part + 1) * len(curve) // parts]))
    return found


@cache
def adjusted() -> Mapping[tuple[str, str, str, str], float]:
    """Holm's p over all primary contrasts of all studies that are whole, by the plain paired t.

    Keys are study, arms and metric.
    """
    from scipy.stats import ttest_1samp

    keys, p = [], []
    for study in sorted(path.parent.name for path in STORED.glob("*/results.jsonl")):
        plan = parse_plan(study)
        for contrast in plan.contrasts:
            if not contrast.primary:
                continue
            differences = gaps(study, contrast.first, contrast.second, contrast.metric)
            if len(differences) >= plan.seeds.least:
                keys.append((study, contrast.first, contrast.second, contrast.metric))
                p.append(float(ttest_1samp(differences, 0).pvalue))
    return dict(zip(keys, holm(p), strict=True))


def table() -> str:
    """The table of the page as Markdown."""
    return HEAD + "".join(_line(row) for row in ROWS)


def _line(row: Row) -> str:
    results = runs(row.study)
    one = next(iter(results[row.l2r].values()))
    tokens = one.facts["units"] / 1e6
    flips = []
    for arm in (row.l2r, row.linear, row.xmoe):
        known = arm is not None and values(row.study, arm, FLIPS)
        flips.append(f"{fmean(known):.1%}" if known else "")
    shown = gaps(row.study, row.l2r, row.linear)
    sizes = [
        next(iter(results[arm].values())).facts.get("router_parameters")
        for arm in (row.l2r, row.linear)
    ]
    planned = parse_plan(row.study).seeds
    seeds = f"{len(shown)}" + (f" of {planned.least}" if len(shown) < planned.least else "")
    cells = (
        row.experts,
        f"{tokens:.2f}M",
        f"{seeds}, `{row.study}`",
        row.searched,
        _with_ends(shown),
        "" if row.xmoe is None else _with_ends(gaps(row.study, row.l2r, row.xmoe)),
        ", ".join(filter(None, flips)),
        f"{sizes[0] / sizes[1]:.2f}" if sizes[0] and sizes[1] else "",
        "" if row.time is None else router_times()[row.time],
        _verdict(row),
    )
    return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"


def _verdict(row: Row) -> str:
    """Verdict on L2R - linear by the plan's rule; "none" where there is none."""
    study = study_in_results(row.study)
    said = difference(study, row.l2r, row.linear)[1]
    if said.startswith(("better", "worse", "equivalent")):
        return f"**{said}**"
    return "none, ended" if study.ended else "none"


def _with_ends(differences: Sequence[float]) -> str:
    found = interval(differences)
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


@dataclass(frozen=True)
class Claim:
    """Words of a page with their numbers: ``text`` has a format field for each value."""

    text: str
    values: tuple[float, ...]

    def says(self) -> str:
        """Text with the numbers, each rounded once."""
        return self.text.format(*self.values)

    def written_into(self, page: str) -> str:
        """The page with these numbers where it has the words with others; lines break as before.

        Raises ValueError for words that stand on the page twice.
        """
        words = [re.escape(part).replace(r"\ ", r"\s+") for part in _FIELD.split(self.text)]
        pattern = _NUMBER.join(f"({part})" for part in words)
        if len(re.findall(pattern, page)) > 1:
            raise ValueError(f"these words stand on the page twice: {self.text}")
        ends = [*map(str.format, _FIELD.findall(self.text), self.values), ""]
        return re.sub(pattern, lambda found: "".join(map(add, found.groups(), ends)), page)


def claims() -> Iterator[tuple[str, Claim]]:
    """Every claim of the pages, by the name of its page."""
    for claim in _of_readme():
        yield README.name, claim
    for part in (_of_losses, _of_flips, _of_rivals, _of_certificates, _of_limits):
        for claim in part():
            yield EVIDENCE.name, claim


def _of_readme() -> Iterator[Claim]:
    published = fmean(gaps("decision", "l2r", "linear"))
    yield Claim("L2R is {:.3f} nats worse than linear with 16 experts", (published,))
    yield Claim("{:.0f}% of tokens change experts (linear: {:.0f}%)", published_flips())
    yield Claim("it is {:.3f} nats worse [{:.3f}, {:.3f}]", ends(tuned_pool()))
    yield Claim("{:.1f}% of tokens change experts, linear's {:.1f}%", equal_flips())
    for name, arms in (
        ("linear", ("linear", "linear-best")),
        ("X-MoE", ("xmoe", "xmoe-best")),
        ("L2R (SIPS)", ("l2r", "l2r-best")),
    ):
        own = [interval(values("decision", arm)) for arm in arms]
        numbers = tuple(number for one in own for number in (one.mean, one.half))
        yield Claim(f"| {name} | {{:.3f}} ± {{:.3f}} | {{:.3f}} ± {{:.3f}} |", numbers)
    yield Claim("excludes a gain above {:.3f} nats or a loss above {:.3f}", excluded_at_1m())
    yield _after_4m()
    yield Claim("{:.2f} of linear's time on a CPU, {:.2f} on an H100", times_at_olmoe())
    yield Claim("X-MoE is {:.3f} better", (fmean(gaps("ranked-1024", "l2r", "xmoe")),))


def _of_losses() -> Iterator[Claim]:
    short, long = tokens_256("1m"), tokens_256("4m")
    yield Claim("it is {:.3f} nats worse [{:.3f}, {:.3f}] over 24 seeds", ends(tuned_pool()))
    yield Claim("excludes a gain above {:.3f} or a loss above {:.3f}", excluded_at_1m())
    yield _after_4m()
    yield Claim("is {:+.3f} [{:+.3f}, {:+.3f}] after 1.02M tokens", ends(short))
    yield Claim("and {:+.3f} [{:+.3f}, {:+.3f}] after 4.10M", ends(long))
    change = [b - a for a, b in zip(short, long, strict=True)]
    yield Claim("a change of {:+.3f} [{:+.3f}, {:+.3f}]", ends(change))
    arms = [f"{arm}-4m" for arm in PLAIN]
    parts = [late_gap("tokens-256", arms, part) for part in range(4)]
    yield Claim(
        "By quarters of the runs it is {:+.3f}, {:+.3f}, {:+.3f} and {:+.3f} in training CE",
        tuple(map(fmean, parts)),
    )
    late = ends(tokens_256("4m", "train_ce_late_change"))
    yield Claim("it still grows by {:.3f} [{:.3f}, {:.3f}] from the third", late)
    yield Claim("for both lengths, over {:.0f} registered seeds", (len(long),))
    own, base = long_runs("bf16_flips")
    yield Claim("a third fewer flips (they are {:.0f}% fewer)", (100 * (1 - own / base),))


def _of_flips() -> Iterator[Claim]:
    changes = [
        ends(values("tokens-256", f"{arm}-{length}", f"{arithmetic}_ce_change"))
        for arm in PLAIN
        for length in ("1m", "4m")
        for arithmetic in ARITHMETICS
    ]
    largest = (
        max(abs(mean) for mean, _, _ in changes),
        max(abs(end) for one in changes for end in one),
    )
    yield Claim(
        "the mean CE changes by {:.5f} nats at most, and no end of an interval lies beyond {:.5f}",
        largest,
    )
    rise = ends(values("tokens-256", "l2r-4m", "bf16_ce_change"))
    yield Claim("L2R's in bf16 rises by {:.5f} [{:.5f}, {:.5f}]", rise)
    cells = "{:.1f}, {:.1f} | {:+.1f}, {:+.1f} | {:.1f}, {:.1f} | {:.0f}, {:.0f}"
    for name in ARITHMETICS:
        found = [long_runs(f"{name}_{m}") for m in ("flips", "ce_change", "kl", "kl_replay_share")]
        yield Claim(f"| {name} | {cells} |", tuple(number for pair in found for number in pair))
    yield Claim("changes {:.1f}% of tokens in bf16, linear {:.1f}%", published_flips())
    more = gaps("flips-decision", "l2r-tuned", "linear-tuned", FLIPS)
    equal = (*equal_flips(), *ends(more, 100))
    yield Claim("it is {:.1f} against {:.1f}%, {:+.1f} points [{:.1f}, {:.1f}]", equal)
    lead = [-100 * fmean(tokens_256(length, "bf16_flipped_tokens")) for length in ("1m", "4m")]
    yield Claim("{:.1f} points after 1.02M tokens, {:.1f} after 4.10M", tuple(lead))
    three = (("rank-8-of-256", "l2r"), ("why-256", "sips"), ("ranked-64", "l2r"))
    yield Claim(
        "with 256 experts L2R has {:+.1f} points [{:+.1f}, {:+.1f}] (`rank-8-of-256`) or {:+.1f} "
        "[{:.1f}, {:.1f}] (`why-256`), with 64 experts {:+.1f} [{:.1f}, {:.1f}] (`ranked-64`)",
        tuple(n for study, arm in three for n in ends(gaps(study, arm, "xmoe", FLIPS), 100)),
    )


def _of_rivals() -> Iterator[Claim]:
    either = "{:+.3f} [{:+.3f}, {:+.3f}] with"
    tuned = (("decision", "-best"), ("rank-8-of-256", ""), ("ranked-1024", ""))
    yield Claim(
        f"X-MoE - linear is {either} 16 experts, {either} 256, {either} 1,024",
        tuple(n for s, best in tuned for n in ends(gaps(s, f"xmoe{best}", f"linear{best}"))),
    )
    gains = [ends(gaps("decision", arm, f"{arm}-best")) for arm in ("linear", "xmoe")]
    yield Claim(
        "lowered linear's loss by {:.3f} nats [{:.3f}, {:.3f}] and X-MoE's by {:.3f} "
        "[{:.3f}, {:.3f}]",
        (*gains[0], *gains[1]),
    )
    wide, narrow = gaps("ranked-1024", "l2r", "xmoe"), gaps("decision", "l2r-best", "xmoe-best")
    yield Claim("{:.3f} nats below L2R [{:.3f}, {:.3f}]", ends(wide))
    yield Claim("with 16 experts it is {:.3f} below [{:.3f}, {:.3f}]", ends(narrow))
    plain = ends(gaps("rank-8-of-256", "low-rank", "linear"))
    behind = "matrices of rank 8 are {:.3f} nats behind linear [{:.3f}, {:.3f}]"
    yield Claim(f"two plain {behind}", plain)
    keys = gaps("rivals-256", "product-keys-16", "linear")
    yield Claim("product keys {:.3f} [{:.3f}, {:.3f}]", ends(keys))
    better = gaps("parts-256", "sips", "rank-32") + gaps("transfer", "l2r", "l2r-rank-32")
    yield Claim("Rank 32 is {:.3f} nats better than rank 8 [{:.3f}, {:.3f}]", ends(better))


def _of_certificates() -> Iterator[Claim]:
    for name, file, tokens, routers in (
        ("16, as published", "certified-flips.json", None, ("linear", "xmoe", "l2r_sips")),
        ("256, 1.02M tokens", "certified-256.json", 1_024_000, ("linear", "xmoe", "l2r_sips")),
        ("256, 4.10M tokens", "certified-256.json", 4_096_000, ("linear", None, "l2r_sips")),
    ):
        found = [certified(file, router, tokens) for router in routers if router]
        cells = " | ".join("{:.0f}, {:.0f}" if router else "" for router in routers)
        numbers = tuple(number for pair in found for number in pair)
        yield Claim(f"| {name} | {cells} |".replace("|  |", "| |"), numbers)


def certified(file: str, router: str, tokens: int | None) -> tuple[float, float]:
    """Decisions proven not to change in bf16 and in int8, in %, over all seeds."""
    rows = json.loads((ROOT / "results" / file).read_text(encoding="utf-8"))["rows"]
    of = [row for row in rows if row["router"] == router and row.get("tokens") == tokens]
    bf16, int8 = ([row for row in of if row["against"] == name] for name in ("bf16", "int8"))
    return _certified_share(bf16), _certified_share(int8)


def _certified_share(rows: Sequence[Mapping[str, int]]) -> float:
    return 100 * sum(row["certified"] for row in rows) / sum(row["decisions"] for row in rows)


def _of_limits() -> Iterator[Claim]:
    ranks = losses_by_rank()
    above = [losses[64] - min(losses.values()) for losses in ranks.values()]
    yield Claim("which is {:.3f} to {:.3f} nats above the best", (min(above), max(above)))
    best = [needed(losses, min(losses.values())) for losses in ranks.values()]
    said = [needed(losses, losses[64]) for losses in ranks.values()]
    four = "{:.0f}, {:.0f}, {:.0f} and {:.0f}"
    yield Claim(f"and gave ranks {four}", tuple(said))
    yield Claim(f"of the best rank they need {four}", tuple(best))
    kept = [p <= 0.05 for p in adjusted().values()]
    yield Claim("over all {:.0f} primary contrasts keeps {:.0f}", (len(kept), sum(kept)))
    overlap = "relative_topk_overlap"
    noisy = tuple(mean("rank-8-of-256", arm, overlap) for arm in ("l2r", "xmoe", "linear"))
    yield Claim("keeps {:.3f} of a token's experts, X-MoE {:.3f}, linear {:.3f}", noisy)
    long = tuple(mean("tokens-256", f"{arm}-4m", overlap) for arm in PLAIN)
    yield Claim("({:.3f} and {:.3f}, L2R and linear, after 4.10M tokens)", long)


def _after_4m() -> Claim:
    long = tokens_256("4m")
    text = "it is {:.3f} worse [{:.3f}, {:.3f}] over {:.0f} seeds"
    return Claim(text, (*ends(long), len(long)))


def excluded_at_1m() -> tuple[float, float]:
    """Gain and loss of L2R against linear with 256 experts that 1.02M tokens leave possible."""
    found = interval(gaps("rank-8-of-256", *PLAIN))
    return -found.low, found.high


def tokens_256(length: str, metric: str = LOSS) -> list[float]:
    """L2R - linear in the study tokens-256, by seed."""
    return gaps("tokens-256", f"l2r-{length}", f"linear-{length}", metric)


def long_runs(metric: str) -> tuple[float, float]:
    """Means of L2R and linear after 4.10M tokens: shares in %, nats in 1e-4."""
    scale = 1e4 if metric.endswith(("_ce_change", "_kl")) else 100
    metric = metric.replace("_flips", "_flipped_tokens")
    own, base = (scale * mean("tokens-256", f"{arm}-4m", metric) for arm in PLAIN)
    return own, base


def published_flips() -> tuple[float, float]:
    """Tokens that bf16 changes with L2R and linear as published, 16 experts, in %."""
    own, base = (100 * mean("flips", arm, FLIPS) for arm in ("l2r-sips", "linear"))
    return own, base


def equal_flips() -> tuple[float, float]:
    """The same where both are tuned."""
    arms = ("l2r-tuned", "linear-tuned")
    own, base = (100 * mean("flips-decision", arm, FLIPS) for arm in arms)
    return own, base


def times_at_olmoe() -> tuple[float, float]:
    """Time of L2R as published over linear's, forward and backward, on a CPU and on an H100."""
    cpu = (ROOT / "results" / "cpu-2-threads" / "router.txt").read_text(encoding="utf-8")
    gpu = (ROOT / "results" / "gpu" / "router-ratios.md").read_text(encoding="utf-8")
    found = (
        re.search(r"^ forward\+backward +4,096 +l2r_sips H16, fused +[\d.]+ +([\d.]+)$", cpu, re.M),
        re.search(r"^\| L2R r2 H16 \|[^|]+\| ([\d.]+) ", gpu, re.M),
    )
    assert found[0] is not None and found[1] is not None
    return float(found[0][1]), float(found[1][1])


def losses_by_rank() -> dict[int, dict[int, float]]:
    """Validation loss by number of experts and rank, two seeds, one anchor, gamma 4."""
    found = {
        experts: {rank: fmean(values("needed-rank", f"rank-{rank}-of-{experts}")) for rank in RANKS}
        for experts in (16, 64, 256)
    }
    return {**found, 1024: {r: fmean(values(*place)[:SEEDS]) for r, place in THOUSAND.items()}}


def needed(losses: Mapping[int, float], reference: float) -> int:
    """Smallest rank at most the margin of needed-rank's rule above the reference."""
    return min(rank for rank, loss in losses.items() if loss <= reference + MARGIN)


def main() -> None:
    """Print the claims and the table; with ``--write`` the pages have them afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write README and docs/evidence.md")
    if parser.parse_args().write:
        pages = {path.name: path.read_text(encoding="utf-8") for path in (README, EVIDENCE)}
        for name, claim in claims():
            pages[name] = claim.written_into(pages[name])
        pages[EVIDENCE.name] = with_section(pages[EVIDENCE.name], SECTION, table())
        for path in (README, EVIDENCE):
            path.write_text(pages[path.name], encoding="utf-8")
    for page, claim in claims():
        print(json.dumps([page, claim.says()], ensure_ascii=False))
    print(table())


if __name__ == "__main__":
    main()
