"""Blocks in which a diagnosis, or a call, takes less time; see the fixtures of conftest.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import jaxtyping


@contextmanager
def unchecked() -> Iterator[None]:
    """No run-time checks of annotations: torch.compile cannot trace them, searches crawl."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@contextmanager
def coarse() -> Iterator[None]:
    """Certificates of fewer rounds and a shorter search: as sound, faster, less tight."""
    from l2r.analysis.certificates import rank2_radii
    from l2r.analysis.certificates.attack import find_flip
    from l2r.analysis.diagnostics import model_diagnosis

    short = partial(find_flip, starts=2, steps=4)
    with patch.object(rank2_radii, "ROUNDS", 12), patch.object(model_diagnosis, "find_flip", short):
        yield
