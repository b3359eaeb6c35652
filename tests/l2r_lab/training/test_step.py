"""One step: how far it may go, at which rate, on which rows, and what AdamW would hide."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from l2r.routers import Captured, Router, RouterOutput, capture
from l2r_lab.training import loop, monitor
from l2r_lab.training import step as training_step
from l2r_lab.training.bias_balance import BiasBalance
from l2r_lab.training.health import NonFiniteError, explain_gradient
from l2r_lab.training.language import LanguageTask
from l2r_lab.training.optimizer import build_optimizer
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.step import TrainingStep

ONE = Ranks(0, 1, torch.device("cpu"))
ORDER = 256 * 2**-24  # a mean over 256 tokens in fp32, summed in another order


@pytest.fixture
def start(tiny_changes):
    """A step of a fresh run of a recipe with changes."""

    def build(*changes, recipe="demo/l2r-sips"):
        loaded = load_recipe(recipe, [*tiny_changes, *changes])
        torch.manual_seed(loaded.seed)
        task = LanguageTask(loaded, print)
        model = task.build_model()
        return TrainingStep(loaded, task, model, build_optimizer(model, loaded.optimizer), ONE)

    return build


def norm_of_gradients(model):
    return math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))


def test_a_gradient_is_clipped_to_its_limit_and_recorded_as_it_was(start):
    free = start("training.clip_norm=1e9")
    recorded = free.take(0, 1e-3, summarize=True)["grad_norm"]
    assert recorded == pytest.approx(norm_of_gradients(free.model), rel=ORDER)
    limit = 0.5 * recorded
    clipped = start(f"training.clip_norm={limit}")
    assert clipped.take(0, 1e-3, summarize=True)["grad_norm"] == recorded
    # torch divides by the norm + 1e-6
    assert norm_of_gradients(clipped.model) == pytest.approx(limit, rel=1e-6 / recorded + ORDER)


def test_every_group_takes_the_step_at_the_rate_that_is_given(start):
    step = start("optimizer.decay_norms=false")
    assert len(step.optimizer.param_groups) == 2
    for number, rate in enumerate((1e-3, 3e-5)):
        assert step.take(number, rate, summarize=True)["lr"] == rate
        assert {group["lr"] for group in step.optimizer.param_groups} == {rate}


@pytest.mark.parametrize("recipe", ["demo/l2r-sips", "demo/xmoe"])
@pytest.mark.parametrize("decayed", ["true", "false"])
def test_anchors_move_at_a_multiple_of_the_learning_rate(start, recipe, decayed):
    """AdamW's first step is the same for all but the rate, decoupled weight decay included."""
    changes = (f"optimizer.decay_anchors={decayed}", "training.clip_norm=1e9")
    usual = start(*changes, recipe=recipe)
    faster = start(*changes, "optimizer.anchor_lr=4", recipe=recipe)
    before = {name: value.clone() for name, value in usual.model.state_dict().items()}
    for step in (usual, faster):
        assert step.take(0, 1e-3, summarize=True)["lr"] == 1e-3
    ones, others = usual.model.state_dict(), faster.model.state_dict()
    assert any(name.endswith(".anchors") for name in ones)
    for name, start_value in before.items():
        factor = 4 if name.endswith(".anchors") else 1
        moved, further = ones[name] - start_value, others[name] - start_value
        torch.testing.assert_close(further, factor * moved, rtol=1e-3, atol=1e-6, msg=name)


def test_the_optimizer_is_adamw_with_the_recipes_constants(start):
    constants = ["betas=[0.8, 0.97]", "eps=1e-5", "weight_decay=0.3", "decay_norms=false"]
    groups = start(*(f"optimizer.{change}" for change in constants)).optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert all((group["betas"], group["eps"]) == ((0.8, 0.97), 1e-5) for group in groups)


