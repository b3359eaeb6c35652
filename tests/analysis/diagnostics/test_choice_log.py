"""The choices of single tokens: what is noted, how many are kept, and saturation over them."""

import numpy as np
import pytest
import torch

from l2r.analysis.diagnostics.choice_log import ChoiceLog, choices_of
from l2r.analysis.diagnostics.collect import collect_records
from l2r.analysis.diagnostics.model_diagnosis import DiagnosisSettings, diagnose_layers
from l2r.analysis.diagnostics.routing_gain import RoutingGain
from l2r.analysis.diagnostics.specialization import saturation
from l2r.analysis.diagnostics.streaming_sums import margins
from l2r.routers import capture
from tests.analysis.diagnostics.models import batches, ours, stock


def run(model, inputs):
    return model(**inputs)


def test_choices_are_what_the_routers_returned_on_the_grid_of_the_text():
    model, data = ours(heads=3), batches(3)
    data[1]["token_mask"] = torch.ones(4, 10, dtype=torch.bool)
    data[1]["token_mask"][2, 4:] = False
    log = ChoiceLog()
    collect_records(model, data, reducers=[log])
    got = log.choices()
    assert got.num_experts == 6 and [e.shape for e in got.experts] == [(12, 10, 2)] * 2
    for number, batch in enumerate(data):
        rows = slice(4 * number, 4 * number + 4)
        with torch.no_grad(), capture(model) as record:
            guess = model(batch["input_ids"]).logits.argmax(-1)
        np.testing.assert_array_equal(got.words[rows], batch["input_ids"])
        np.testing.assert_array_equal(got.predicted[rows], guess)
        real = batch.get("token_mask", torch.ones(4, 10, dtype=torch.bool)).numpy()
        for layer, (output,) in enumerate(record.outputs.values()):
            assert (got.experts[layer][rows][~real] == -1).all()
            best = output.indices.gather(1, output.weights.argsort(1, descending=True))
            np.testing.assert_array_equal(
                got.experts[layer][rows][real], best.view(4, 10, 2).numpy()[real]
            )
            gap = margins(output.logits)[1].view(4, 10).numpy()
            np.testing.assert_allclose(got.margin[layer][rows], gap, rtol=2**-10)  # fp16


def test_above_the_limit_rows_are_dropped_evenly_and_alike_for_every_model():
    data = batches(5)  # 20 rows of 10 tokens
    kept = []
    for model in (ours("linear"), stock()):
        log = ChoiceLog(limit=70)
        collect_records(model, data, reducers=[log])
        kept.append(log.choices())
    rows = torch.cat([batch["input_ids"] for batch in data])
    np.testing.assert_array_equal(kept[0].words, rows[::4])
    np.testing.assert_array_equal(kept[1].words, rows[::4])
    assert kept[0].data == kept[1].data != choices_of(stock(), batches(5, seed=1), run).data
    alone = choices_of(stock(), data, run)
    np.testing.assert_array_equal(alone.experts[1][::4], kept[1].experts[1])
    with pytest.raises(ValueError, match="at least 1 batch; got 0"):
        ChoiceLog().choices()
    text = {"input_ids": data[0]["input_ids"]}
    with pytest.raises(ValueError, match="gate saw 40 in 3 rows"):
        choices_of(stock(), [{"rows": torch.zeros(3)}], lambda model, _: model(**text))


def test_rows_of_several_lengths_are_filled_up_with_no_tokens():
    got = choices_of(stock(), [*batches(1, length=4), *batches(1, length=7)], run)
    assert (got.experts[0][:4, 4:] == -1).all() and (got.experts[0][4:] >= 0).all()
    assert (got.words[:4, 4:] == -1).all()


def test_saturation_is_one_for_the_same_checkpoint_and_equals_a_loop():
    data = batches(4)
    last = choices_of(stock(), data, run).experts
    torch.manual_seed(1)
    changed = stock()
    for layer in changed.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=0.02)
    first = choices_of(changed, data, run).experts
    got = saturation({10: first, 20: last}, last)
    assert got["checkpoints"] == [10, 20]
    assert got["top1"][1] == got["topk"][1] == [1, 1]
    for layer in range(2):
        tokens = list(
            zip(first[layer].reshape(-1, 2).tolist(), last[layer].reshape(-1, 2).tolist(), strict=1)
        )
        shared = [len({*a} & {*b}) / 2 for a, b in tokens]
        assert got["topk"][0][layer] == pytest.approx(np.mean(shared))
        assert got["top1"][0][layer] == pytest.approx(np.mean([a[0] == b[0] for a, b in tokens]))
        assert 0 < got["topk_by_chance"][layer] < 1
    with pytest.raises(ValueError, match="10 differs from the last in layers"):
        saturation({10: first[:1]}, last)


def test_a_diagnosis_holds_the_analyses_and_reads_back(tmp_path):
    log, data = ChoiceLog(), batches(3)
    records = collect_records(ours(), data, reducers=[log])
    gain = RoutingGain(2.0, 0.5, 0.25)
    settings = DiagnosisSettings(certify=0, least=2)
    got = diagnose_layers(records, settings=settings, choices=log.choices(), gain=gain)
    numbers = got.numbers()
    assert (numbers["cross_entropy"], numbers["routing_gain"]) == (2.0, 0.5)
    for name in ("vocabulary_input", "vocabulary_next", "vocabulary_predicted", "coactivation"):
        assert 0 < numbers[name] <= 1 and 0 < numbers[f"{name}_by_chance"] < 1
    assert numbers["distinct_paths"] >= len(got.info["paths"])
    assert "path_information" not in got.layers[0] and got.layers[1]["path_information"] > 0
    assert got.array(1, "frequency").shape == (5, 4)
    assert got.array(0, "experts").shape == (12, 10, 2)
    plain = diagnose_layers(records, settings=settings)
    assert plain.info["model"] == {} and "data" not in plain.info
    assert plain.numbers() == plain.mean()
