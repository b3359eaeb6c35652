"""A setting that nothing reads is refused."""

import dataclasses

import pytest

from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.routers import (
    L2RConfig,
    LinearSipsConfig,
    XMoEConfig,
    build_router,
    make_config,
)
from l2r.routers.config import options_of
from l2r.routers.xmoe import PRESETS

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


@pytest.mark.parametrize("source", PRESETS)
def test_the_presets_of_xmoe_set_nothing_that_is_not_read(source):
    config = XMoEConfig.preset(source)
    assert all(getattr(config, name) == value for name, value in PRESETS[source].items())


def test_a_replaced_field_is_checked_again():
    with pytest.raises(ValueError, match="gamma is read only with"):
        dataclasses.replace(L2RConfig(gamma=2.0), scoring="dot")
