"""Triton kernels run in its interpreter where there is no GPU; set before Triton is imported.

``test_cuda_only.py`` (graphs, full sizes) is collected on a machine with a GPU alone.
"""

import os
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import jaxtyping
import numpy as np
import pytest
import torch

collect_ignore_glob: list[str] = []
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    collect_ignore_glob.append("test_cuda_only.py")

NUMPY_TOO_NEW = "Triton's interpreter before 3.7 makes scalars of arrays, which numpy 2.4 refuses"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the interpreter out where it cannot work; on a GPU it is not used."""
    if torch.cuda.is_available() or find_spec("triton") is None:
        return
    triton, numpy = (
        tuple(map(int, version.split(".")[:2]))
        for version in (metadata.version("triton"), np.__version__)
    )
    if triton < (3, 7) and numpy >= (2, 4):
        for item in items:
            if "tests/kernels" in item.nodeid and "triton" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=NUMPY_TOO_NEW))


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


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No run-time checks of annotations, which torch.compile cannot trace."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
