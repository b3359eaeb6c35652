"""Where things that can be made again are kept."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$L2R_CACHE``, else ``~/.cache/l2r``; it need not exist yet."""
    return Path(os.environ.get("L2R_CACHE") or Path.home() / ".cache" / "l2r")
