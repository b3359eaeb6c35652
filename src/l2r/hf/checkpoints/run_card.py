"""Sections of a model card from its run: recipe, data, routing metrics, evaluation.

Every number comes from a file of the run; one that is not there is left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from l2r.files.diagnosis import is_diagnosed, read_diagnosis
from l2r.files.final_losses import final_losses
from l2r.files.folder import RunFolder
from l2r.files.shapes import files_of
from l2r.files.wording import named_path
from l2r.hf.models.card import CARD, is_untouched, table, write_card

_ROUTING = (  # of a diagnosis, by the names of docs/diagnostics.md
    ("routing gain, of the whole model", "routing_gain"),
    ("mean margin", "mean_margin"),
    ("low-margin rate", "low_margin_rate"),
    ("margin / spread", "scale_free_margin"),
    ("stability", "stability"),
    ("top-k overlap", "topk_overlap"),
    ("cosine variance", "cosine_variance"),
    ("load entropy", "entropy"),
    ("load max / mean", "max_over_mean"),
    ("dead experts", "dead_experts"),
)


def run_of_checkpoint(checkpoint: str | Path) -> RunFolder | None:
    """Return the run of a checkpoint's final weights: its folder, or ``model/`` in it."""
    path = Path(checkpoint).resolve()
    run = RunFolder(path.parent if path.name == "model" else path)
    return run if run.is_run() else None


def run_sections(run: RunFolder | None, *, averaged: bool = False) -> tuple[str, ...]:
    """Sections of the card, in Markdown; ``averaged`` weights share the run but not its numbers."""
    if run is None:
        return ()
    with files_of([run]):
        told = (
            _training(run, averaged=averaged),
            "" if averaged else _routing(run),
            _evaluation(run, averaged=averaged),
        )
    return tuple(section for section in told if section)


def write_run_card(run: RunFolder, folder: Path, model: Any, *, averaged: bool = False) -> None:
    """Write the card of a run's final weights into the folder that holds them."""
    write_card(folder, model, run_sections(run, averaged=averaged))


def update_card(run: RunFolder | None, model: Any, *, averaged: bool = False) -> None:
    """Write the card again after a measurement, unless it was edited or there was none."""
    if run is not None:
        folder = run.averaged_model if averaged else run.model
        card = folder / CARD
        if folder.is_symlink():
            return  # another run's weights, or a stranger's: their card is not this run's to write
        if card.is_file() and is_untouched(card.read_text(encoding="utf-8", errors="replace")):
            write_run_card(run, folder, model, averaged=averaged)


def _training(run: RunFolder, *, averaged: bool) -> str:
    recipe = yaml.safe_dump(_without_folders(run.read_recipe()), sort_keys=False)
    facts = run.read_json(run.environment)
    data = _without_folders(facts.get("data") or {})
    last = (run.read_metrics("train") or [{}])[-1]
    amounts = [(f"{unit} seen", last[unit]) for unit in ("tokens", "images") if unit in last]
    versions = [f"{name} {v}" for name, v in (facts.get("packages") or {}).items() if v]
    machine = ", ".join(facts.get("gpus") or [facts[n] for n in ("processor",) if facts.get(n)])
    rows = [
        *((f"data: {name}", _words(value)) for name, value in data.items()),
        *([("steps", last["step"])] if last else []),
        *amounts,
        *([("ranks", facts["ranks"])] if "ranks" in facts else []),
        *([("hardware", machine)] if machine else []),
        *([("versions", ", ".join(versions))] if versions else []),
    ]
    parts = [
        "## Training",
        "One run of `l2r train` with this recipe, from one seed:",
        f"```yaml\n{recipe}```",
        table(rows, ("fact", "value")) if rows else "",
        "These weights are the moving average of those of the run." if averaged else "",
        _losses(run, averaged=averaged),
    ]
    return "\n\n".join(part for part in parts if part)


def _losses(run: RunFolder, *, averaged: bool) -> str:
    if not averaged:
        rows = [(name.replace("_", " "), value) for name, value in final_losses(run).items()]
    else:
        last = (run.read_metrics("validation") or [{}])[-1]
        names = ("ema/ce/mean", "ema/ce", "ema/top1")
        rows = [(f"validation {n.removeprefix('ema/')}", last[n]) for n in names if n in last]
    caption = "Losses at its end, in nats; those of training are means over its last tenth."
    return f"{caption}\n\n{table(rows, ('loss', 'value'))}" if rows else ""


def _routing(run: RunFolder) -> str:
    if not is_diagnosed(run.path):
        return ""
    diagnosis = read_diagnosis(run.path)
    numbers = diagnosis.numbers()
    rows = [(name, numbers[field]) for name, field in _ROUTING if field in numbers]
    tokens = diagnosis.info.get("tokens")
    on = f"on {tokens:,} held-out tokens, " if tokens else "on held-out data, "
    caption = f"What the routers do {on}means over layers; docs/diagnostics.md has the definitions."
    return f"## Routing\n\n{caption}\n\n{table(rows, ('metric', 'value'))}" if rows else ""


def _evaluation(run: RunFolder, *, averaged: bool) -> str:
    record = run.read_json(run.evaluation)
    if not record or bool(record.get("averaged", False)) != averaged:
        return ""
    if "accuracy" in record:
        intervals = record.get("interval") or {}
        rows = [
            (task, f"{value:.1f}" + _from_to(intervals.get(task)))
            for task, value in record["accuracy"].items()
            if value is not None
        ]
        settings = record.get("settings") or {}
        set_ = ", ".join(f"{n} {v}" for n, v in settings.items() if v is not None)
        caption = f"Accuracy in percent with its 95% interval, by `l2r eval` ({set_})."
    else:
        names = {"top1": "top-1", "top5": "top-5", "ce": "cross-entropy", "images": "images"}
        rows = [(name, record[field]) for field, name in names.items() if field in record]
        of = "the run's validation images"
        if record.get("data"):
            of = f"the images of {named_path(record['data']).name}"
        if record.get("limit"):
            of += f", the first {record['limit']:,} at most"
        caption = f"Accuracy as a share of {of}, by `l2r eval`."
    return f"## Evaluation\n\n{caption}\n\n{table(rows, ('', 'value'))}" if rows else ""


def _from_to(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f" ({interval[0]:.1f} to {interval[1]:.1f})"


def _words(value: Any) -> Any:
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def _without_folders(value: Any) -> Any:
    """Replace every absolute path by its last name: a card is for other people."""
    if isinstance(value, Mapping):
        return {name: _without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    is_path = isinstance(value, str) and (Path(value).is_absolute() or value.startswith("~"))
    return Path(value).name if is_path else value