@pytest.mark.parametrize("variant", ["paper", "tutel"])
def test_gradients_are_those_of_the_mean_however_a_step_is_cut(start, variant):
    """The gradients, which AdamW divides by their own size and clipping by their norm."""
    scope = (
        "losses.balance_scope=step", "training.clip_norm=1e9", f"losses.balance_variant={variant}",
        "losses.balance=1",
    )  # fmt: skip
    whole, parts = start(*scope), start(*scope, "training.micro_batch=1")
    for step in (whole, parts):
        step.take(0, 1e-3, summarize=False)
    assert norm_of_gradients(whole.model) == pytest.approx(norm_of_gradients(parts.model), rel=1e-5)
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_what_a_step_draws_at_random_is_drawn_once(start):
    """The forward that counts loads over the step sees the dropout of the one that trains."""
    step = start("losses.balance_scope=step", "training.micro_batch=2")
    chosen = []

    def drop(module, inputs, output):
        return nn.functional.dropout(output, 0.5)

    step.model.get_input_embeddings().register_forward_hook(drop)
    router = next(m for m in step.model.modules() if isinstance(m, Router))
    router.register_forward_hook(lambda *call: chosen.append(call[2].indices))
    step.take(0, 1e-3, summarize=False)
    counting, training = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    assert len(training) > 1 and not torch.equal(training[0], training[1])
    for one, other in zip(counting, training, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("steps", [2, 4])
def test_a_bad_step_is_taken_again_with_what_it_drew(start, steps):
    """Its own dropout makes it overflow, no other one, and two more draws follow."""
    torch.manual_seed(1)
    draws = [float(torch.rand(())) for _ in range(10)]

    def drop(module, inputs, output):
        return output * (math.inf if float(torch.rand(())) == draws[1] else 1)

    step = start("training.micro_batch=8")
    step.model.get_input_embeddings().register_forward_hook(drop)
    torch.manual_seed(1)
    for number in range(steps):
        step.take(number, 1e-3, summarize=False)
    with pytest.raises(NonFiniteError, match=r"step 1: loss is nan; .* output: model.embed_tokens"):
        step.check()


def test_a_bad_step_is_taken_again_with_its_own_biases(start):
    """Selection biases stop where the weights do, and so does the choice that led there."""
    step = start("losses.bias_speed=0.5", recipe="zoo/sigmoid")
    held = step.bias_balance.routers
    biases = {name: router.selection.held_bias(router) for name, router in held.items()}
    kept: dict = {}
    step.take(0, 1e-3, summarize=False)
    loss, step.task.loss = step.task.loss, lambda *given: loss(*given) * math.inf
    for number in (1, 2):
        kept[number] = {name: bias.clone() for name, bias in biases.items()}
        step.take(number, 1e-3, summarize=False)
    assert any(bool(bias.any()) for bias in kept[1].values())
    for name, bias in biases.items():
        assert torch.equal(bias, kept[1][name])


def test_the_seed_of_the_recipe_draws_the_rows(start):
    rows = {}
    for seed in (0, 5):
        task = start(f"seed={seed}").task
        rows[seed] = task.micro_batches(3, ONE)[0]["input_ids"]
        chosen = task.train.batch(3, 8, seed, rank=0, world_size=1)
        assert torch.equal(rows[seed], task.train.rows(chosen)["input_ids"])
    assert not torch.equal(rows[0], rows[5])


def test_ranks_share_the_rows_of_a_step(start):
    task = start().task
    whole = task.micro_batches(2, ONE)[0]["input_ids"]
    shares = [task.micro_batches(2, Ranks(r, 2, ONE.device))[0]["input_ids"] for r in range(2)]
    assert torch.equal(torch.cat(shares), whole)


def test_the_average_takes_in_the_weights_after_their_step(start):
    step = start("training.ema_decay=0.9")
    expected = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    for number in range(3):
        step.take(number, 1e-3, summarize=False)
        decay = (1 + number) / (10 + number)
        for name, parameter in step.model.named_parameters():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach()
    for name, average in step.average.parameters.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-7)


