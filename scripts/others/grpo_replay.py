"""GRPO by TRL with and without replayed routes: reward, KL of sampler and trainer, clipped share.

    python scripts/others/grpo_replay.py --task first --out results/grpo/first.json
    python scripts/others/grpo_replay.py --out results/grpo/addition.json --pretrain 300 --rate 1e-4

A small OLMoE learns a task from texts, and is then trained by GRPO on whether its answer is right.
addition: the sum of two numbers below 20. first: the first of two digits, of a model whose texts
answered with either, so that half its answers are right and GRPO can teach the other half. It
samples in bf16 or with int8 weights and trains in fp32. Needs trl (make tools).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from l2r.engines.trainer.route_replay import add_route_replay

LETTERS = [*"0123456789+="]
VALUES = ("reward", "kl", "largest", "clipped")
Task = Callable[[random.Random], tuple[str, str, str]]


def main() -> None:
    """Pretrain once, then every arm and seed; write each result as it comes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", choices=TASKS, default="addition")
    parser.add_argument("--pretrain", type=int, default=200, help="steps of 64 texts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=32, help="completions a step, 8 a prompt")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samplers", default="bf16", help="separated by commas: bf16,int8,fp8")
    parser.add_argument("--rate", type=float, default=5e-4)
    options = parser.parse_args()
    task = TASKS[options.task]
    model = pretrained(task, options.pretrain)
    start = accuracy(model, task)
    print(f"right before GRPO: {start:.3f}", flush=True)
    runs: list[dict[str, Any]] = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for sampler in options.samplers.split(","):
            for replays in (False, True):
                policy = OlmoeForCausalLM(model.config)
                policy.load_state_dict(model.state_dict())
                begun = time.perf_counter()
                curves = train(policy, sampler, replays, seed, options)
                end = accuracy(policy, task)
                seconds = time.perf_counter() - begun
                run = {"sampler": sampler, "replay": replays, "seed": seed, "right": end}
                print(f"{run} {seconds:.0f} s", flush=True)
                runs.append({**run, **curves})
                settings = {name: value for name, value in vars(options).items() if name != "out"}
                record = {"settings": settings, "right_before": start, "runs": runs}
                record["means"] = means(runs)
                options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(means(runs), indent=1))


def means(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over steps and seeds of each arm; largest is the maximum."""
    rows = []
    for sampler, replays in dict.fromkeys((run["sampler"], run["replay"]) for run in runs):
        arm = [r for r in runs if (r["sampler"], r["replay"]) == (sampler, replays)]
        row = {"sampler": sampler, "replay": replays, "seeds": len(arm)}
        row["right"] = [run["right"] for run in arm]
        for name in VALUES:
            every = [value for run in arm for value in run[name]]
            row[name] = max(every) if name == "largest" else statistics.fmean(every)
        rows.append(row)
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter."""
    vocabulary = {letter: n for n, letter in enumerate(["<pad>", "<eos>", *LETTERS])}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def addition(draw: random.Random) -> tuple[str, str, str]:
    """A sum of numbers below 20, the right answer, and that of a text to learn from."""
    a, b = draw.randrange(20), draw.randrange(20)
    return f"{a}+{b}=", str(a + b), str(a + b)


def first(draw: random.Random) -> tuple[str, str, str]:
    """Two digits, of which the first is right; a text to learn from has either."""
    a, b = draw.sample("0123456789", 2)
    return f"{a}+{b}=", a, draw.choice((a, b))


TASKS = {"addition": addition, "first": first}


def pretrained(task: Task, steps: int) -> OlmoeForCausalLM:
    """A small OLMoE that has seen ``steps`` batches of a task's texts."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=2 + len(LETTERS), hidden_size=64, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_experts=16, num_experts_per_tok=4, pad_token_id=0,
        eos_token_id=1, bos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    model, words, draw = OlmoeForCausalLM(config), tokenizer(), random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        texts = [question + answer + "<eos>" for question, _, answer in _drawn(task, draw, 64)]
        batch = words(texts, padding=True, return_tensors="pt", padding_side="right")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        answered = (ids == words.convert_tokens_to_ids("=")).cumsum(1) > 0
        labels = ids.masked_fill((mask == 0) | ~answered, -100)  # questions cannot be learned
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 49:
            print(f"pretraining {step + 1}: {loss.item():.3f}", flush=True)
    return model


def _drawn(task: Task, draw: random.Random, count: int) -> list[tuple[str, str, str]]:
    return [task(draw) for _ in range(count)]


@torch.no_grad()
def accuracy(model: OlmoeForCausalLM, task: Task, count: int = 256) -> float:
    """Share of questions that the model answers right when it takes the likeliest letters."""
    words, asked = tokenizer(), _drawn(task, random.Random(12345), count)
    batch = words([question for question, _, _ in asked], padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    model.eval()
    out = model.generate(**batch, max_new_tokens=3, do_sample=False)
    answers = words.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [a.replace(" ", "") == b for a, (_, b, _) in zip(answers, asked, strict=True)]
    return sum(right) / count


class Watched(GRPOTrainer):
    """Keeps how far the loss's log-probabilities are from the sampler's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.curves: dict[str, list[float]] = {name: [] for name in VALUES}
        self._last = torch.empty(0)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        values = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._last = values[0].detach()
        return values

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        known = inputs["completion_mask"].bool()
        change = (self._last - inputs["old_per_token_logps"])[known]
        self.curves["kl"].append((change.exp() - change - 1).mean().item())  # of tokens sampled
        self.curves["largest"].append(change.abs().max().item())
        self.curves["clipped"].append(self._metrics["train"]["clip_ratio/region_mean"][-1])
        self.curves["reward"].append(self._metrics["train"]["reward"][-1])
        return loss


def train(
    model: OlmoeForCausalLM, sampler: str, replays: bool, seed: int, options: Any
) -> dict[str, list[float]]:
    """One GRPO run; its curves by step."""
    draw = random.Random(1000 + seed)
    questions, answers, _ = zip(*_drawn(TASKS[options.task], draw, 2000), strict=True)
    data = Dataset.from_dict({"prompt": list(questions), "answer": list(answers)})

    def right(completions: list[str], **columns: Any) -> list[float]:
        given = zip(completions, columns["answer"], strict=True)
        return [float(text.replace(" ", "") == answer) for text, answer in given]

    with TemporaryDirectory() as folder:
        trainer = Watched(
            model=model,
            reward_funcs=right,
            processing_class=tokenizer(),
            train_dataset=data,
            args=GRPOConfig(
                output_dir=folder, max_steps=options.steps, learning_rate=options.rate,
                per_device_train_batch_size=options.rows, num_generations=8,
                max_completion_length=3, lr_scheduler_type="constant", beta=0.0, seed=seed,
                use_cpu=True, bf16=False,
                report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True,
            ),
        )  # fmt: skip
        add_route_replay(trainer, sampler=sampler, replays=replays)
        trainer.train()
        return trainer.curves


if __name__ == "__main__":
    main()
