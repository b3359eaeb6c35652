"""The paper's subset of the OLMoE mixture: whole shards, matched to the full distribution.

Appendix F of the paper: draw whole shards per domain, without replacement, with a fixed seed,
so that the tokens of every domain keep their share of the whole mixture. The rule
``n_d = max(1, round(S_d * T / total))`` gives the paper's shard column for T = 200B.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from l2r.errors import InputError
from l2r.files.atomic import write_json
from l2r.files.reading import read_bytes
from l2r.text import epoch_order

PAPER_SEED = 2025


@dataclass(frozen=True)
class MixDomain:
    """One part of a mixture: how many shards it has and how many tokens they hold together."""

    name: str
    shards: int
    tokens: float


@dataclass(frozen=True)
class Mixture:
    """A dataset on the Hugging Face hub whose files lie in ``data/DOMAIN/``."""

    repository: str
    domains: tuple[MixDomain, ...]

    @property
    def tokens(self) -> float:
        """Tokens of all domains."""
        return sum(domain.tokens for domain in self.domains)


# Tokens are the dataset card's (three digits), shards the paper's Table 11; their quotients are
# the paper's token column. NOTE: the paper says 4.07T in all; these six domains sum to 4.05T. The
# card's 4.07T includes 21.1B of arXiv, which the repository does not hold. With 4.07T the rule
# would give 42 starcoder shards, with 4.05T it gives the paper's 43.
OLMOE_MIX = Mixture(
    "allenai/OLMoE-mix-0924",
    (
        MixDomain("dclm", 1970, 3.86e12),
        MixDomain("starcoder", 863, 101e9),
        MixDomain("pes2o", 26, 57.2e9),
        MixDomain("open-web-math", 26, 12.7e9),
        MixDomain("algebraic-stack", 16, 12.6e9),
        MixDomain("wiki", 2, 3.69e9),
    ),
)


@dataclass(frozen=True)
class PlannedShard:
    """A shard: its place in the domain's sorted file list, and its path once a listing is known."""

    index: int
    file: str | None = None


@dataclass(frozen=True)
class PlannedDomain:
    """The shards chosen from one domain; ``tokens`` is an estimate from the mean shard."""

    name: str
    total_shards: int
    tokens: float
    shards: tuple[PlannedShard, ...]


@dataclass(frozen=True)
class ShardPlan:
    """Shards of a subset of ``target_tokens``; the JSON form is ``dataclasses.asdict``."""

    repository: str
    target_tokens: int
    seed: int
    domains: tuple[PlannedDomain, ...]
    revision: str | None = None

    @property
    def tokens(self) -> float:
        """Expected tokens of all chosen shards."""
        return sum(domain.tokens for domain in self.domains)


def plan_subset(
    target_tokens: int, *, mixture: Mixture = OLMOE_MIX, seed: int = PAPER_SEED
) -> ShardPlan:
    """Choose ``n_d = max(1, round(S_d * T / total))`` shards of every domain.

    The chosen shards are the first n_d of a seeded permutation, so a smaller plan with the same
    seed is part of a larger one. NOTE: the paper names the seed but not its generator; shard
    counts agree with it, which shards they are cannot be compared.

    Raises ValueError for a target below 1 or above the mixture.
    """
    if not 1 <= target_tokens <= mixture.tokens:
        raise InputError(
            f"tokens must be between 1 and {mixture.tokens:.4g} (all of {mixture.repository}); "
            f"got {target_tokens}"
        )
    domains = []
    for position, domain in enumerate(mixture.domains):
        count = max(1, round(domain.shards * target_tokens / mixture.tokens))
        chosen = sorted(epoch_order(domain.shards, seed, position)[:count].tolist())
        shards = tuple(PlannedShard(index) for index in chosen)
        tokens = count * (domain.tokens / domain.shards)  # of the mean shard
        domains.append(PlannedDomain(domain.name, domain.shards, tokens, shards))
    return ShardPlan(mixture.repository, target_tokens, seed, tuple(domains))


def name_shards(
    plan: ShardPlan, listing: Mapping[str, Sequence[str]], *, revision: str | None = None
) -> ShardPlan:
    """Write file names into a plan: index i is the i-th name of the domain's sorted listing.

    Raises ValueError when a domain of the listing does not have the planned number of shards.
    """
    domains = []
    for domain in plan.domains:
        names = sorted(listing.get(domain.name, ()))
        if len(names) != domain.total_shards:
            raise InputError(
                f"the listing must have {domain.total_shards} shards of {domain.name}; "
                f"got {len(names)}; a part of them serves a plan that names files (--listing)"
            )
        shards = tuple(PlannedShard(s.index, names[s.index]) for s in domain.shards)
        domains.append(dataclasses.replace(domain, shards=shards))
    return dataclasses.replace(plan, domains=tuple(domains), revision=revision)


def write_plan(path: Path, plan: ShardPlan) -> None:
    """Write a plan as JSON."""
    write_json(path, {"tokens": plan.tokens, **dataclasses.asdict(plan)})


def read_plan(path: Path) -> ShardPlan:
    """Read what ``write_plan`` wrote. Raises ValueError for anything else."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(ShardPlan).validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "file"
        raise InputError(
            f"{path} is not a shard plan: {field}: {first['msg']}; make one with l2r data plan"
        ) from error
