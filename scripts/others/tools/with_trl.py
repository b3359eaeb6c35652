"""TRL: trainers that open a folder, and the reference models that they make by themselves."""

import math
from tempfile import TemporaryDirectory
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from l2r.engines.trainer import add_router_losses
from l2r.engines.trainer.route_replay import add_route_replay
from scripts.others.tools.colocated import in_place_of_vllm
from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import Subject, largest_difference, tokenizer

ROWS: list[Row] = []
TEXTS = Dataset.from_dict({"text": ["w3 w4 w5 w6 w7"] * 4})
PAIRS = Dataset.from_dict(
    {"prompt": ["w3 w4"] * 4, "chosen": ["w5 w6"] * 4, "rejected": ["w7 w8"] * 4}
)
PROMPTS = PAIRS.select_columns(["prompt"])


_ARGUMENTS = "packing", "gradient_checkpointing", "router_aux_loss_coef"


def _common(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 1, "report_to": [],
        "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True,
    }  # fmt: skip


def _sft(model: Any, folder: str, **options: Any) -> SFTTrainer:
    arguments = {k: options.pop(k) for k in _ARGUMENTS if k in options}
    return SFTTrainer(
        model=model,
        args=SFTConfig(**_common(folder), max_length=16, **arguments),
        train_dataset=TEXTS,
        processing_class=tokenizer(),
        **options,
    )


@row(ROWS, "`SFTTrainer(model=FOLDER)` trains the model that was saved")
def sft_folder(subject: Subject) -> None:
    """Opened by TRL itself."""
    with TemporaryDirectory() as folder:
        trainer = _sft(str(subject.folder), folder)
        assert largest_difference(trainer.model, subject.model()) < 1e-6
        trainer.train()


@row(ROWS, "SFT with gradient checkpointing and packing")
def sft_packed(subject: Subject) -> None:
    """One step."""
    with TemporaryDirectory() as folder:
        _sft(subject.model(), folder, packing=True, gradient_checkpointing=True).train()


@row(ROWS, "SFT with `peft_config`")
def sft_peft(subject: Subject) -> None:
    """One step with adapters."""
    with TemporaryDirectory() as folder:
        _sft(
            subject.model(), folder, peft_config=LoraConfig(r=2, target_modules=["o_proj"])
        ).train()


@row(ROWS, "SFT with router losses of ours: TRL's own balance loss is not counted beside them")
def sft_losses(subject: Subject) -> None:
    """The step is that of a model whose own balance loss is off."""
    steps = []
    for own in (0.0, 100.0):
        model = subject.model()
        if not hasattr(model.config, "router_aux_loss_coef"):
            return  # the family has no balance loss of its own
        with TemporaryDirectory() as folder:
            trainer = _sft(model, folder, router_aux_loss_coef=own)
            add_router_losses(trainer, balance=0.5, z=0.1)
            trainer.train()
        steps.append({name: value.detach() for name, value in model.named_parameters()})
        assert trainer.state.log_history[0]["balance_loss"] > 0
    assert max(float((steps[0][n] - steps[1][n]).abs().max()) for n in steps[0]) == 0


@row(ROWS, "DPO: the reference that TRL makes equals the policy, and a step runs")
def dpo(subject: Subject) -> None:
    """To the bit before training, with from_pretrained alone."""
    with TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(subject.folder),
            args=DPOConfig(**_common(folder), max_length=16),
            train_dataset=PAIRS,
            processing_class=tokenizer(),
        )
        assert largest_difference(trainer.ref_model, trainer.model) == 0
        trainer.train()


@row(ROWS, "GRPO with beta > 0: the reference equals the policy, and the first KL is 0")
def grpo(subject: Subject) -> None:
    """One step of two samples."""

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(subject.folder),
            reward_funcs=reward,
            args=GRPOConfig(
                **_common(folder), beta=0.1, num_generations=2, max_completion_length=4
            ),
            train_dataset=PROMPTS,
            processing_class=tokenizer(),
        )
        assert largest_difference(trainer.ref_model, trainer.model) == 0
        trainer.train()
        assert float(trainer.state.log_history[0]["kl"]) == 0


@row(ROWS, "GRPO that samples in bf16 and replays its routes, two steps")
def grpo_replayed(subject: Subject) -> None:
    """The routes of the last generation are there, and a loss was finite."""

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    with TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=str(subject.folder),
            reward_funcs=reward,
            args=GRPOConfig(
                **{**_common(folder), "max_steps": 2}, num_generations=2, max_completion_length=4
            ),
            train_dataset=PROMPTS,
            processing_class=tokenizer(),
        )
        replayed = add_route_replay(trainer, sampler="bf16")
        trainer.train()
        assert replayed.routes is not None and len(replayed.routes) == 2
        assert math.isfinite(trainer.state.log_history[0]["loss"])


@row(ROWS, "GRPO by a vLLM in its process (a stand-in) whose routes are replayed, two steps")
def grpo_colocated(subject: Subject) -> None:
    """Routes of the last generation are there, weights are passed on, and a loss was finite."""

    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    with TemporaryDirectory() as folder, in_place_of_vllm():
        trainer = GRPOTrainer(
            model=str(subject.folder),
            reward_funcs=reward,
            args=GRPOConfig(
                **{**_common(folder), "max_steps": 2}, num_generations=2, max_completion_length=4,
                use_vllm=True, vllm_mode="colocate",
            ),
            train_dataset=PROMPTS,
            processing_class=tokenizer(),
        )  # fmt: skip
        replayed = add_route_replay(trainer)
        trainer.train()
        assert replayed.routes is not None and len(replayed.routes) == 2
        assert trainer.vllm_generation.llm.loaded > 0
        assert math.isfinite(trainer.state.log_history[0]["loss"])
