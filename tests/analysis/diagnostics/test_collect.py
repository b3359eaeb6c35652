"""Collecting streams: exact sums over all tokens, bounded memory, masks, several ranks."""

import json

import numpy as np
import pytest
import torch
from torch import nn

from l2r import build_router, router_names
from l2r.analysis.diagnostics import metrics
from l2r.analysis.diagnostics import streaming_sums as sums
from l2r.analysis.diagnostics.collect import TokenSample, collect_records
from l2r.analysis.diagnostics.model_diagnosis import DiagnosisSettings, diagnose_layers
from l2r.analysis.diagnostics.step_statistics import RouterWatch
from l2r.errors import InputError
from l2r.files.diagnosis import read_diagnosis
from l2r.routers import Router, capture
from l2r.routers.observe import find_routers
from tests.analysis.diagnostics.models import batches, ours, stock
from tests.processes import on_two_ranks

DOMAINS = ("even", "odd")


def test_streamed_numbers_equal_those_of_all_tokens_at_once():
    model, data = ours(), batches()
    records = collect_records(model, data, domains=DOMAINS, sample=64)
    with torch.no_grad(), capture(model, inputs=True) as captured:
        for batch in data:
            model(input_ids=batch["input_ids"])
    domain = torch.cat([batch["domain"].repeat_interleave(10) for batch in data])
    row = torch.arange(len(domain)) // 10
    for record, (name, outputs) in zip(records, captured.outputs.items(), strict=True):
        assert record.name == name
        logits, weights, indices = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        x = torch.cat(captured.inputs[name]).reshape(-1, 16)
        query = record.router.query(x)
        close = {"rel": 1e-9, "abs": 1e-12}
        margins = metrics.margin_metrics(logits)
        assert metrics.margin_from_sums(record.sums["margin"]) == pytest.approx(margins, **close)
        load = metrics.load_from_sums(sums.usage_sums(indices, weights, 6))
        assert metrics.load_from_sums(record.sums["usage"]) == pytest.approx(load, **close)
        variance = metrics.pairwise_cosine_variance(query)
        got = metrics.cosine_variance_from_sums(record.sums["cosine"])
        assert got == pytest.approx(variance, **close)
        joint = sums.domain_sums(indices, domain, row, 6, 2)
        told = metrics.domain_information_from_sums(joint)
        got_told = metrics.domain_information_from_sums(record.sums["domain"])
        assert got_told == pytest.approx(told, **close)
        scores = torch.einsum("tr,nhr->tnh", query, record.router.anchors)
        scores = scores / torch.linalg.vector_norm(record.router.anchors, dim=-1)  # |k| is 1
        wins = sums.anchor_sums(scores, indices)["anchor_wins"]
        torch.testing.assert_close(record.sums["anchors"]["anchor_wins"], wins)


@pytest.mark.parametrize("kind", router_names())
def test_statistics_under_autocast_are_those_without(kind):
    model = nn.ModuleList([build_router(kind, hidden_size=16, num_experts=6, top_k=2)])
    data = [{"x": torch.randn(40, 16)}]

    def run(model, inputs):
        return model[0](inputs["x"])

    (plain,) = collect_records(model, data, run=run)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (under,) = collect_records(model, data, run=run)
    for part, numbers in plain.sums.items():
        for name, value in numbers.items():
            assert torch.equal(under.sums[part][name], value), (part, name)


@pytest.mark.parametrize("model", [ours("linear"), stock()], ids=["ours", "hugging face"])
def test_stock_hugging_face_models_are_read_like_ours(model):
    records = collect_records(model, batches(), sample=32)
    assert len(records) == 2
    assert all(record.num_experts == 6 for record in records)
    assert records[0].sums["margin"]["tokens"] == 3 * 4 * 10
    diagnosis = diagnose_layers(records, settings=DiagnosisSettings(certify=8))
    assert diagnosis.mean()["tightness_top1"] > 0.9
    json.dumps(diagnosis.layers)


