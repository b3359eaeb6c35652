"""Replayed routes in GRPO, with a trainer that does what TRL's does with a batch."""

import base64
import copy
import functools
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from l2r import record, replay
from l2r.analysis.routes.arithmetic import in_other_arithmetic
from l2r.engines.trainer.route_replay import ROWS, add_route_replay
from l2r.hf.routes import to_vllm
from l2r.routers.observe import find_routers
from tests.analysis.diagnostics.models import ours, stock

NEW = 5


class FakeTrainer:
    """Generates, pads completions to the right, shuffles, and keeps what its loss saw."""

    def __init__(self, model, prompts, calls=1):
        self.model, self.prompts, self.calls = model, prompts, calls
        self.temperature = 1.0
        self.seen = []

    def _generate_and_score_completions(self, inputs):
        mask = (self.prompts != 1).long()
        for _ in range(self.calls):
            sequences = self.model.generate(
                input_ids=self.prompts, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW,
                do_sample=False,
            )  # fmt: skip
        completion = sequences[:, self.prompts.shape[1] :].clone()
        lengths = torch.tensor([5, 3, 4])
        known = (torch.arange(NEW) < lengths[:, None]).long()
        return {
            "prompt_ids": self.prompts, "prompt_mask": mask, "completion_mask": known,
            "completion_ids": completion.masked_fill(known == 0, 1),
        }  # fmt: skip

    def compute_loss(self, model, inputs, **kwargs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with record(model) as recorder:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        self.seen.append((recorder.routes(), logits))
        steps = logits[:, -NEW - 1 : -1].log_softmax(-1)
        return steps.gather(-1, inputs["completion_ids"][..., None])[..., 0]


def prompts():
    ids = torch.randint(2, 64, (3, 6), generator=torch.Generator().manual_seed(0))
    ids[0, :2] = 1  # padding, to the left
    return ids


def close(model):
    """A model whose routers are nearly tied, so that bf16 changes many choices."""
    with torch.no_grad():
        for router in find_routers(model).values():
            for parameter in router.parameters():
                parameter.mul_(1e-2)
    return model


def shuffled(batch):
    """The rows in another order, and a micro-batch of two of them, as TRL does."""
    order = torch.tensor([2, 0, 1])
    return {name: value[order][:2] for name, value in batch.items()}


def adapted():
    """PEFT's model, which generates with the model inside of it."""
    return get_peft_model(stock(), LoraConfig(target_modules=["q_proj"]))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [ours, stock, adapted])
@pytest.mark.parametrize("sampler", [None, "bf16"])
def test_the_loss_takes_the_sampled_experts_row_by_row(make, sampler):
    trainer = FakeTrainer(close(make()), prompts())
    replayed = add_route_replay(trainer, sampler=sampler)
    batch = trainer._generate_and_score_completions([])
    assert batch[ROWS].tolist() == [0, 1, 2]
    assert replayed.routes.lengths.tolist() == [4 + 5, 6 + 3, 6 + 4]
    trainer.compute_loss(trainer.model, shuffled(batch))
    seen = trainer.seen[0][0]
    for row, number in enumerate((2, 0)):
        expected = replayed.routes[number]
        got = seen[row].experts[expected.positions]  # but for a token that was never forwarded
        assert (got == expected.experts).all()


