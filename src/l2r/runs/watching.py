"""Follow a run that another process trains."""

import time
from collections.abc import Iterator

from l2r.runs.folder import RunFolder


def changes_of(run: RunFolder, interval: float) -> Iterator[None]:
    """Yield at once and at every change of the run's records, until the run is finished.

    Looks every ``interval`` seconds.
    """
    seen = None
    while not run.is_finished():
        records = run.metrics.stat() if run.metrics.is_file() else None
        version = (records.st_mtime_ns, records.st_size) if records else (0, 0)
        if version != seen:
            seen = version
            yield
        time.sleep(interval)