def test_padding_changes_nothing():
    model, data = ours(), batches(1)
    padded = torch.nn.functional.pad(data[0]["input_ids"], (0, 5), value=1)
    mask = torch.nn.functional.pad(torch.ones(4, 10, dtype=torch.int64), (0, 5))
    plain = collect_records(model, data)
    masked = collect_records(model, [{"input_ids": padded, "attention_mask": mask}])
    by_name = collect_records(model, [{"input_ids": padded, "token_mask": mask}])
    for one, two, three in zip(plain, masked, by_name, strict=True):
        for part in ("margin", "usage", "cosine"):
            for name, value in one.sums[part].items():
                torch.testing.assert_close(two.sums[part][name], value, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(three.sums[part][name], value, rtol=1e-5, atol=1e-5)
        assert len(two.sample["x"]) == 40


def test_memory_does_not_grow_with_the_number_of_tokens():
    def entries(record):
        held = [value for part in record.sums.values() for value in part.values()]
        return sum(value.numel() for value in [*held, *record.sample.values()])

    model = ours()
    few = collect_records(model, batches(2, rows=8), domains=DOMAINS, sample=50)
    many = collect_records(model, batches(12, rows=8), domains=DOMAINS, sample=50)
    assert [entries(record) for record in few] == [entries(record) for record in many]
    assert many[0].sums["margin"]["tokens"] == 6 * few[0].sums["margin"]["tokens"]


def test_hooks_are_removed_and_modes_kept_even_after_an_error():
    model = ours().train()
    with pytest.raises(RuntimeError, match="stop"):
        collect_records(
            model,
            batches(1),
            run=lambda module, inputs: (_ for _ in ()).throw(RuntimeError("stop")),
        )
    assert model.training
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, Router))


def test_models_without_routers_and_data_without_tokens_are_refused():
    with pytest.raises(ValueError, match="Linear has no MoE router"):
        find_routers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="saw no tokens"):
        collect_records(ours(), [])


class _Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 3), nn.Identity()

    def forward(self, x):
        return self.gate(x)


def test_a_router_of_another_contract_is_named():
    with pytest.raises(ValueError, match="Linear must return logits"):
        collect_records(_Odd(), [{"x": torch.ones(2, 4)}])


def test_the_sample_is_uniform_and_the_same_for_any_batching():
    counts = torch.zeros(40)
    for seed in range(400):
        sample = TokenSample(10, seed)
        for part in torch.arange(40).split(7):
            sample.add({"position": part})
        kept = sample.gather()["position"]
        assert len(kept.unique()) == 10
        counts[kept] += 1
    expected, deviation = 100, (400 * 0.25 * 0.75) ** 0.5
    assert ((counts - expected).abs() < 4.5 * deviation).all()

    whole = TokenSample(10, 3)
    whole.add({"position": torch.arange(40)})
    parts = TokenSample(10, 3)
    for part in torch.arange(40).split(3):
        parts.add({"position": part})
    assert torch.equal(whole.gather()["position"], parts.gather()["position"])


def test_layers_sample_the_same_tokens():
    model = ours("linear")
    with torch.no_grad(), capture(model, inputs=True) as captured:
        model(input_ids=batches(1)[0]["input_ids"])
    records = collect_records(model, batches(1), sample=7)
    positions = []
    for record in records:
        x = captured.inputs[record.name][0].reshape(-1, 16)
        positions.append(torch.cdist(record.sample["x"], x).argmin(dim=1).tolist())
    assert positions[0] == positions[1]


