"""Triton kernels run in its interpreter where there is no GPU; tests/conftest.py sets that.

``test_cuda_only.py`` (graphs, full sizes) is collected on a machine with a GPU alone.
"""

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import numpy as np
import pytest
import torch

collect_ignore_glob: list[str] = []
if not torch.cuda.is_available():
    collect_ignore_glob.append("test_cuda_only.py")
    if find_spec("triton") is not None:
        from interpreter import replace_once

        replace_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Triton's interpreter before 3.7 makes scalars of arrays; a GPU has no use for it.

    numpy warns of that since 1.25 and refuses it since 2.4.
    """
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    triton, numpy = (
        tuple(map(int, version.split(".")[:2]))
        for version in (metadata.version("triton"), np.__version__)
    )
    mark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
    if numpy >= (2, 4):
        mark = pytest.mark.skip(reason="this Triton's interpreter does not work with numpy 2.4")
    for item in items:
        if triton < (3, 7) and "tests/kernels" in item.nodeid and "triton" in item.nodeid:
            item.add_marker(mark)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every result of a kernel starts as NaN (integers: far outside), so holes are seen."""
    from l2r.kernels import contract

    def empty(*shape: int, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        kind = dtype or like.dtype
        value = float("nan") if kind.is_floating_point else -(2**40)
        return torch.full(shape, value, device=like.device, dtype=kind)

    monkeypatch.setattr(contract, "empty", empty)
    yield
