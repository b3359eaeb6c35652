"""Trainer's checkpoints go back into the model whole, or the run stops and names the tensors."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from l2r import L2RConfig
from l2r.engines.trainer import add_router_losses
from l2r.hf.checkpoints.resume import load_whole
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.tiers import few

ROWS = [{"input_ids": row, "labels": row} for row in sample_tokens(16)]
OTHER = [{"input_ids": row, "labels": row} for row in sample_tokens(24)[16:]]
IMAGES = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(i % 3)} for i in range(8)]
ROUTER = L2RConfig(rank=2, heads=4)
EXPERTS = "model.layers.1.mlp.experts."
FUSED, PART = f"{EXPERTS}down_proj", f"{EXPERTS}3.down_proj.weight"


def stock(name="qwen3_moe", **sizes):
    return tiny_model(FAMILIES[name], **sizes)


def swapped(name="qwen3_moe", **sizes):
    return swap_routers(stock(name, **sizes), ROUTER)


def own():
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    config = L2rOlmoeConfig(**sizes, num_experts=4, router={"kind": "l2r_sips", "rank": 2})
    return L2rOlmoeForCausalLM(config)


def vit():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_labels": 3}
    config = L2rViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4, num_experts=4)
    return L2rViTForImageClassification(config)


def trainer_of(model, folder, steps, *, losses=False, data=ROWS, **options):
    settings = {
        "max_steps": steps,
        "save_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **options})
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=OTHER)
    if losses:
        add_router_losses(trainer)
    return trainer


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(model, expected):
    """Names of the tensors that are not bit for bit what they should be."""
    found = model.state_dict()
    assert found.keys() == expected.keys()
    same = {
        n for n, v in expected.items() if v.dtype == found[n].dtype and torch.equal(found[n], v)
    }
    return sorted(expected.keys() - same)


def disturbed(model):
    """The model with other weights: what is not loaded is seen."""
    with torch.no_grad():
        for value in model.parameters():
            value.add_(1.0)
    return model


def saved(model, folder, **options):
    """A checkpoint of Trainer after two steps, and its weights."""
    trainer = trainer_of(model, folder, 2, **options)
    trainer.train()
    return folder / "checkpoint-2", weights(trainer.model)


def resume(model, checkpoint, **options):
    """Resume with no step left, so that the model is what was loaded."""
    trainer = trainer_of(disturbed(model), checkpoint.parent / "again", 2, **options)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer.model


CASES = [(name, kind) for name in FAMILIES for kind in (stock, swapped)]
FAST = [("mixtral", swapped), ("deepseek_v3", swapped), ("gpt_oss", stock), ("qwen3_moe", stock)]


@pytest.mark.parametrize(("name", "kind"), few(CASES, FAST, "every family"))
def test_every_family_resumes_with_every_tensor_of_its_checkpoint(name, kind, tmp_path):
    checkpoint, expected = saved(kind(name), tmp_path)
    assert differing(resume(kind(name), checkpoint), expected) == []


def test_more_than_ten_experts_keep_their_order(tmp_path):
    checkpoint, expected = saved(stock(num_experts=12), tmp_path)
    assert differing(resume(stock(num_experts=12), checkpoint), expected) == []


@pytest.mark.parametrize("build", [own, vit])
def test_so_do_our_own_models(build, tmp_path):
    data = IMAGES if build is vit else ROWS
    checkpoint, expected = saved(build(), tmp_path, data=data)
    assert differing(resume(build(), checkpoint, data=data), expected) == []


@pytest.mark.parametrize(
    ("build", "losses"), [(stock, False), (swapped, False), (swapped, True), (own, True)]
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(build, losses, tmp_path):
    start = build()
    first = weights(start)
    unbroken = trainer_of(start, tmp_path / "unbroken", 5, losses=losses)
    unbroken.train()
    again = build()
    again.load_state_dict(first)
    resumed = trainer_of(disturbed(again), tmp_path / "resumed", 5, losses=losses)
    resumed.train(resume_from_checkpoint=str(tmp_path / "unbroken" / "checkpoint-2"))
    assert differing(resumed.model, weights(unbroken.model)) == []
    logged = [
        [log["loss"] for log in t.state.log_history if "loss" in log] for t in (unbroken, resumed)
    ]
    assert len(logged[0]) == 5 and logged[0] == logged[1]


@pytest.mark.parametrize("build", [stock, swapped])
def test_the_best_model_at_the_end_is_the_best_checkpoint_whole(build, tmp_path):
    trainer = trainer_of(
        build(),
        tmp_path,
        6,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=3e-2,
        lr_scheduler_type="constant",
    )
    trainer.train()
    logged = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert min(logged) < logged[-1]  # the best step is not the last
    assert trainer.evaluate()["eval_loss"] == min(logged)


def in_shards(checkpoint, model):
    model.save_pretrained(checkpoint, max_shard_size="8KB")
    (checkpoint / "model.safetensors").unlink()
    places = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({file for name, file in places.items() if EXPERTS in name}) > 1


def pickled(checkpoint, model):
    file = checkpoint / "model.safetensors"
    torch.save(load_file(file), checkpoint / "pytorch_model.bin")
    file.unlink()


def of_a_compiled_model(checkpoint, model):
    file = checkpoint / "model.safetensors"
    tensors = {f"_orig_mod.{name}": value for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def under_the_models_names(checkpoint, model):
    model.save_pretrained(checkpoint, save_original_format=False)
    assert FUSED in load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    "rewrite", [in_shards, pickled, of_a_compiled_model, under_the_models_names]
)
@pytest.mark.parametrize("build", [stock, swapped])
def test_other_forms_of_a_checkpoint_load_too(build, rewrite, tmp_path):
    model = build()
    checkpoint, expected = saved(model, tmp_path)
    rewrite(checkpoint, model)
    assert differing(resume(build(), checkpoint), expected) == []


def test_every_tensor_keeps_its_precision(tmp_path):
    def build():
        return swap_routers(stock().bfloat16(), ROUTER)

    checkpoint, expected = saved(build(), tmp_path)
    assert {value.dtype for value in expected.values()} == {torch.bfloat16, torch.float32}
    assert differing(resume(build(), checkpoint), expected) == []


def test_a_tied_matrix_that_is_stored_once_is_not_missed(tmp_path):
    model = stock(tie_word_embeddings=True)
    checkpoint, expected = saved(model, tmp_path)
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    assert differing(resume(stock(tie_word_embeddings=True), checkpoint), expected) == []


def changed(checkpoint, change):
    file = checkpoint / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without(part):
    def change(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def with_(name, *shape):
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


REFUSED = {
    "a missing tensor": (without("model.norm."), "missing (model.norm.weight)"),
    "a missing router": (
        without(".0.mlp.gate."),
        "missing (model.layers.0.mlp.gate.anchors, model.",
    ),
    "a matrix of an expert": (without(PART), f"not those of whole experts ({PART})"),
    "a matrix of all experts": (
        lambda t: [t.pop(f"{EXPERTS}{n}.up_proj.weight") for n in range(8)],
        f"{EXPERTS}gate_up_proj cannot be put together",
    ),
    "an expert": (
        without(".1.mlp.experts.7."),
        f"of another shape ({FUSED} is [7, 32, 16] in the checkpoint and [8, 32, 16] in the model",
    ),
    "all experts": (
        without(".1.mlp.experts."),
        f"missing ({FUSED.replace('down', 'gate_up')}, {FUSED})",
    ),
    "a tensor too many": (with_("other", 2), "not in the model (other)"),
    "another shape": (
        with_("model.norm.weight", 5),
        "of another shape (model.norm.weight is [5] in",
    ),
    "fused experts beside single ones": (with_(FUSED, 8, 32, 16), f"there twice ({FUSED})"),
}


@pytest.fixture(scope="module")
def checkpoint_of_a_swapped_model(tmp_path_factory):
    return saved(swapped(), tmp_path_factory.mktemp("swapped"))[0]


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_whole_is_refused_in_one_line_before_anything_changes(
    what, checkpoint_of_a_swapped_model, tmp_path
):
    change, message = REFUSED[what]
    checkpoint = shutil.copytree(checkpoint_of_a_swapped_model, tmp_path / "checkpoint-2")
    file = checkpoint / "model.safetensors"
    tensors = {name: value.clone() for name, value in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    model = swapped()
    before = weights(model)
    trainer = trainer_of(model, tmp_path / "again", 2)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert str(checkpoint) in str(error.value) and "\n" not in str(error.value)
    assert differing(model, before) == []


def test_a_run_before_the_swap_is_not_gone_on_with_after_it(tmp_path):
    checkpoint, _ = saved(stock(), tmp_path)
    with pytest.raises(
        ValueError, match=r"missing \(model.layers.0.mlp.gate.anchors.*not in the mod"
    ):
        resume(swapped(), checkpoint)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_adapters_resume_as_before(tmp_path):
    def build():
        torch.manual_seed(1)
        targets = {"target_modules": ["q_proj"], "modules_to_save": ["gate"]}
        return get_peft_model(swapped(), LoraConfig(r=2, **targets))

    checkpoint, expected = saved(build(), tmp_path)
    assert not list(checkpoint.glob("model*.safetensors"))
    trainer = trainer_of(build(), tmp_path / "again", 2)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert differing(trainer.model, expected) == []


def test_models_without_routers_and_sharded_runs_are_left_to_the_trainer(tmp_path):
    checkpoint, _ = saved(stock(), tmp_path)
    dense = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 1}))
    assert not load_whole(trainer_of(dense, tmp_path, 2), checkpoint)
    for engine in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        trainer = trainer_of(disturbed(stock()), tmp_path, 2)
        setattr(trainer, engine, True)
        assert not load_whole(trainer, checkpoint)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert not load_whole(trainer_of(stock(), tmp_path, 2), empty)
    with pytest.raises(ValueError, match="Can't find a valid checkpoint"):
        resume(stock(), empty)


def test_a_place_that_is_not_in_memory_is_refused(tmp_path):
    checkpoint, _ = saved(stock(), tmp_path)
    trainer = trainer_of(stock(), tmp_path, 2)
    trainer.model.lm_head.to("meta")
    with pytest.raises(ValueError, match=r"sharded or not in memory \(lm_head.weight\)"):
        load_whole(trainer, checkpoint)


@pytest.mark.slow("fresh processes")
@pytest.mark.parametrize("first", ["import l2r", "from transformers import Trainer"])
def test_the_order_of_imports_does_not_matter(first):
    code = f"""
import sys
{first}
import l2r
from transformers import Trainer
for method in (Trainer._load_from_checkpoint, Trainer._load_best_model):
    assert method.__module__ == "transformers.trainer" and method.__wrapped__
assert "l2r.hf" not in sys.modules  # nothing is imported before a checkpoint is loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdin=subprocess.DEVNULL)
