"""transformers: loaders, trainers, generation, pickles."""

import copy
import pickle
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.func import functional_call, grad
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import (
    IDS,
    Subject,
    in_routers,
    largest_difference,
    logits,
    tokenizer,
)

ROWS: list[Row] = []
TEXTS = [{"input_ids": ids, "labels": ids} for ids in IDS]


@row(ROWS, "`AutoModelForCausalLM` opens a saved folder with the same logits")
def auto(subject: Subject) -> None:
    """Logits to the bit, but where the family's own weights come back rounded."""
    assert (
        largest_difference(AutoModelForCausalLM.from_pretrained(subject.folder), subject.model())
        < 1e-6
    )


@row(ROWS, "`AutoModel` opens the same routers")
def headless(subject: Subject) -> None:
    """Without the head, every router parameter equal."""
    expected = [value for _, value in in_routers(subject.model())]
    opened = [value for _, value in in_routers(AutoModel.from_pretrained(subject.folder))]
    assert all(torch.equal(a, b) for a, b in zip(opened, expected, strict=True))


@row(ROWS, "`AutoModelForSequenceClassification` opens the same routers")
def classifier(subject: Subject) -> None:
    """The same with a head for classes."""
    expected = [value for _, value in in_routers(subject.model())]
    model = AutoModelForSequenceClassification.from_pretrained(subject.folder, num_labels=3)
    opened = [value for _, value in in_routers(model)]
    assert all(torch.equal(a, b) for a, b in zip(opened, expected, strict=True))


@row(ROWS, '`pipeline("text-generation", FOLDER)` writes what the model writes')
def pipe(subject: Subject) -> None:
    """Greedy text by the pipeline and by the model in memory."""
    options = {"max_new_tokens": 5, "do_sample": False}
    by_pipeline = pipeline("text-generation", str(subject.folder))("w5 w6 w7", **options)
    words = tokenizer()
    ids = words("w5 w6 w7", return_tensors="pt").input_ids
    expected = words.decode(subject.model().generate(ids, **options)[0], skip_special_tokens=True)
    written = by_pipeline[0]["generated_text"]
    assert written.replace(" ", "") == expected.replace(" ", ""), written


@row(ROWS, "loading in bfloat16 and saving again keeps every tensor")
def half(subject: Subject) -> None:
    """Through bf16 and disk, to the bit."""
    model = AutoModelForCausalLM.from_pretrained(subject.folder, dtype=torch.bfloat16)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert largest_difference(model, again) == 0


@row(ROWS, 'shards of 40 KB, `device_map="auto"`')
def shards(subject: Subject) -> None:
    """Many shards, opened by accelerate's placement."""
    with TemporaryDirectory() as folder:
        subject.model().save_pretrained(folder, max_shard_size="40KB")
        model = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
        assert largest_difference(model, subject.model()) < 1e-6


@row(ROWS, "`pickle` and `torch.save(model)`")
def pickled(subject: Subject) -> None:
    """A model through pickle."""
    model = subject.model()
    assert largest_difference(pickle.loads(pickle.dumps(model)), model) == 0


@row(ROWS, "`copy.deepcopy`")
def copied(subject: Subject) -> None:
    """A deep copy."""
    model = subject.model()
    assert largest_difference(copy.deepcopy(model), model) == 0


def _generates(subject: Subject, **options: Any) -> None:
    model = subject.model()
    usual = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS[:1], use_cache=False, **usual)
    assert torch.equal(model.generate(IDS[:1], **usual, **options), expected)


@row(ROWS, "generation with a cache equals generation without")
def cached(subject: Subject) -> None:
    """Greedy, dynamic cache."""
    _generates(subject)


@row(ROWS, "generation with a static cache equals generation without")
def static(subject: Subject) -> None:
    """Greedy, static cache."""
    _generates(subject, cache_implementation="static")


@row(ROWS, "assisted generation (prompt lookup) equals generation without")
def assisted(subject: Subject) -> None:
    """Greedy, with guesses from the prompt."""
    _generates(subject, prompt_lookup_num_tokens=2)


@row(ROWS, "left padding gives the tokens of each row by itself")
def padded(subject: Subject) -> None:
    """A short row beside a long one."""
    model = subject.model()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    short = IDS[1:, 4:]
    rows = torch.stack([IDS[0], torch.cat([torch.zeros(4, dtype=torch.long), short[0]])])
    mask = (rows != 0).long()
    both = model.generate(rows, attention_mask=mask, **options)[:, -4:]
    assert torch.equal(both[:1], model.generate(IDS[:1], **options)[:, -4:])
    assert torch.equal(both[1:], model.generate(short, **options)[:, -4:])


def _trained(model: Any, folder: str, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=2, learning_rate=1e-2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=TEXTS)
    trainer.train()
    return trainer


@row(ROWS, "`Trainer` moves every router parameter")
def trainer_step(subject: Subject) -> None:
    """Two steps in fp32."""
    model = subject.model()
    before = {n: p.detach().clone() for n, p in in_routers(model) if p.requires_grad}
    with TemporaryDirectory() as folder:
        _trained(model, folder)
    assert all(not torch.equal(p, before[n]) for n, p in in_routers(model) if n in before)


@row(ROWS, "`Trainer` with bf16 autocast and gradient checkpointing")
def trainer_bf16(subject: Subject) -> None:
    """Two steps; losses are finite."""
    with TemporaryDirectory() as folder:
        trainer = _trained(
            subject.model(), folder, bf16=True, gradient_checkpointing=True, logging_steps=1
        )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses and all(0 < float(loss) < 100 for loss in losses)


@row(ROWS, "`Trainer` saves a checkpoint that opens as trained")
def trainer_saves(subject: Subject) -> None:
    """Trained, saved, opened by AutoModelForCausalLM."""
    with TemporaryDirectory() as folder:
        trainer = _trained(subject.model(), folder)
        trainer.save_model(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
        assert largest_difference(again, trainer.model) < 1e-6


@row(ROWS, "`torch.func`: functional_call and grad give autograd's gradients")
def functional(subject: Subject) -> None:
    """Gradients of router parameters by both ways."""
    model = subject.model()
    model.set_experts_implementation("eager")
    parameters = {n: p.detach() for n, p in in_routers(model) if p.requires_grad}

    def loss(values: dict[str, torch.Tensor]) -> Any:
        return functional_call(
            model, values, (), {"input_ids": IDS, "labels": IDS, "use_cache": False}
        ).loss

    by_func = grad(loss)(parameters)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for name, parameter in in_routers(model):
        if name in parameters:
            torch.testing.assert_close(by_func[name], parameter.grad)


@row(ROWS, "a hook on a module inside the router is called")
def hooks(subject: Subject) -> None:
    """Forward hooks on every part of the routers that holds parameters."""
    model, seen = subject.model(), set()
    prefixes = {name.rpartition(".")[0] for name, p in in_routers(model) if p.dim() > 1}
    for prefix in prefixes:
        model.get_submodule(prefix).register_forward_hook(
            lambda module, args, output, prefix=prefix: seen.add(prefix)
        )
    logits(model)
    assert seen == prefixes, prefixes - seen
