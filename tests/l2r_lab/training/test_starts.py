"""Where training starts from and what balances it: init_from, the selection bias."""

import pytest
import torch
from safetensors.torch import load_file

from l2r.files.folder import RunFolder
from l2r.hf.checkpoints.pretrained import load_pretrained
from l2r_lab.training import loop
from l2r_lab.training.recipes.load import load_recipe


def run(folder, changes, *extra, recipe="demo/l2r-sips", **options):
    changed = load_recipe(recipe, [*changes, *extra])
    return loop.train(changed, folder, show_progress=False, **options)


def bias(folder, layer=0) -> torch.Tensor:
    weights = load_file(folder / "model" / "model.safetensors")
    return weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]


@pytest.mark.slow("two trainings")
def test_training_starts_from_the_model_of_another_run(tiny_changes, tmp_path):
    run(tmp_path / "first", tiny_changes, "training.steps=20", "optimizer.lr=0.01")
    start = f"model.init_from={tmp_path / 'first'}"
    run(tmp_path / "second", tiny_changes, start)
    last = RunFolder(tmp_path / "first").read_metrics("train")[-1]["ce"]
    fresh = RunFolder(tmp_path / "first").read_metrics("train")[0]["ce"]
    found = RunFolder(tmp_path / "second").read_metrics("train")[0]["ce"]
    assert abs(found - last) < 0.5 * (fresh - last)


@pytest.mark.slow("a fit and a training")
def test_training_starts_from_a_fitted_model(l2r, tiny_changes, text_folder, tmp_path):
    run(tmp_path / "linear", tiny_changes, recipe="demo/linear")
    code, _, err = l2r(
        "swap", tmp_path / "linear", "rank=4", "heads=2", "--fit", "--data", text_folder,
        "--tokens", 2000, "--held-out", 500, "--out", tmp_path / "up",
    )  # fmt: skip
    assert code == 0, err
    start = [f"model.init_from={tmp_path / 'up'}", "router.rank=4", "router.heads=2"]
    assert run(tmp_path / "on", tiny_changes, *start).finished


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.num_experts=4", "num_experts is 8 in .*, 4 in the recipe"),
        ("router.rank=3", r"router\.rank is 2 in .*, 3 in the recipe"),
        ("model.rope_theta=5000", r"rope_theta is 10000\.0 in .*, 5000\.0 in the recipe"),
        ("model.rms_norm_eps=1e-3", r"rms_norm_eps is 1e-05 in .*, 0\.001 in the recipe"),
    ],
)
def test_a_model_that_differs_is_refused_by_name(tiny_changes, tmp_path, change, message):
    run(tmp_path / "first", tiny_changes, "training.steps=1")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "second", tiny_changes, f"model.init_from={tmp_path / 'first'}", change)


def test_a_folder_without_a_model_is_refused(tiny_changes, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        run(tmp_path / "run", tiny_changes, f"model.init_from={tmp_path}")


def test_selection_biases_move_with_every_step(tiny_changes, tmp_path):
    speed = "losses.bias_speed=0.01"
    run(tmp_path / "on", tiny_changes, speed, recipe="zoo/sigmoid")
    run(tmp_path / "off", tiny_changes, "losses.bias_speed=0", recipe="zoo/sigmoid")
    steps = (bias(tmp_path / "on") / 0.01).round()
    torch.testing.assert_close(bias(tmp_path / "on"), steps * 0.01)  # six moves of one speed
    assert steps.abs().max() <= 6
    assert steps.abs().max() >= 2  # more than one step moved them
    assert not bias(tmp_path / "off").any()


def test_selection_biases_do_not_depend_on_how_a_step_is_cut(tiny_changes, tmp_path):
    for name, parts in (("whole", "8"), ("parts", "2")):
        changes = ["training.steps=1", f"training.micro_batch={parts}", "losses.bias_speed=0.01"]
        run(tmp_path / name, tiny_changes, *changes, recipe="zoo/sigmoid")
    assert torch.equal(bias(tmp_path / "whole"), bias(tmp_path / "parts"))


BIASED = ["router.selection_bias=true", "losses.bias_speed=0.001", "losses.balance=0"]


@pytest.mark.slow("whole trainings")
@pytest.mark.parametrize("kind", ["l2r_sips", "product_keys"])
def test_the_bias_of_any_router_is_saved_loaded_and_resumed_to_the_same_bits(
    kind, tiny_changes, tmp_path
):
    changes = [*tiny_changes, *BIASED, f"router={{kind: {kind}}}"]

    def dying(step):
        if step == 3:
            raise RuntimeError("the machine is gone")

    run(tmp_path / "whole", changes)
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path / "cut", changes, on_step=dying)
    run(tmp_path / "cut", changes)
    whole, cut = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    router = load_pretrained(tmp_path / "whole").model.layers[1].mlp.gate
    assert torch.equal(router.selection.held_bias(router), bias(tmp_path / "whole", 1))
    moves = (bias(tmp_path / "whole", 1) / 0.001).round()
    torch.testing.assert_close(bias(tmp_path / "whole", 1), moves * 0.001)
    assert 2 <= moves.abs().max() <= 6  # of six steps


def test_bias_speed_without_a_bias_is_refused(tiny_changes, tmp_path):
    with pytest.raises(ValueError, match=r"bias_speed is for .*selection_bias=true.*speed=0.1"):
        run(tmp_path / "run", tiny_changes, "losses.bias_speed=0.1")