def test_biases_move_against_the_loads_of_their_own_step(start, monkeypatch):
    """By the sign of mean - load over the micro-batches of one step, none of an earlier one."""
    step = start("losses.bias_speed=0.01", "training.micro_batch=2", recipe="zoo/sigmoid")
    counted: list = []
    count = training_step.expert_loads
    monkeypatch.setattr(
        training_step, "expert_loads", lambda c: counted.append(count(c)) or counted[-1]
    )
    routers = step.bias_balance.routers
    expected = {name: torch.zeros(8) for name in routers}
    for number in range(3):
        counted.clear()
        step.take(number, 1e-2, summarize=False)
        assert len(counted) == 4
        for name, router in routers.items():
            tokens = 2 * 32  # of a micro-batch
            load = sum((tokens * loads[name][0]).round().long() for loads in counted)
            expected[name] += 0.01 * torch.sign(load.sum() - 8 * load)
            torch.testing.assert_close(router.e_score_correction_bias, expected[name])


def test_biases_move_by_the_loads_of_all_ranks(start):
    """One rank's load says the opposite of the sum."""
    balance = BiasBalance(start(recipe="zoo/sigmoid").model, 0.5)
    (name, router), *_ = balance.routers.items()
    mine = RouterOutput(torch.zeros(1, 8), torch.ones(1, 1), torch.tensor([[0]]))
    balance.add(Captured(outputs={name: [mine]}))
    theirs = torch.tensor([0, 3, 0, 0, 0, 0, 0, 0])
    balance.step(SimpleNamespace(sum=lambda load: load + theirs), torch.tensor(False))
    assert router.e_score_correction_bias[:3].tolist() == [-0.5, -0.5, 0.5]
    assert not balance.loads


def test_biases_of_a_wrapped_model_are_moved_too(start):
    """As DDP wraps it: a capture names routers by their place in the model inside."""
    model = start(recipe="zoo/sigmoid").model
    wrapped = nn.Sequential()
    wrapped.module = model
    balance = BiasBalance(wrapped, 0.5)
    with torch.no_grad(), capture(model) as captured:
        model(input_ids=torch.arange(16)[None])
    balance.add(captured)
    assert balance.loads.keys() == balance.routers.keys() != set()


def test_constrained_parameters_return_after_every_step(start, monkeypatch):
    step, constrained = start(), []
    monkeypatch.setattr(training_step, "constrain", constrained.append)
    for number in range(2):
        step.take(number, 1e-3, summarize=False)
    assert constrained == [step.model] * 2
    assert isinstance(step.model, nn.Module)


def test_gradients_are_those_of_the_objective_itself(start):
    """No factor that AdamW and clipping would hide: against autograd of the task's own loss."""
    step = start("losses.balance=0", "losses.z=0", "training.clip_norm=1e9")
    (batch,) = step.task.micro_batches(0, ONE)
    step.model.train()
    loss = step.task.loss(step.model, batch, None)
    expected = torch.autograd.grad(loss, list(step.model.parameters()), allow_unused=True)
    step.take(0, 1e-3, summarize=False)
    for parameter, gradient in zip(step.model.parameters(), expected, strict=True):
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-8)


def test_a_run_ends_with_a_record_at_any_number_of_steps():
    """Also where the numbers are equal but not the same object, as large integers are."""
    run = SimpleNamespace(steps=10**6)
    assert loop._Trainer._due(run, int("1000000"), 0)
    assert not loop._Trainer._due(run, 999_999, 0)
    assert loop._Trainer._due(run, 500, 250) and not loop._Trainer._due(run, 501, 250)


def test_the_first_gradient_that_is_not_finite_is_named(start):
    model = start().model
    names = [name for name, _ in model.named_parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert "every gradient is finite" in explain_gradient(model, 3, math.inf, ONE)
    model.get_parameter(names[4]).grad[..., 0] = math.nan
    model.get_parameter(names[2]).grad = None
    assert explain_gradient(model, 3, math.nan, ONE).endswith(f"non-finite gradient: {names[4]}")


def test_a_task_says_how_many_tokens_it_has(start):
    task = start().task
    facts = task.describe()
    assert facts["train_tokens"] == len(task.train) * 32
    assert facts["validation_tokens"] == len(task.validation) * 32


def test_speed_is_units_over_the_seconds_since_the_last_reading(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])
    speed = monitor.Speed()
    for units, seconds in ((30, 2.0), (8, 16.0)):
        speed.add(units)
        now[0] += seconds
        assert speed.read() == units / seconds
