"""Shapes are checked in every test, in each function's first calls there."""

import sys

import jaxtyping
import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from l2r.functional.scoring import low_rank_query
from l2r.hf.models import olmoe
from tests import shape_checks

WRONG = torch.zeros(2, 3), torch.zeros(4, 5)
_calls = []


def _square(x: Float[Tensor, "N N"]) -> Float[Tensor, "N N"]:
    _calls.append(x.shape)
    return x


@pytest.fixture
def square():
    _calls.clear()
    return jaxtyping.jaxtyped(typechecker=_beartype)(_square)


def _beartype(function):
    from beartype import beartype

    return beartype(function)


@pytest.mark.parametrize("test", [1, 2])
def test_the_hook_checks_a_function_of_the_package_in_each_test(test):
    for _ in range(shape_checks.CALLS):
        with pytest.raises(TypeCheckError):
            low_rank_query(*WRONG)


def test_a_test_checks_the_first_calls_of_a_function(square):
    for _ in range(shape_checks.CALLS):
        with pytest.raises(TypeCheckError):
            square(torch.zeros(2, 3))
    square(torch.zeros(2, 3))
    assert _calls == [(2, 3)]
    shape_checks.begin_test()
    with pytest.raises(TypeCheckError):
        square(torch.zeros(2, 3))


def test_a_result_is_checked_too():
    def row(x: Float[Tensor, "N M"]) -> Float[Tensor, "N M"]:
        return x[0]

    with pytest.raises(TypeCheckError):
        jaxtyping.jaxtyped(typechecker=_beartype)(row)(torch.zeros(2, 3))


def test_unchecked_calls_run_as_they_are(square, unchecked):
    square(torch.zeros(2, 3))
    assert _calls == [(2, 3)]


def test_what_a_checked_module_imports_is_found_under_its_own_name():
    checked, imported = olmoe, sys.modules["transformers.models.olmoe.modeling_olmoe"]
    assert "jaxtyping" in type(checked.__loader__).__module__
    assert "jaxtyping" not in imported.__cached__