def test_an_evaluation_between_two_steps_leaves_the_routes_of_the_training_batch():
    trainer = FakeTrainer(close(ours()).train(), prompts())
    replayed = add_route_replay(trainer)
    batch, sampled = trainer._generate_and_score_completions([]), replayed.routes
    with torch.no_grad():
        for router in find_routers(trainer.model).values():
            for parameter in router.parameters():
                parameter.add_(torch.randn_like(parameter))  # what steps change
    trainer.model.eval()
    trainer.prompts = trainer.prompts.flip(1).clamp(min=2)
    evaluated = trainer._generate_and_score_completions([])
    assert evaluated[ROWS].tolist() == [3, 4, 5]
    trainer.model.train()
    trainer.compute_loss(trainer.model, batch)
    for row, expected in enumerate(sampled):
        got = trainer.seen[-1][0][row].experts[expected.positions]
        assert (got == expected.experts).all()
    with pytest.raises(ValueError, match=r"sampled_route must be rows whose routes are kept"):
        trainer.compute_loss(trainer.model, batch | {ROWS: batch[ROWS] + 100})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_those_of_the_sampler_at_the_trainers_temperature(temperature):
    trainer = FakeTrainer(ours(), prompts())
    trainer.temperature = temperature
    add_route_replay(trainer, sampler="bf16")
    batch = trainer._generate_and_score_completions([])
    sampler = in_other_arithmetic(ours(), "bf16")
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        logits = sampler(ids, attention_mask=mask).logits[:, -NEW - 1 : -1].float()
    steps = (logits / temperature).log_softmax(-1)
    expected = steps.gather(-1, batch["completion_ids"][..., None])[..., 0]
    known = batch["completion_mask"].bool()
    got = batch["old_per_token_logps"]
    # A cached step of bf16 rounds otherwise than a whole sequence.
    torch.testing.assert_close(got[known], expected[known], atol=0.02 / temperature, rtol=0)
    assert (got[~known] == 0).all()


def test_a_forward_that_was_put_on_the_model_does_not_stand_for_the_sampler():
    """As libraries wrap it; it would sample with the trained weights."""
    plain, wrapped = (FakeTrainer(ours(), prompts()) for _ in range(2))
    forward = wrapped.model.forward

    @functools.wraps(forward)
    def closed(*args, **kwargs):  # a closure: a copy of the model keeps it as it is
        return forward(*args, **kwargs)

    wrapped.model.forward = closed
    batches = []
    for trainer in (plain, wrapped):
        add_route_replay(trainer, sampler="int8")
        batches.append(trainer._generate_and_score_completions([]))
        assert trainer.model.generation_config.output_logits is not True
    assert torch.equal(batches[0]["old_per_token_logps"], batches[1]["old_per_token_logps"])
    own = FakeTrainer(ours(), prompts())
    add_route_replay(own, sampler=None)
    ours_alone = own._generate_and_score_completions([])["old_per_token_logps"]
    assert not torch.equal(batches[1]["old_per_token_logps"], ours_alone)


def test_gradients_are_those_of_a_replay_by_hand():
    trainer = FakeTrainer(close(ours()), prompts())
    replayed = add_route_replay(trainer, sampler="bf16")
    batch = shuffled(trainer._generate_and_score_completions([]))
    other = copy.deepcopy(trainer.model)
    trainer.compute_loss(trainer.model, batch).sum().backward()
    with replay(other, replayed.routes[batch[ROWS].tolist()]):
        FakeTrainer.compute_loss(trainer, other, batch).sum().backward()
    for one, two in zip(trainer.model.parameters(), other.parameters(), strict=True):
        assert one.grad is not None or two.grad is None
        if one.grad is not None:
            assert torch.equal(one.grad, two.grad)


def test_without_replay_the_loss_chooses_for_itself():
    trainer = FakeTrainer(close(ours()), prompts())
    plain = copy.deepcopy(trainer.model)
    add_route_replay(trainer, sampler="bf16", replays=False)
    batch = trainer._generate_and_score_completions([])
    trainer.compute_loss(trainer.model, batch)
    FakeTrainer.compute_loss(trainer, plain, batch)
    assert torch.equal(trainer.seen[0][1], trainer.seen[1][1])
    assert "old_per_token_logps" in batch


