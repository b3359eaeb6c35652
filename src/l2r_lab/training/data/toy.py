"""Toy stand-ins for the data of the paper: a mixture in the hub's layout, C4 and ImageNet."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from l2r.errors import InputError
from l2r_lab.training.data.olmoe_mix import OLMOE_MIX, ShardPlan

FOLDERS = ("mix", "c4", "imagenet")
_ENDINGS = {"dclm": (".json.zst",), "open-web-math": (".json.gz", ".jsonl.gz")}
_DOCUMENTS, _CHARACTERS = 40, 600  # of a shard, of a document
_IMAGES = {"train": 8, "val": 4}  # of each class
_CLASSES = {"n00": (200, 60, 40), "n01": (40, 80, 200)}  # and their mean color
_PIXELS = 40


def write_toy_data(folder: Path, plan: ShardPlan) -> list[Path]:
    """Write ``mix``, ``c4`` and ``imagenet`` into the folder, the same on every machine.

    The mixture has all 2,903 names in the hub's formats; those of the plan hold text (Python's
    help topics), the others are empty. ImageNet is 24 images of two classes. Raises ValueError
    where one of the three is there.
    """
    places = [folder / name for name in FOLDERS]
    for place in places:
        if place.exists():
            raise InputError(f"out must hold none of {', '.join(FOLDERS)}; got {place}")
    texts = [text for _, text in sorted(topics.items())]
    _write_mix(places[0], plan, texts)
    c4 = places[1] / "data" / "c4" / "c4-validation.00000-of-00008.json.gz"
    c4.parent.mkdir(parents=True)
    c4.write_bytes(gzip.compress(_lines(texts[:30]), mtime=0))
    _write_images(places[2])
    return places


def _write_mix(folder: Path, plan: ShardPlan, texts: Sequence[str]) -> None:
    import pyarrow

    position = 0
    for domain, planned in zip(OLMOE_MIX.domains, plan.domains, strict=True):
        place = folder / "data" / domain.name
        place.mkdir(parents=True)
        chosen = {shard.index for shard in planned.shards}
        endings = _ENDINGS.get(domain.name, (".json.gz",))
        for number in range(domain.shards):
            path = place / f"{domain.name}-{number:04d}{endings[number % len(endings)]}"
            path.touch()
            if number not in chosen:
                continue
            data = _lines([texts[(position + i) % len(texts)] for i in range(_DOCUMENTS)])
            zstd = path.suffix == ".zst"
            packed = pyarrow.compress(data, "zstd", asbytes=True) if zstd else None
            path.write_bytes(packed or gzip.compress(data, mtime=0))
            position += 7


def _lines(texts: Sequence[str]) -> bytes:
    rows = ({"id": str(n), "text": text[:_CHARACTERS]} for n, text in enumerate(texts))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _write_images(folder: Path) -> None:
    from PIL import Image

    random = np.random.default_rng(0)
    for part, count in _IMAGES.items():
        for name, color in _CLASSES.items():
            place = folder / part / name
            place.mkdir(parents=True)
            for number in range(count):
                noise = random.normal(color, 40, (_PIXELS, _PIXELS, 3))
                pixels = noise.clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.png")
