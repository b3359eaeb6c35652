"""Stock models of every family in bf16, from a folder: recorded, replayed, checked, diagnosed."""

import pytest
import torch

from l2r.analysis.diagnostics.checks.table import check_model
from l2r.analysis.diagnostics.collect import collect_records
from l2r.analysis.diagnostics.model_diagnosis import DiagnosisSettings, diagnose_layers
from l2r.fitting import fit_routers
from l2r.hf.routes import record, replay
from l2r.hf.swap import freeze_routers, swap_routers, train_routers_only
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import find_sites, router_sites
from l2r.routers import L2RConfig, Router
from tests.hf.families import FAULTS, LOOPED, from_folder, sample_tokens, tiny_model
from tests.tiers import few_families


@pytest.mark.parametrize("name", few_families([n for n in FAMILIES if n not in LOOPED]))
def test_a_stock_model_in_bf16_replays_its_routes_to_the_bit(name, tmp_path):
    model, ids = from_folder(name, tmp_path), sample_tokens()
    with torch.no_grad():
        with record(model) as recorder:
            expected = model(ids, use_cache=False).logits
        with replay(model, recorder.routes()):
            replayed = model(ids, use_cache=False).logits
    assert torch.equal(replayed, expected)


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_a_stock_model_in_bf16_is_checked_and_diagnosed(name, tmp_path):
    model, ids = from_folder(name, tmp_path), sample_tokens()
    faults = [f for f in check_model(model, {"input_ids": ids}) if f.status == "fault"]
    assert [f for f in faults if f.check not in FAULTS.get(name, ())] == []
    records = collect_records(model, [{"input_ids": ids}])
    diagnosis = diagnose_layers(records, settings=DiagnosisSettings(certify=4))
    assert all("entropy" in layer for layer in diagnosis.layers)


def test_layers_that_run_in_a_loop_have_no_single_route(tmp_path):
    model = from_folder("inkling2_loop_text", tmp_path)
    with pytest.raises(ValueError, match="layer 1 was called twice in a call"), record(model):
        model(sample_tokens(), use_cache=False)


def test_layers_by_token_id_are_recorded_and_left_alone_by_replay_and_swap(tmp_path):
    """DeepSeek-V4: two layers choose by token ids, two by logits."""
    model, ids = from_folder("deepseek_v4", tmp_path, torch.float32), sample_tokens()
    tables = [site.router.tid2eid for site in find_sites(model) if site.by_token]
    with record(model) as recorder, torch.no_grad():
        model(ids, use_cache=False)
    routes = recorder.routes()
    assert routes.fingerprint.layers == (0, 1, 2, 3)
    for layer, table in enumerate(tables):
        assert torch.equal(torch.from_numpy(routes.experts[:, layer]).long(), table[ids.flatten()])
    before = [site.router.forward for site in find_sites(model) if site.by_token]
    with replay(model, routes):
        inside = [site.router.forward for site in find_sites(model) if site.by_token]
        assert inside == before
        model(ids, use_cache=False)
    assert [site.layer for site in router_sites(model)] == [2, 3]
    with pytest.raises(ValueError, match=r"\(2, 3\); got 0"):
        swap_routers(model, L2RConfig(rank=2, heads=1), layers=[0])
    with pytest.warns(UserWarning, match="untrained"):
        swap_routers(model, L2RConfig(rank=2, heads=1))
    assert [isinstance(s.router, Router) for s in find_sites(model)] == [False, False, True, True]
    fit_routers(model, [ids] * 10)


def test_layers_by_token_id_are_not_certified_and_have_no_stability(tmp_path):
    model, ids = from_folder("deepseek_v4", tmp_path), sample_tokens()
    records = collect_records(model, [{"input_ids": ids}])
    layers = diagnose_layers(records, settings=DiagnosisSettings(certify=4)).layers
    assert ["stability" in layer for layer in layers] == [False, False, True, True]
    assert all("by the ids of tokens" in layer["certificate"] for layer in layers[:2])
    assert records[0].sums["usage"]["topk"].sum() == 2 * ids.numel()


def test_the_gate_of_a_layer_by_token_id_is_a_router_that_trains(tmp_path):
    model = from_folder("deepseek_v4", tmp_path)
    names = train_routers_only(model)
    assert "model.layers.0.mlp.gate.weight" in names
    assert names == freeze_routers(model)


def test_routers_of_other_tokens_than_text_stay_as_they_are():
    """Ernie 4.5 VL routes images with a second router of the same class in each layer."""
    model = tiny_model(FAMILIES["ernie4_5_vl_moe"])
    assert [site.path.split(".")[-2] for site in find_sites(model)] == ["text_moe"]
