"""A conducted diagnosis is what its parts give alone, from one pass over the data."""

import math

import numpy as np
import pytest
import torch

from l2r.analysis import Extent, diagnose_checkpoint, diagnose_subject
from l2r.analysis.diagnostics import model_diagnosis
from l2r.analysis.diagnostics.choice_log import choices_of
from l2r.analysis.diagnostics.collect import collect_records
from l2r.analysis.diagnostics.model_diagnosis import DiagnosisSettings, diagnose_layers
from l2r.analysis.diagnostics.routing_gain import batch_loss, measure_routing_gain, sample_evenly
from l2r.analysis.diagnostics.text_routing import TextTrace
from l2r.analysis.inputs import DiagnosisSubject
from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import read_diagnosis
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from tests.analysis.diagnostics.models import batches, ours, stock

pytestmark = pytest.mark.usefixtures("coarse")

SETTINGS = DiagnosisSettings(certify=2, repeats=2)


def subject(model, count=2):
    data = batches(count)
    return DiagnosisSubject(model, lambda size, device: iter(data), 4 * count, ("one", "two"), {})


@pytest.mark.parametrize("make", [ours, stock])
def test_every_part_is_what_it_gives_alone(make):
    model, data = make(), batches(2)
    given = subject(model)
    extent = Extent(4, 16, text=8, gain=8, settings=SETTINGS)
    got = diagnose_subject(given, extent)
    records = collect_records(model, data, domains=given.domains, sample=16)
    gain = measure_routing_gain(model, sample_evenly(data, 8, 8, 4), batch_loss)
    choices = choices_of(model, data, given.run)
    expected = diagnose_layers(
        records, domains=given.domains, settings=SETTINGS, choices=choices, gain=gain
    )
    assert got.diagnosis.layers == expected.layers
    assert got.diagnosis.info["model"] == expected.info["model"]
    trace = TextTrace(model, domains=given.domains, tokens=8)
    collect_records(model, data, domains=given.domains, reducers=[trace])
    np.testing.assert_array_equal(got.text.experts, trace.result(None).experts)
    assert got.patches is None and got.model == type(model).__name__


def test_layers_measured_side_by_side_have_the_same_numbers(monkeypatch):
    model, with_gradients, certify = ours(), [], model_diagnosis.certify

    def watched(*given):
        with_gradients.append(torch.is_grad_enabled())
        return certify(*given)

    monkeypatch.setattr(model_diagnosis, "certify", watched)
    records = collect_records(model, batches(2), domains=("one", "two"), sample=16)
    alone = diagnose_layers(records, domains=("one", "two"), settings=SETTINGS)
    torch.set_num_threads(3)
    together = diagnose_layers(records, domains=("one", "two"), settings=SETTINGS)
    assert torch.get_num_threads() == 3
    assert with_gradients == [False] * 4  # a thread begins with gradients
    assert together.layers == alone.layers
    for name, value in alone.arrays.items():
        np.testing.assert_array_equal(together.arrays[name], value)
    records[1].sample.clear()
    with pytest.raises(KeyError):
        diagnose_layers(records, settings=SETTINGS)
    assert torch.get_num_threads() == 3


def test_the_data_are_read_once_for_all_reducers():
    model, passes = ours(), []
    data = batches(3)

    def counted(size, device):
        passes.append(size)
        return iter(data)

    given = DiagnosisSubject(model, counted, 12, ("one", "two"), {})
    diagnose_subject(given, Extent(4, 16, gain=0, text=8, settings=SETTINGS))
    assert passes == [4]


def test_a_checkpoint_is_opened_diagnosed_and_saved_with_its_progress(tmp_path):
    model, folder, data = stock(), tmp_path / "model", tmp_path / "data"
    model.save_pretrained(folder)
    documents = {"one": [list(range(2, 42))], "two": [list(range(20, 60))]}
    write_token_files(data, documents, tokenizer=TokenizerIdentity("none", 64, 0))
    steps = []
    found = diagnose_checkpoint(
        folder,
        str(data),
        instances=4,
        length=10,
        extent=Extent(2, 8, gain=2, text=0, settings=SETTINGS),
        report=lambda what, done, total: steps.append((what, done, total)),
    )
    assert steps == [("data", 1, 2), ("data", 2, 2), ("layers", 1, 2), ("layers", 2, 2)]
    found.save(tmp_path / "out")
    assert read_diagnosis(tmp_path / "out").info["checkpoint"] == str(folder)
    assert found.text is None and not (tmp_path / "out" / "text.npz").exists()
    found._replace(text=diagnose_subject(subject(model), Extent(4, 8, text=4)).text).save(tmp_path)
    assert TextRouting.read(tmp_path / "text.npz").domains.tolist() == ["one", "two"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"instances": 0}, "instances must be >= 1; got 0"),
        ({"length": 0}, "length must be >= 2; got 0"),
    ],
)
def test_sizes_are_checked_before_anything_is_loaded(sizes, message):
    with pytest.raises(ValueError, match=message):
        diagnose_checkpoint("nowhere", **sizes)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        (Extent, {"batch_size": 0}, "batch-size must be >= 1; got 0"),
        (Extent, {"sample": 0}, "sample must be >= 1; got 0"),
        (Extent, {"gain": -1}, "gain must be >= 0; got -1"),
        (Extent, {"text": -1}, "text must be >= 0; got -1"),
        (Extent, {"threshold": math.nan}, "threshold must be finite; got nan"),
        (DiagnosisSettings, {"sigma": math.nan}, "sigma must be between 0 and 1,000,000; got nan"),
        (DiagnosisSettings, {"sigma": math.inf}, "sigma must be between 0 and 1,000,000; got inf"),
        (DiagnosisSettings, {"sigma": 1e39}, "sigma must be between"),  # above fp32
        (DiagnosisSettings, {"repeats": 0}, "repeats must be >= 1"),
        (DiagnosisSettings, {"seed": 2**63}, r"seed must be >= 0 and below 2\^63"),
        (DiagnosisSettings, {"certify": -1}, "certify must be >= 0"),
    ],
)
def test_settings_out_of_range_are_refused_before_the_data_is_read(kind, sizes, message):
    with pytest.raises(ValueError, match=message):
        kind(**sizes)


def test_a_model_is_left_in_its_mode():
    model = ours()
    model.train()
    diagnose_subject(subject(model), Extent(4, 8, text=0, gain=0, settings=SETTINGS))
    assert model.training and not any(module._forward_hooks for module in model.modules())
    assert torch.is_grad_enabled()
