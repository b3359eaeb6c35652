"""What the plugs of all engines share: an engine that is missing, and what a plug can carry."""

import importlib
import re
from importlib import metadata

import pytest

from l2r import build_router
from l2r.engines.engine import engine_router, selecting_as
from l2r.routers import RouterConfig
from l2r.routers.selection_rule import Selection
from l2r.versions import TRIED

SIZES = {"hidden_size": 8, "num_experts": 4, "top_k": 2}


MODULES = {
    "olmo_core": "ai2-olmo-core",
    "olmo_core.checkpoint": "ai2-olmo-core",
    "megatron": "megatron-core",
    "megatron.checkpoint": "megatron-core",
    "torchtitan": "torchtitan",
}


@pytest.mark.parametrize("module", MODULES)
def test_a_plug_without_its_engine_says_what_to_install(module):
    package = MODULES[module]
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        with pytest.raises(
            ImportError, match=re.escape(f"l2r needs {package}>={TRIED[package].oldest};")
        ):
            importlib.import_module(f"l2r.engines.{module}")
    else:
        assert importlib.import_module(f"l2r.engines.{module}")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "xmoe", "anchor_norm": 1.5}, r"anchor_norm must be None .* got anchor_norm=1\.5"),
        ({"kind": "l2r_sips", "query_norm": "batchnorm"}, "query_norm must be rmsnorm or none"),
    ],
)
def test_what_an_engine_cannot_carry_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        engine_router(values, **SIZES)


@pytest.mark.parametrize(
    ("kind", "rule", "expected"),
    [
        ("l2r_sips", Selection(normalize=True), {"normalize_weights": True}),
        ("attention", Selection(), {"normalize_weights": False}),
        ("xmoe", Selection(gate="sigmoid"), {"gate": "sigmoid"}),
        (
            "sigmoid",
            Selection(gate="sigmoid", scale=2.5, bias="b"),
            {"scale": 2.5, "normalize_weights": False},
        ),
        ("l2r_sips", Selection(gate="sigmoid"), None),
        ("l2r_sips", Selection(bias="b"), {"selection_bias": True}),
        (
            "low_rank",
            Selection(bias="b", normalize=True),
            {"selection_bias": True, "normalize_weights": True},
        ),
        ("l2r_sips", Selection(scale=2.0), None),
        ("sigmoid", Selection(), None),
        ("sigmoid", Selection(gate="sigmoid", groups=2), None),
    ],
)
def test_a_checkpoint_selects_as_the_engine_did_or_is_refused(kind, rule, expected):
    router = build_router(kind, **SIZES)
    if expected is None:
        with pytest.raises(ValueError, match=f"no {kind} router selects by itself as the engine"):
            selecting_as(router, rule)
        return
    config: RouterConfig = selecting_as(router, rule)
    own = build_router(config, **SIZES).selection
    assert (own.gate, own.normalize, own.scale) == (rule.gate, rule.normalize, rule.scale)
    assert (own.bias is None) == (rule.bias is None)
    assert config.to_dict() == {**router.config.to_dict(), **expected}
