"""Measures of a run whose model is on another device than the CPU: none mixes the two."""

import pytest
import torch

from l2r.analysis import Extent, diagnose_checkpoint
from l2r.analysis.diagnostics import DiagnosisSettings
from l2r.analysis.inputs import open_subject
from l2r.analysis.routes import compare_models, in_other_arithmetic
from l2r.files.folder import RunFolder
from l2r.files.mismatch import ARITHMETICS
from l2r.hf.checkpoints import Placement
from l2r_lab.studies import measure
from l2r_lab.training import train
from l2r_lab.training.recipes import load_recipe
from tests.second_device import second_device

pytestmark = pytest.mark.usefixtures("unchecked", "coarse")
ROUTERS = {
    "linear": ["router.kind=linear"],
    "l2r": ["router.kind=l2r_sips"],
    "xmoe": ["router.kind=xmoe"],
    "product keys": ["model.num_experts=9", "router.kind=product_keys", "router.rank=4"],
}


@pytest.fixture(scope="module", params=ROUTERS)
def trained(request, tiny_changes, tmp_path_factory):
    """A run folder and its recipe."""
    recipe = load_recipe("demo/linear", [*tiny_changes, *ROUTERS[request.param]])
    folder = tmp_path_factory.mktemp("run")
    train(recipe, folder, show_progress=False)
    return RunFolder(folder), recipe


def test_tensors_of_two_devices_do_not_mix():
    with second_device() as device:
        x = torch.ones(3, device=device)
        assert (x + x).cpu().tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="has tensors on lazy:0 and on cpu"):
            x + torch.ones(3)
        with pytest.raises((RuntimeError, TypeError)):
            x.numpy()


def test_a_study_measures_the_same_numbers_there(trained, monkeypatch):
    run, recipe = trained
    here = measure.measure(run, recipe, 256)
    with second_device() as device:
        monkeypatch.setattr(measure, "pick_device", lambda name: str(device))
        there = measure.measure(run, recipe, 256)
    for first, second in zip(here, there, strict=True):
        bf16 = [n for n in first if n.startswith(("flipped_", "bf16_"))]
        flips = {name: second.pop(name) for name in bf16}
        # of 256 tokens and 512 decisions; attention of another device rounds bf16 in another order
        assert flips == pytest.approx({name: first.pop(name) for name in flips}, abs=8 / 256)
        assert second == pytest.approx(first, rel=1e-3, abs=1e-4)


@pytest.mark.slow("whole diagnoses of four routers")
def test_a_diagnosis_gives_the_same_numbers_there(trained, text_folder):
    run, _ = trained
    extent = Extent(batch_size=4, sample=64, text=64, settings=DiagnosisSettings(certify=2))
    options = {"instances": 4, "length": 16, "extent": extent}

    def diagnosed(device):
        place = Placement("float32", str(device))
        return diagnose_checkpoint(run.path, str(text_folder), placement=place, **options)

    here = diagnosed("cpu")
    with second_device() as device:
        there = diagnosed(device)
    for first, second in zip(here.diagnosis.layers, there.diagnosis.layers, strict=True):
        for name in ("mean_margin", "entropy", "stability", "certified_top1", "found_top1"):
            if name in first:
                assert second[name] == pytest.approx(first[name], rel=1e-3, nan_ok=True), name


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_other_arithmetic_changes_as_many_decisions_there(trained, arithmetic, text_folder):
    run, _ = trained

    def changed(device):
        place = Placement("float32", str(device))
        sizes = {"placement": place, "instances": 4, "length": 16, "report": lambda line: None}
        subject = open_subject(run.path, str(text_folder), **sizes)
        other = in_other_arithmetic(subject.model, arithmetic)
        ids = [batch["input_ids"] for batch in subject.batches(4, subject.device)]
        arrays = compare_models(subject.model, other, ids).arrays()
        return float((arrays["experts"] != arrays["other_experts"]).any(axis=-1).mean())

    here = changed("cpu")
    with second_device() as device:
        assert changed(device) == pytest.approx(here, abs=8 / 128)  # decisions of 64 tokens
