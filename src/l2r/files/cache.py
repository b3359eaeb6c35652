"""Cache folder, for things that can be made again."""

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

_log = logging.getLogger("l2r")


def cache_folder() -> Path:
    """``$L2R_CACHE``, else ``~/.cache/l2r``; the first need not exist yet.

    Without a home, or where nothing can be made in it (a container that runs as another user), a
    temporary folder of this process and of those that it starts.
    """
    if named := named_cache():
        return Path(named)
    try:
        folder = Path.home() / ".cache" / "l2r"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the second: no home is known
        return _temporary(str(error))
    return folder


def named_cache() -> str | None:
    """Return the folder that ``$L2R_CACHE`` names, if any."""
    return os.environ.get("L2R_CACHE")


def _temporary(reason: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="l2r-cache-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["L2R_CACHE"] = str(folder)  # read by the processes that this one starts
    message = "no cache can be kept at home (%s): %s is used and then removed; set L2R_CACHE"
    _log.warning(message, reason, folder)
    return folder
