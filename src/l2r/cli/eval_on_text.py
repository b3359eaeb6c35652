"""Losses of checkpoints on text of one's own, for ``l2r eval --data``."""

from functools import partial
from pathlib import Path
from typing import Any

from l2r.cli.experiment import say
from l2r.cli.output import echo

_FILES = 30  # more are not printed one by one


def evaluate_on_text(
    checkpoints: dict[str, Path],
    outs: dict[str, Path],
    paths: list[Path],
    own: str | None,
    settings: Any,
    options: Any,
    *,
    as_json: bool,
) -> None:
    """Score texts with every checkpoint; print their losses and the differences from the first.

    The texts are those of ``paths``, or ``own`` alone.
    """
    from l2r.cli.console import print_table, progress_bars
    from l2r.cost.planning import announce, reads_of_text
    from l2r.report.text_loss import text_table
    from l2r.training.data import read_line
    from l2r.training.evaluation import (
        ALL_FILES,
        Texts,
        evaluate_text,
        text_differences,
        text_losses,
    )

    texts, results, losses = Texts(paths, settings.limit, own=own), {}, {}
    code: Any = {"trust_remote_code": options["trust_remote_code"]}

    def expect(checkpoint: Path, share: float) -> None:
        size = options["batch_size"]
        reads, tokens = reads_of_text(checkpoint, texts, settings, size, share=share, **code)
        announce([(checkpoint, reads)], options["placement"], say, tokens=tokens, **code)

    for name, checkpoint in checkpoints.items():
        with progress_bars() as bars:
            scored, written = evaluate_text(
                checkpoint,
                outs[name],
                texts,
                settings=settings,
                on_progress=partial(bars, name),
                expect=partial(expect, checkpoint),
                **options,
            )
        results[name], losses[name] = scored, text_losses(scored)
        echo(f"wrote {written}", err=True)
    read = next(iter(losses.values()))[ALL_FILES].tokens
    count = len({document.file for document in next(iter(results.values()))})
    line = read_line(read, count, count) if own is None else f"read {read:,} tokens of the text"
    echo(line, err=True)
    first, *others = results
    pairs = {
        f"{name} - {first}": text_differences(results[first], results[name]) for name in others
    }
    files = [name for name in losses[first] if name != ALL_FILES]
    shown = {*files, ALL_FILES}
    if not as_json:
        shown = (
            {ALL_FILES}
            if len(files) > _FILES
            else {*files, *([ALL_FILES] if len(files) > 1 else [])}
        )
    if shown == {ALL_FILES}:
        echo(f"{len(files)} files, by file in what was written", err=True)

    def records(of: Any) -> Any:
        return {
            name: {text: numbers.to_dict() for text, numbers in by.items() if text in shown}
            for name, by in of.items()
        }

    print_table(text_table(records(losses), records(pairs)), as_json=as_json)
