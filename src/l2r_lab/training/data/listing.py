"""List of shard files: on the Hugging Face hub or in a local folder.

Both follow the hub's layout, ``data/DOMAIN/FILE``; a local folder may leave ``data/`` out, and
``DOMAIN/`` where it is one. File names inside a domain follow no single pattern on the hub
(open-web-math mixes two), so they are always listed, never made up.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from l2r.errors import InputError, blames_input
from l2r.text import SHARD_SUFFIXES, TEXT_FILES, UnreachableError, domain_files, keep_trying

if TYPE_CHECKING:
    from l2r_lab.training.data.olmoe_mix import ShardPlan

_PATIENCE = 60.0  # seconds that an answer of the hub may take


def by_domain(paths: Iterable[str]) -> dict[str, list[str]]:
    """Shard paths grouped by the folder they lie in, each group sorted.

    Files that are not shards, and files that do not lie in ``DOMAIN/`` or ``data/DOMAIN/``, are
    left out.
    """
    domains: dict[str, list[str]] = {}
    for path in sorted(paths):
        parts = path.split("/")
        if parts[0] == "data":
            parts = parts[1:]
        if len(parts) == 2 and path.endswith(SHARD_SUFFIXES):
            domains.setdefault(parts[0], []).append(path)
    return domains


def folder_listing(folder: Path) -> dict[str, list[str]]:
    """Shards below a local folder, as paths relative to it; text files of a domain are one shard.

    Raises ValueError when there are none.
    """
    listing = {}
    for domain, (root, files) in domain_files(folder).items():
        shards = [path for path in files if path.suffix != ".txt"]
        grouped = [root / TEXT_FILES] if len(shards) < len(files) else []
        listing[domain] = [p.relative_to(folder).as_posix() for p in (*grouped, *shards)]
    return listing


class ShardSource(NamedTuple):
    """Shards by domain, what to put before their paths to open them, and where they are from."""

    files: dict[str, list[str]]
    prefix: str
    origin: dict[str, str]


def shard_source(data: str, plan: "ShardPlan | None") -> ShardSource:
    """Shards of a folder, or with ``hub`` those of the plan's dataset, at its commit or the newest.

    Passing faults of the network are tried again, as for the shards themselves. Raises ValueError
    for a folder without shards, for the hub without a plan, and when the hub cannot be reached or
    does not know the dataset.
    """
    if data != "hub":
        folder = Path(data)
        return ShardSource(folder_listing(folder), f"{data}/", {"shards": folder.resolve().name})
    if plan is None:
        raise InputError("give --plan for the hub's shards, or --data with a folder of shards")
    from huggingface_hub import HfApi

    repository = plan.repository
    ask = partial(HfApi().dataset_info, repository, revision=plan.revision, timeout=_PATIENCE)
    try:
        info = keep_trying(f"the list of files of {repository} on the Hugging Face hub", ask)
    except UnreachableError:
        raise
    except Exception as error:  # its HTTP library, and so its errors, change with its version
        if not blames_input(error):
            raise
        raise InputError(
            f"cannot list {repository} on the Hugging Face hub ({type(error).__name__}: {error}); "
            f"check the network, or name a local folder of shards"
        ) from error
    files = by_domain(sibling.rfilename for sibling in info.siblings or [])
    prefix = f"hf://datasets/{repository}@{info.sha}/"
    return ShardSource(files, prefix, {"shards": repository, "revision": str(info.sha)})