@pytest.mark.usefixtures("coarse")
def test_diagnosis_is_plain_data_and_saves(tmp_path):
    records = collect_records(ours(heads=4), batches(), domains=DOMAINS, sample=40)
    diagnosis = diagnose_layers(records, domains=DOMAINS, settings=DiagnosisSettings(certify=4))
    diagnosis.save(tmp_path)
    saved = json.loads((tmp_path / "diagnosis.json").read_text())
    assert saved["layers"] == diagnosis.layers
    assert saved["info"]["tokens"] == 120
    again = read_diagnosis(tmp_path)
    assert (again.info, again.layers) == (diagnosis.info, diagnosis.layers)
    assert all(np.array_equal(again.arrays[name], diagnosis.arrays[name]) for name in again.arrays)
    assert again.arrays.keys() == diagnosis.arrays.keys() and again.mean() == diagnosis.mean()
    for layer in diagnosis.layers:
        assert layer["certified_top1"] <= layer["found_top1"]
        low, high = layer["stability_interval"]
        assert low <= layer["stability"] <= high
    plane = diagnosis.arrays["0.plane_first"]
    axis = torch.from_numpy(diagnosis.arrays["0.plane_axis"]).double()
    router = records[0].router
    for row, column in ((3, 150), (120, 40), (199, 199)):
        query = torch.stack([axis[column], axis[row]]).float()[None]
        scores = torch.nn.functional.cosine_similarity(query[:, None, None], router.anchors, dim=-1)
        phi = 1 + torch.tanh(query.norm())  # anchors start with norm 1
        assert plane[row, column] == torch.logsumexp(phi * scores, dim=-1).argmax()


def test_routers_without_a_certificate_say_so(monkeypatch):
    def refuse(router, x):
        raise InputError("no certificate is known")

    monkeypatch.setattr("l2r.analysis.diagnostics.model_diagnosis.certify", refuse)
    diagnosis = diagnose_layers(
        collect_records(ours(), batches(1)), settings=DiagnosisSettings(certify=4)
    )
    assert diagnosis.layers[0]["certificate"] == "no certificate is known"
    assert "certified_top1" not in diagnosis.mean()


def on_a_rank(rank):
    data = batches(4)[rank::2]
    record = collect_records(ours(), data, domains=DOMAINS, sample=16)[0]
    return record.sums, record.sample


@pytest.mark.slow("two processes")
def test_two_ranks_give_the_statistics_of_all_tokens(tmp_path):
    alone = collect_records(ours(), batches(4), domains=DOMAINS, sample=16)[0]
    (first, sample), (second, other) = on_two_ranks(on_a_rank, tmp_path)
    for part, values in alone.sums.items():
        for name, value in values.items():
            torch.testing.assert_close(first[part][name], second[part][name])
            if name != "blocks":  # every rank numbers its own rows
                torch.testing.assert_close(first[part][name], value)
    assert len(sample["x"]) == 16
    assert torch.equal(sample["x"], other["x"])


def with_nothing_on_one_rank(rank):
    """A rank without a batch, and one whose only batch is padding."""
    padding = {**batches(1)[0], "attention_mask": torch.zeros_like(batches(1)[0]["input_ids"])}
    found = []
    for nothing in ([], [padding]):
        data = batches(2) if rank == 0 else nothing
        record = collect_records(ours(), data, domains=DOMAINS, sample=16)[0]
        found.append((record.num_experts, record.sums, record.sample))
    return found, watched_on_one_rank(rank)


def watched_on_one_rank(rank):
    model = ours()
    watch = RouterWatch(model)
    watch.start()
    if rank == 0:
        model(input_ids=batches(1)[0]["input_ids"])
    return watch.read().scalars()


def test_a_rank_without_tokens_has_the_statistics_of_the_others(tmp_path):
    alone = collect_records(ours(), batches(2), domains=DOMAINS, sample=16)[0]
    watched = watched_on_one_rank(0)
    for found, numbers in on_two_ranks(with_nothing_on_one_rank, tmp_path):
        assert numbers == watched
        for experts, reduced, sample in found:
            assert experts == alone.num_experts and reduced.keys() == alone.sums.keys()
            for part, values in alone.sums.items():
                torch.testing.assert_close(reduced[part], values)
            assert torch.equal(sample["x"], alone.sample["x"])


def test_a_router_that_gets_no_finite_input_is_named():
    """Weights of 3e38 before it are finite, and what comes out of them is not."""
    model = ours()
    with torch.no_grad():
        model.model.layers[0].post_attention_layernorm.weight.fill_(3e38)
        model.model.layers[0].mlp.experts.down_proj.fill_(3e38)
    with pytest.raises(
        ValueError, match=r"router .*layers\.\d.* gets no finite input on this data"
    ):
        collect_records(model, batches(1))
