"""``dispatch`` and ``plain`` write their signatures out, so that a call costs no wrapper: equal."""

import inspect

import pytest

from l2r.kernels import dispatch, plain

FUNCTIONS = sorted(
    name
    for name, value in vars(dispatch).items()
    if inspect.isfunction(value) and hasattr(plain, name)
)


def test_every_plain_function_has_a_dispatched_form():
    own = {n for n, f in vars(plain).items() if getattr(f, "__module__", "") == plain.__name__}
    functions = {name for name in own if inspect.isfunction(getattr(plain, name))}
    assert {*functions, "best_experts"} == {*FUNCTIONS}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_equal(name):
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (dispatch, plain))
    assert str(ours) == str(theirs)  # jaxtyping makes its types anew
