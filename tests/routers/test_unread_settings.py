"""A setting that nothing reads is refused, and configurations written by 0.1.0 still load."""

import dataclasses

import pytest

from l2r.routers import (
    L2RConfig,
    LinearSipsConfig,
    RouterConfig,
    XMoEConfig,
    build_router,
    make_config,
)
from l2r.routers.config import options_of
from l2r.routers.zoo.xmoe_presets import PRESETS
from l2r.runs.router_names import PAPER_ROUTERS

SIZES = {"hidden_size": 16, "num_experts": 8, "top_k": 2}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("linear_sips", {"scoring": "dot"}, "'linear_sips' fixes scoring='sips'; got 'dot'"),
        ("l2r_dot", {"gamma": 2.0}, "gamma is read only with scoring='sips'; got gamma=2.0"),
        ("l2r_dot", {"beta": 0.5}, "beta is read only with scoring='sips'"),
        ("l2r_dot", {"p": 2.0}, "p is read only with scoring='sips'"),
        ("l2r_dot", {"eps": 1e-3}, "eps is read only with scoring='cosine' or 'sips'"),
        ("l2r_cosine", {"p": 2.0}, "p is read only with scoring='sips'; .* scoring='cosine'"),
        ("l2r_sips", {"query_norm": "none", "norm_eps": 1e-3}, "norm_eps is read only with query"),
        ("xmoe", {"min_temperature": 0.1}, "read only with learn_temperature=True"),
        (
            "xmoe",
            {"gate": "sigmoid", "normalize_weights": True},
            "normalize_weights is read only with gate='softmax'",
        ),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        build_router(kind, **SIZES, **options)


def test_a_linear_sips_configuration_with_another_score_is_refused():
    with pytest.raises(ValueError, match="scoring must be sips"):
        LinearSipsConfig(scoring="dot")


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_every_option_that_is_offered_is_read(kind):
    """Every option of a kind can be moved off its default, alone or beside its condition."""
    moved = {
        "query_norm": "none",
        "anchor_init": "normal" if kind == "xmoe" else "even",
        "gate": "sigmoid",
        "dtype": "float64",
        "rank": 3,
        "anchor_norm": 1.5,
        "init_std": 0.5,
        "p": 8.0,
        "heads": 3,
    }
    for name in options_of(kind):
        default = getattr(make_config(kind), name)
        conditions = make_config(kind).read_with.get(name, {})
        beside = {other: values[0] for other, values in conditions.items() if other != "scoring"}
        value = moved.get(name, not default if isinstance(default, bool) else None)
        value = default / 2 if value is None else value
        assert getattr(make_config(kind, **{**beside, name: value}), name) == value != default


# to_dict() of each router as version 0.1.0 wrote it into recipes and model folders.
_SHARED = {
    "normalize_weights": False,
    "temperature": 1.0,
    "learn_temperature": False,
    "dtype": "float32",
}
_SCORE = {
    "query_norm": "rmsnorm",
    "gamma": 1.0,
    "beta": 1.0,
    "p": 4.0,
    "norm_eps": 1e-5,
    "eps": 1e-6,
}
_LOW_RANK = {"rank": 2, "heads": 16, "init_std": None}
WRITTEN_BY_0_1_0 = [
    {"kind": "linear", **_SHARED, "init_std": 0.02},
    {"kind": "linear_sips", **_SHARED, "scoring": "sips", **_SCORE},
    {
        "kind": "xmoe",
        **_SHARED,
        "rank": None,
        "bias": False,
        "normalize_query": True,
        "anchor_init": "orthogonal",
        "anchor_scale": 1.0,
        "anchor_norm": None,
        "eps": 1e-6,
        "min_temperature": 0.01,
        "gate": "softmax",
    },
    {"kind": "l2r_dot", **_SHARED, "scoring": "dot", **_SCORE, **_LOW_RANK},
    {"kind": "l2r_cosine", **_SHARED, "scoring": "cosine", **_SCORE, **_LOW_RANK},
    {"kind": "l2r_sips", **_SHARED, "scoring": "sips", **_SCORE, **_LOW_RANK},
]


@pytest.mark.parametrize("values", WRITTEN_BY_0_1_0, ids=lambda values: values["kind"])
def test_configurations_written_by_0_1_0_load(values):
    config = RouterConfig.from_dict(values)
    assert config == make_config(values["kind"])
    assert config.to_dict().items() >= values.items()  # later fields have their defaults


@pytest.mark.parametrize("source", PRESETS)
def test_the_presets_of_xmoe_set_nothing_that_is_not_read(source):
    config = XMoEConfig.preset(source)
    assert all(getattr(config, name) == value for name, value in PRESETS[source].items())


def test_a_replaced_field_is_checked_again():
    with pytest.raises(ValueError, match="gamma is read only with"):
        dataclasses.replace(L2RConfig(gamma=2.0), scoring="dot")
