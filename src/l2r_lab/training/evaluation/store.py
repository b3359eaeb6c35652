"""Keeps scored requests on disk, so that a killed evaluation resumes where it stopped."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from l2r.files.atomic import append_text, make_folder, plain_json, write_json, write_text
from l2r.files.reading import parse_json, read_bytes
from l2r_lab.training.evaluation.task_scoring import Request, ScoredDocument, TaskResult


class TaskStore:
    """Files of one evaluation: ``TASK.partial.jsonl`` while a task runs, then two that stay.

    ``TASK.json`` has the result, ``TASK.documents.jsonl`` the settings in its first line and then
    a line per document: ``document``, ``label``, ``scores`` of its answers (null for one that the
    model takes for impossible), ``hit``.

    settings: everything that a result depends on; files written under other settings are
        replaced, never mixed in.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = make_folder(Path(folder).parent, Path(folder).name)
        self.settings = dict(settings)

    def finished(self, task: str) -> TaskResult | None:
        """Return the result of an earlier run with the same settings, with its documents."""
        path = self.folder / f"{task}.json"
        scored = self._read_documents(task)
        if scored is None or not path.is_file():
            return None
        try:
            values = parse_json(read_bytes(path), strict=False)
            if values["settings"] != self.settings:
                return None
            return TaskResult.from_dict(values["result"], scored)
        except (ValueError, KeyError, TypeError):  # it is scored again
            return None

    def resume(self, task: str) -> list[Request]:
        """Return requests that an earlier run scored; a line cut by a crash is dropped."""
        path = self._partial(task)
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        head = json.dumps(self.settings)
        kept, requests = [head], list[Request]()
        if lines and lines[0] == head:
            for line in lines[1:]:
                try:
                    batch = parse_json(line.encode(), list, strict=False)
                    requests += [Request(*values) for values in batch]
                except (ValueError, TypeError):
                    break
                kept.append(line)
        write_text(path, "".join(f"{line}\n" for line in kept))
        return requests

    def add(self, task: str, requests: Sequence[Request]) -> None:
        """Append one batch."""
        line = json.dumps([astuple(request) for request in requests])
        append_text(self._partial(task), f"{line}\n")

    def finish(self, task: str, result: TaskResult) -> None:
        """Write the documents and the result, and drop the partial file."""
        lines = [
            {"document": d.document, "label": d.label, "scores": d.scores, "hit": d.hit}
            for d in result.scored
        ]
        rows = (plain_json(line, indent=None) for line in (self.settings, *lines))
        text = "".join(f"{row}\n" for row in rows)
        write_text(self._documents(task), text)
        write_json(
            self.folder / f"{task}.json", {"settings": self.settings, "result": result.to_dict()}
        )
        self._partial(task).unlink(missing_ok=True)

    def _read_documents(self, task: str) -> tuple[ScoredDocument, ...] | None:
        path = self._documents(task)
        if not path.is_file():
            return None
        try:
            lines = [parse_json(line, strict=False) for line in read_bytes(path).splitlines()]
            if not lines or lines.pop(0) != self.settings:
                return None
            return tuple(
                ScoredDocument(d["document"], d["label"], tuple(map(_score, d["scores"])))
                for d in lines
            )
        except (ValueError, KeyError, TypeError):
            return None

    def _documents(self, task: str) -> Path:
        return self.folder / f"{task}.documents.jsonl"

    def _partial(self, task: str) -> Path:
        return self.folder / f"{task}.partial.jsonl"


def _score(value: float | None) -> float:
    """Return a score as :func:`plain_json` wrote it; a logarithm of 0 is no JSON."""
    return -math.inf if value is None else value