def test_the_model_is_left_as_it_was():
    trainer = FakeTrainer(ours(), prompts())
    before = {id(p): p.dtype for p in trainer.model.parameters()}
    add_route_replay(trainer, sampler="int8")
    trainer._generate_and_score_completions([])
    assert {id(p): p.dtype for p in trainer.model.parameters()} == before
    assert "generate" not in vars(trainer.model)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"sampler": "fp4"}, "sampler must be None or one of bf16, int8, fp8; got"),
        (
            {"use_vllm": True, "vllm_mode": "colocate"},
            {"sampler": "bf16"},
            "sampler must be None with use_vllm=True; got sampler='bf16'",
        ),
        ({"use_vllm": True, "vllm_mode": "server"}, {}, "TRL's vLLM server returns no routes"),
        (
            {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
            {},
            "vllm_tensor_parallel_size must be 1; got 2",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, options, message):
    trainer = FakeTrainer(ours(), prompts())
    vars(trainer).update(change)
    with pytest.raises(ValueError, match=message):
        add_route_replay(trainer, **options)


class Engine:
    """Answers as vLLM's ``LLM.generate`` does, of a copy of a model in bf16, greedy."""

    def __init__(self, model, records=True):
        self.model, self.records = in_other_arithmetic(model, "bf16"), records

    def generate(self, prompts, **options):
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            with record(self.model) as recorder:
                output = self.model.generate(
                    ids, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
                    return_dict_in_generate=True, output_logits=True,
                )  # fmt: skip
            tokens = output.sequences[0, ids.shape[1] :].tolist()
            steps = [logits.float().log_softmax(-1)[0] for logits in output.logits]
            logprobs = [
                {t: SimpleNamespace(logprob=step[t].item())}
                for t, step in zip(tokens, steps, strict=True)
            ]
            (text,) = to_vllm(recorder.routes().extended())
            experts = np.load(io.BytesIO(base64.b64decode(text))) if self.records else None
            answers.append(
                SimpleNamespace(
                    prompt_token_ids=prompt["prompt_token_ids"],
                    outputs=[
                        SimpleNamespace(token_ids=tokens, logprobs=logprobs, routed_experts=experts)
                    ],
                )
            )
        return answers


class VllmTrainer(FakeTrainer):
    """Samples with vLLM in its process, as TRL does; its own correction stands in the batch."""

    use_vllm, vllm_mode = True, "colocate"

    def __init__(self, model, prompts, **options):
        super().__init__(model, prompts)
        self.vllm_generation = SimpleNamespace(llm=Engine(model, **options))

    def _generate_and_score_completions(self, inputs):
        mask = (self.prompts != 1).long()
        rows = [ids[m.bool()].tolist() for ids, m in zip(self.prompts, mask, strict=True)]
        answers = self.vllm_generation.llm.generate([{"prompt_token_ids": row} for row in rows])
        completion = torch.tensor([answer.outputs[0].token_ids for answer in answers])
        known = (torch.arange(NEW) < torch.tensor([5, 3, 4])[:, None]).long()
        return {
            "prompt_ids": self.prompts, "prompt_mask": mask, "completion_mask": known,
            "completion_ids": completion.masked_fill(known == 0, 1),
            "importance_sampling_ratio": torch.full((3, NEW), 0.5),
        }  # fmt: skip


@pytest.mark.parametrize("make", [ours, stock])
def test_the_loss_takes_the_experts_that_vllm_recorded(make):
    trainer = VllmTrainer(close(make()), prompts())
    replayed = add_route_replay(trainer)
    batch = trainer._generate_and_score_completions([])
    assert replayed.routes.lengths.tolist() == [4 + 5, 6 + 3, 6 + 4]
    assert batch["importance_sampling_ratio"].eq(1).all()
    engine = trainer.vllm_generation.llm
    assert "generate" not in vars(engine)
    (first,) = engine.generate([{"prompt_token_ids": prompts()[0, 2:].tolist()}])
    answer = first.outputs[0]
    own = [step[t].logprob for t, step in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert batch["old_per_token_logps"][0].tolist() == pytest.approx(own, abs=1e-6)
    assert batch["old_per_token_logps"][1, 3:].eq(0).all()
    trainer.compute_loss(trainer.model, shuffled(batch))
    seen = trainer.seen[0][0]
    for row, number in enumerate((2, 0)):
        expected = replayed.routes[number]
        assert (seen[row].experts[expected.positions] == expected.experts).all()


def test_answers_of_vllm_without_routes_are_refused():
    trainer = VllmTrainer(ours(), prompts(), records=False)
    add_route_replay(trainer)
    with pytest.raises(ValueError, match="make it with enable_return_routed_experts=True"):
        trainer._generate_and_score_completions([])


def test_other_trainers_and_two_generations_are_refused():
    plain = SimpleNamespace(model=ours(), compute_loss=print)
    with pytest.raises(ValueError, match="has no _generate_and_score_completions"):
        add_route_replay(plain)
    trainer = FakeTrainer(ours(), prompts(), calls=2)
    add_route_replay(trainer)
    with pytest.raises(ValueError, match="one call of generate for a batch; got two"):
        trainer._generate_and_score_completions([])
