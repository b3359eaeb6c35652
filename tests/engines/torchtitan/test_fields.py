"""Every field of torchtitan's Qwen3-MoE with another value: exported and equal, or refused."""

import copy
import dataclasses

import pytest

from l2r.errors import InputError
from tests.engines.engines import SIPS

from .models import qwen3_configuration, scaled
from .walk import MASKED, MOVES, NO_MATTER, NOT_HERE, TRIED, all_fields, tried

from torchtitan.config import Configurable  # isort: skip

from l2r.engines.torchtitan import fields as known  # isort: skip
from l2r.engines.torchtitan.checkpoint import hugging_face_model, to_hugging_face  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]
CASES = [(key, *case) for key, cases in TRIED.items() for case in cases]


def test_the_walk_has_every_field_that_is_no_part():
    parts = set(known._PARTS) | {"layers"}
    walked = {key for key in all_fields() if key[1] not in parts}
    assert walked and walked <= TRIED.keys(), sorted(map(str, walked - TRIED.keys()))


@pytest.mark.parametrize("case", CASES, ids=[f"{k.__name__}.{f}-{v}" for (k, f), v, *_ in CASES])
def test_a_field_is_exported_and_equal_or_refused_by_its_name(case):
    """Nothing in between, and a value that should matter moves the engine's logits by over 1%."""
    row = tried(*case)
    if row.effect == MOVES:
        assert row.moved > 0.01
    if row.effect in (NO_MATTER, MASKED):
        assert row.moved < 1e-6  # FlexAttention sums in another order than SDPA
    if row.refused:
        assert row.field in row.refused and row.effect not in (NO_MATTER, MASKED)
    elif row.effect != NOT_HERE:
        # Two implementations sum the same numbers: see tests/engines/engines.py.
        assert row.difference < 1e-5


def _subclass(config):
    """The same configuration of a class of somebody else's."""
    owner = config._owner

    class Other(owner):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            pass

    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return Other.Config(**values)


def _places(config, path=""):
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Configurable.Config):
                yield config, field.name, number if isinstance(value, list) else None, path
                yield from _places(each, f"{path}{field.name}.")


def test_a_part_of_a_class_that_nobody_looked_at_is_refused_by_its_name():
    whole = qwen3_configuration(SIPS)
    places = sum(1 for _ in _places(whole))
    assert places > 30
    for place in range(places):
        config = copy.deepcopy(whole)
        owner, name, number, _ = list(_places(config))[place]
        if number is None:
            setattr(owner, name, _subclass(getattr(owner, name)))
        else:
            getattr(owner, name)[number] = _subclass(getattr(owner, name)[number])
        (line,) = known.without_export(config)
        assert name in line and "Other" in line


def test_a_field_of_a_newer_torchtitan_is_refused_unless_it_has_its_default(monkeypatch):
    config = qwen3_configuration(SIPS)
    table = {**known.FIELDS[known.CosSinRoPE]}
    del table["theta"]
    monkeypatch.setitem(known.FIELDS, known.CosSinRoPE, table)
    assert known.without_export(config) == []  # the default
    config = qwen3_configuration(SIPS, theta=5e4)
    (line,) = known.without_export(config)
    assert line == "layers.*.attention.rope.theta must be 10000.0; got 50000.0"
    del table["dim"]
    (line, _) = known.without_export(config)
    assert (
        line == "layers.*.attention.rope.dim is unknown, and its value is part of the model; got 16"
    )


@pytest.mark.parametrize(
    ("field", "value"), [("rope_parameters", {"rope_type": "default", "rope_theta": 9e3}),
                         ("rms_norm_eps", 1e-4), ("norm_topk_prob", False)],
)  # fmt: skip
def test_an_export_that_is_wrong_is_not_written(field, value, monkeypatch):
    config = qwen3_configuration(SIPS)
    config.layers[0].moe.load_balance_coeff = config.layers[1].moe.load_balance_coeff = None
    model = scaled(config)
    right = known.settings(config)
    assert right[field] != value
    from l2r.engines.torchtitan import checkpoint

    monkeypatch.setattr(checkpoint, "settings", lambda config: {**right, field: value})
    with pytest.raises(InputError, match=r"would not be the engine's: .*nothing was written"):
        to_hugging_face(model)
    assert hugging_face_model(config) is not None
