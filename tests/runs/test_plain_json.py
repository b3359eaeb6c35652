"""JSON that every parser reads: null where a number is not finite."""

import json
import math

import numpy as np
import pytest

from l2r.runs.plain_json import plain_json
from l2r.runs.reading import parse_json


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_a_number_that_is_not_finite_is_null_at_any_depth(bad):
    value = {"a": bad, "b": [1.5, bad, {"c": (bad, "NaN", None, True, 7)}]}
    parsed = parse_json(plain_json(value).encode())
    assert parsed == {"a": None, "b": [1.5, None, {"c": [None, "NaN", None, True, 7]}]}


def test_all_else_is_as_json_writes_it():
    value = {"z": [0.1, 1e300, -3, "ä\n"], "a": {"1": None, "2": [False, (2, 3)]}, "e": []}
    assert plain_json(value) == json.dumps(value, indent=2)
    assert plain_json(value, indent=None) == json.dumps(value, separators=(",", ":"))
