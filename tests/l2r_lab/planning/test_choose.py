"""What a plan says: FLOPs, bytes sent, the choice, and one line for what cannot be."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from l2r.routers.count import router_cost
from l2r_lab.planning.choose import Assumptions, _Planner, make_plan
from l2r_lab.planning.cut import GPUS, StepCut, find_gpu
from l2r_lab.planning.formula import formula, step_bytes, step_time
from l2r_lab.planning.simulate import Simulated, simulate
from l2r_lab.planning.sizes import read_sizes
from l2r_lab.training.recipes.load import load_recipe

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "machines" / "router_scale.py"
SIZES = {"hidden_size": 2048, "num_experts": 64}


@pytest.fixture(scope="module")
def olmoe():
    return load_recipe("olmoe-1b-7b/l2r-sips")


@pytest.fixture(scope="module")
def sizes(olmoe):
    return read_sizes(olmoe)


@pytest.fixture
def counted(sizes, monkeypatch):
    """Plans of the recipe above count its model once."""
    monkeypatch.setattr("l2r_lab.planning.choose.read_sizes", lambda _: sizes)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(
    ("mixing", "sizes"),
    [
        ((0, 0), [1, 2, 3, 6]),
        ((0.8, 0), [2, 6]),
        ((0, 1.0), [2, 6]),
        ((0.8, 1.0), [2, 6]),
    ],
)
def test_mixed_images_come_in_pairs(mixing, sizes):
    fields = zip(("mixup", "cutmix"), mixing, strict=True)
    changes = [f"data.augmentation.{name}={value}" for name, value in fields]
    changes += ["training.global_batch=24", "training.micro_batch=2"]
    recipe = load_recipe("demo-vision/l2r-sips", changes)
    planner = _Planner(recipe, Assumptions(GPUS["a100"]), None)
    assert planner.micro_batches(4) == sizes


def test_flops_by_part_are_the_matrices_a_token_meets(sizes):
    layers, tokens, d, width, k = 16, 4096, 2048, 1024, 8
    per_token = {part: count / tokens for part, count in sizes.flops.items()}
    causal = 2 * tokens * d  # half of two products with all tokens
    assert per_token == {
        "attention": layers * (2 * 4 * d * d + causal),
        "experts": layers * 2 * k * 3 * d * width,
        "router": layers * 2 * router_cost("l2r_sips", **SIZES, rank=2, heads=16),  # Eq. 32
        "head": 2 * d * 50280,
        "other": 0,
    }


def test_a_linear_router_is_eq_29_of_the_plan():
    flops = read_sizes(load_recipe("demo/linear")).flops
    assert flops["router"] == 128 * 4 * 2 * router_cost("linear", hidden_size=128, num_experts=16)


def test_bytes_sent_are_those_of_rings(sizes):
    ddp = StepCut("ddp", 2, 1024, 1, False)
    assert step_bytes(sizes, ddp)["gradients"] == 4 * sizes.numbers  # 2 (R - 1) / R of 4 bytes
    once, often = (
        step_bytes(sizes, replace(ddp, parallel="fsdp2", micro_batch=m)) for m in (512, 128)
    )
    assert often["weights"] == 4 * once["weights"] and often["gradients"] == once["gradients"]
    # Of 64 experts on 512 GPUs every GPU sends a whole row, and most of them zeros.
    many = step_bytes(sizes, StepCut("fsdp2", 512, 1024, 2, False))["gradients"]
    assert many > 4 * 7 * sizes.expert_numbers
    even, uneven = (
        step_bytes(sizes, StepCut("ep", 8, 1024, 1, False, i))["tokens"] for i in (1, 1.5)
    )
    assert uneven == 1.5 * even
    assert even == 4 * 16 * (7 / 8) * (128 * 4096 * 8 * 2048 * 2)  # there and back, twice
    assert sum(step_bytes(sizes, StepCut("ddp", 1, 1024, 1, False)).values()) == 0


def test_balance_over_a_step_takes_a_second_forward_of_every_part(olmoe, sizes):
    """``losses.balance_scope=step`` runs the micro-batches once more before them (step.py)."""
    twice = read_sizes(load_recipe("olmoe-1b-7b/l2r-sips", ["losses.balance_scope=step"]))
    forward = 128 * sum(sizes.flops.values()) / (0.4 * find_gpu("h100").flops)
    for checkpointing in (False, True):
        cut = StepCut("ddp", 8, 1024, 1, checkpointing)
        plain, more = (step_time(s, cut, find_gpu("h100"), 0.4) for s in (sizes, twice))
        assert more.arithmetic == pytest.approx(plain.arithmetic + forward)
        assert more.bytes_sent == plain.bytes_sent
    whole = StepCut("ddp", 8, 1024, 128, False)  # one part: its own forward counts everything
    assert step_time(twice, whole, find_gpu("h100"), 0.4) == step_time(
        sizes, whole, find_gpu("h100"), 0.4
    )
    ep, split = StepCut("ep", 8, 1024, 1, False), StepCut("fsdp2", 8, 1024, 1, False)
    assert step_bytes(twice, ep)["tokens"] == 1.5 * step_bytes(sizes, ep)["tokens"]
    gathered = step_bytes(twice, split)["weights"] - step_bytes(sizes, split)["weights"]
    assert gathered == pytest.approx(7 / 8 * 4 * 128 * sum(b.padded(8) for b in sizes.blocks))


def test_each_bottleneck_shows(sizes):
    def at(parallel, gpus, gpu="h100"):
        cut = StepCut(parallel, gpus, 1024, 1, False)
        return step_time(sizes, cut, find_gpu(gpu), 0.4).bottleneck

    assert at("ddp", 8) == "arithmetic"
    assert at("ddp", 1024) == "gradients"
    assert at("fsdp2", 1024) == "weights"
    slow = replace(find_gpu("h100"), link=1e9)
    assert step_time(sizes, StepCut("ep", 8, 1024, 1, False), slow, 0.4).bottleneck == "tokens"


@pytest.mark.usefixtures("counted")
def test_the_largest_micro_batch_fits_and_the_next_does_not(olmoe):
    given = Assumptions(find_gpu("b200"))
    plan = make_plan(olmoe, 8, given, simulated=False)
    assert plan.fits(plan.best) and plan.above is not None and not plan.fits(plan.above)
    assert plan.above.cut.micro_batch == 2 * plan.best.cut.micro_batch
    assert {(c.cut.gpus, c.cut.parallel) for c in plan.scale} == {
        (gpus, form) for gpus in (8, 64, 512) for form in ("ddp", "fsdp2", "ep")
    }
    small = make_plan(olmoe, 8, Assumptions(find_gpu("h100")), simulated=False)
    ddp = next(c for c in small.forms if c.cut.parallel == "ddp")
    assert not small.fits(ddp) and small.best.cut.parallel != "ddp"


@pytest.mark.parametrize("gpus", [8, 64, 512])
def test_initial_weights_need_no_more_than_a_step(gpus, sizes):
    """A rank that starts holds its rows and one parameter whole; the simulation looks at steps."""
    memory = formula(sizes, StepCut("fsdp2", gpus, 1024, 1, True))
    largest = max(n for part in (*sizes.blocks, sizes.around) for _, n in part.shapes)
    assert memory.peak > memory.weights + 4 * largest


@pytest.mark.usefixtures("counted")
def test_where_the_simulation_says_no_the_next_fastest_is_taken(olmoe, monkeypatch):
    def simulated(_: object, cut: StepCut) -> Simulated:
        return Simulated(10**9 if cut.checkpointing else 10**12, 0, 0, 0, 0)

    monkeypatch.setattr("l2r_lab.planning.choose.simulate", simulated)
    plan = make_plan(olmoe, 8, Assumptions(find_gpu("b200")), parallel="fsdp2")
    assert plan.best.cut.checkpointing and plan.best.peak == 10**9
    assert plan.fits(plan.best) and plan.above is not None and plan.above.peak == 10**9


@pytest.mark.parametrize(
    ("gpus", "parallel", "words"),
    [
        (8, "ddp", "does not fit: ddp on 8 GPUs takes .* use --parallel fsdp2, ep"),
        (7, None, "gpus must divide global_batch=1024; got gpus=7"),
        (1, "fsdp2", "parallel must be one of ddp on one GPU; got 'fsdp2'"),
        (8, "tp", "parallel must be one of ddp, fsdp2, ep"),
    ],
)
@pytest.mark.usefixtures("counted")
def test_what_cannot_be_is_one_line(olmoe, gpus, parallel, words):
    given = Assumptions(find_gpu("h100"))
    with pytest.raises(ValueError, match=words):
        make_plan(olmoe, gpus, given, parallel=parallel, simulated=False)


@pytest.mark.parametrize("imbalance", [0.5, math.nan, math.inf])
def test_an_impossible_imbalance_is_refused(imbalance):
    with pytest.raises(ValueError, match=f"imbalance must be >= 1 and finite; .*={imbalance}"):
        StepCut("ep", 8, 16, 2, False, imbalance)


@pytest.mark.usefixtures("counted")
def test_the_command_prints_tables_json_and_what_does_not_fit(l2r):
    args = ("plan", "olmoe-1b-7b/l2r-sips", "--gpus", 8, "--gpu", "b200", "--no-simulate")
    code, out, err = l2r(*args)
    assert code == 0, err
    for words in ("Fits 8 x b200", "micro_batch 8 does not", "peak by", "router", "bottleneck"):
        assert words in out
    code, out, _ = l2r(*args, "--json", "--tokens", "20B")
    plan = json.loads(out)
    assert code == 0 and plan["steps"] == round(20e9 / (1024 * 4096))
    assert plan["best"]["fits"] and len(plan["scale"]) == 9
    refused = l2r(*args[:2], "--gpu", "b20", "--no-simulate").refusal()
    assert "gpu must be one of" in refused and "did you mean 'b200'" in refused
    refused = l2r(*args[:2], "--gpu", "a100", "--parallel", "ddp", "--no-simulate").refusal()
    assert "does not fit: ddp on 8 GPUs" in refused


def test_one_simulated_plan_from_the_command(l2r):
    changes = ("model.num_hidden_layers=1", "data.sequence_length=32", "data.vocab_size=300")
    code, out, err = l2r("plan", "demo/linear", *changes, "--gpus", 1, "--gpu", "a100", "--json")
    assert code == 0, err
    best = json.loads(out)["best"]
    assert best["micro_batch"] == 16
    assert best["simulated"] == pytest.approx(best["formula"], rel=0.1)


def test_gradients_are_in_memory_twice_where_ddp_sends_them():
    changes = ["model.num_hidden_layers=1", "data.sequence_length=32", "data.vocab_size=300"]
    recipe = load_recipe("demo/linear", changes)
    alone, one_of_two = (simulate(recipe, StepCut("ddp", n, 2 * n, 2, False)) for n in (1, 2))
    assert (alone.buckets, one_of_two.buckets) == (0, alone.gradients)
    assert one_of_two.peak == alone.peak + alone.gradients


def test_routers_at_scale_cost_what_their_formulas_say():
    spec = importlib.util.spec_from_file_location("router_scale", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    records = script.router_scale(GPUS["h100"])
    by_key = {(r["hidden"], r["experts"], r["router"]): r for r in records}
    assert len(by_key) == 48
    largest = by_key[16384, 4096, "linear"]
    assert largest["flops"] == 2 * 16384 * 4096 and largest["bytes"] == 4 * 16384 * 4096
    for phase in script.PHASES:
        for hidden in script.HIDDEN:  # a share never falls as experts are added, for linear
            shares = [by_key[hidden, n, "linear"][phase] for n in script.EXPERTS]
            assert shares == sorted(shares) and shares[0] > 0 and shares[-1] < 100
            assert by_key[hidden, 4096, "l2r_sips"][phase] < shares[-1]
    figure = script.router_scale_figure(records)
    assert len(figure.data) == 48
