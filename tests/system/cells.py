"""Cells: families x dtypes x kinds of folders x commands and functions that take a model.

A cell makes a folder, runs one command or function on it, and compares a number with transformers'
own forward (forward.py). test_cells.py runs a cover of all pairs, ``make cells`` the rest.
"""

import base64
import io
import json
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import l2r
from l2r import L2RConfig, L2rOlmoeConfig, L2rOlmoeForCausalLM, LinearConfig
from l2r.analysis.diagnostics import router_statistics
from l2r.engines.serve.options import ServeOptions
from l2r.engines.serve.server import serving
from l2r.engines.trainer import add_router_losses
from l2r.files.diagnosis import read_diagnosis
from l2r.hf.swap import freeze_routers, selection_biases, train_routers_only
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from tests.commands import Ended, command
from tests.hf.families import FAULTS, LOOPED, TINY, matrix_of_logits, tiny_model
from tests.system.forward import (
    BY_TOKEN,
    OURS,
    Call,
    assert_certified,
    calls_of,
    forced,
    forward,
    losses,
    next_token_loss,
    opened,
    plain_numbers,
    round_to_int8,
    routers_of,
    under_noise,
    with_routers_of,
)

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "fox", "by", "day")
ROWS, LENGTH = 8, 16
READ = ("--instances", ROWS, "--length", LENGTH, "--device", "cpu")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A softmax, renormalized, renormalized over the k alone, a sparse mixer, a bias added to softmax or
# to sigmoids in groups, a bias of the block, layers of two kinds, a choice by token id, a wrapper.
OF_EACH_CONTRACT = (
    "olmoe", "mixtral", "gpt_oss", "phimoe", "ernie4_5_moe", "deepseek_v3", "afmoe", "jamba",
    "deepseek_v4", "qwen3_vl_moe",
)  # fmt: skip
CLASSIFIERS = ("openai_privacy_filter",)
NONE_KNOWN = {
    "phimoe": "the rule of SparseMixer",
    "flint": "sigmoid scores, which round to ties",
    **dict.fromkeys(
        ("ernie4_5_moe", "laguna", "ernie4_5_vl_moe", "deepseek_v4", "minimax_m3_vl_text")
        + ("step3p7", "muse_spark", "kolibri1", "inkling2_text", "inkling2_loop_text")
        + ("longcat_flash",),
        "a selection bias",
    ),
    **dict.fromkeys(("minimax_m2", "lfm2_moe", "afmoe", "hy_v3"), "a bias of its block"),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "dots1")
        + ("solar_open", "exaone_moe", "nemotron_h", "mistral4", "mistral_large4")
        + ("unlimited_ocr", "deepseek_ocr2", "glm_moe_dsa", "glm5_next", "glm4v_moe")
        + ("kimi_linear", "hy_v4", "hy_v4_vl", "axk1", "axk2", "bailing_hybrid")
        + ("dots3_note_text", "mimo_v2_flash", "beam"),
        "groups of experts",
    ),
}
NEAR = 64 * torch.finfo(torch.float32).eps  # sums of some hundred terms in another order


class RefusedError(Exception):
    """A command ended with code 2 and one line."""


class Cell(NamedTuple):
    """A family, a dtype and a kind of folder by name, and a command."""

    family: str
    dtype: str
    kind: str
    command: str

    def __str__(self) -> str:
        return "-".join(self)


class Folders:
    """Folders of one family and dtype at a time, each made and read once."""

    def __init__(self, root: Path, text: Any) -> None:
        self.root, self.text, self.made = root, text, dict[tuple[str, str, str], Folder]()

    def __call__(self, family: str, dtype: str, kind: str) -> "Folder":
        """The folder of a kind. What another family or dtype has written is deleted."""
        if not any(known[:2] == (family, dtype) for known in self.made):
            self.forget()
        if (family, dtype, kind) not in self.made:
            self.made[family, dtype, kind] = Folder(family, dtype, kind, self)
        return self.made[family, dtype, kind]

    def forget(self) -> None:
        """Delete all that was made; what is asked for next is made and read anew."""
        shutil.rmtree(self.root, ignore_errors=True)
        self.made.clear()


class Folder:
    """A checkpoint, what is read from it, and a place for what commands write."""

    def __init__(self, family: str, dtype: str, kind: str, others: Folders) -> None:
        self.family, self.dtype, self.kind, self.others = family, dtype, kind, others
        self.torch_dtype, self.text = DTYPES[dtype], others.text
        self.root = others.root / f"{family}-{dtype}"
        self.path = self.root / kind
        self.root.mkdir(parents=True, exist_ok=True)
        KINDS[kind](self)

    def before(self, kind: str) -> "Folder":
        """The folder of another kind from which this one is made, or with which it is compared."""
        return self.others(self.family, self.dtype, kind)

    def save(self, model: Any) -> None:
        """Write a model with the tokenizer."""
        model.save_pretrained(self.path)
        self.text.tokenizer.save_pretrained(self.path)

    def new(self) -> Path:
        """A folder to write into, new and empty."""
        return Path(tempfile.mkdtemp(dir=self.root)) / "out"

    @cached_property
    def model(self) -> Any:
        """Opened by transformers, in the dtypes of its file."""
        return opened(self.path, "auto")

    @cached_property
    def in_float32(self) -> Any:
        """Opened by transformers in float32."""
        return self.model if self.dtype == "float32" else opened(self.path, torch.float32)

    @cached_property
    def ours(self) -> Any:
        """Opened by `load_pretrained`, for functions that leave a model as it was."""
        return l2r.load_pretrained(self.path, dtype="auto")

    @cached_property
    def read(self) -> tuple[torch.Tensor, list[Call]]:
        """Logits and calls of all routers on the rows of the text."""
        return forward(self.family, self.model, self.text.rows)

    @property
    def near(self) -> float:
        """Share by which numbers may differ from those of transformers' forward.

        Both run the same code on the same values. A matrix product in float32 rounds by where in
        memory a tensor begins, which differs between two models of one file.
        """
        return 1e-9 if self.kind == "stock" and self.dtype != "float32" else NEAR


def make_text(folder: Path) -> Any:
    """A tokenizer of 60 entries, a file of words, a sentence, and the file's tokens in rows.

    Three more files, to fit on.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    generator = torch.Generator().manual_seed(0)
    many = folder / "to_fit"
    many.mkdir()
    for file in (folder / "words.txt", *(many / f"{n}.txt" for n in range(3))):
        order = torch.randint(len(WORDS), (300,), generator=generator)
        file.write_text(" ".join(WORDS[n] for n in order.tolist()))
    rows = torch.tensor(tokenizer((folder / "words.txt").read_text())["input_ids"])
    return SimpleNamespace(
        tokenizer=tokenizer, file=folder / "words.txt", to_fit=many,
        sentence="the dog sat on the cat and a fox ran",
        rows=rows[: ROWS * LENGTH].view(ROWS, LENGTH),
    )  # fmt: skip


# Kinds of folders


def stock(folder: Folder) -> None:
    """as transformers saves it"""
    folder.save(tiny_model(FAMILIES[folder.family]).to(folder.torch_dtype))


def preset(folder: Folder) -> None:
    """`swap_routers` without a config, `save_pretrained`"""
    folder.save(l2r.swap_routers(deepcopy(folder.before("stock").model)))


def linear(folder: Folder) -> None:
    """our linear router, with the old weights"""
    model = deepcopy(folder.before("stock").model)
    weights = {site.path: matrix_of_logits(site) for site in router_sites(model)}
    l2r.swap_routers(model, LinearConfig())
    with torch.no_grad():
        for path, weight in weights.items():
            model.get_submodule(path).weight.copy_(weight)
    folder.save(model)


def fitted(folder: Folder) -> None:
    """`l2r swap --fit --data`"""
    stock = folder.before("stock").path
    sizes = ("--tokens", 256, "--held-out", 64, "--length", LENGTH, "--updates", 2)
    done("swap", stock, "--fit", "--data", folder.text.to_fit, *sizes, "--out", folder.path)


def exported(folder: Folder) -> None:
    """preset, by `l2r export`"""
    done("export", folder.before("preset").path, "--out", folder.path)


def own(folder: Folder) -> None:
    """our own OLMoE, rank 2"""
    sizes = {name: size for name, size in TINY.items() if name != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, num_experts=8, router=router))
    model.save_pretrained(folder.path)
    folder.save(opened(folder.path, folder.torch_dtype))


KINDS = {f.__name__: f for f in (stock, preset, linear, fitted, exported, own)}


def done(*words: object) -> Ended:
    """A command that ends well. Raises RefusedError where it says that it cannot."""
    ended = command(*words)
    if ended.code == 2:
        raise RefusedError(ended.refusal())
    assert ended.code == 0, ended.out + ended.err
    return ended


# Commands and functions: what each says, and of what that is the number


def check(folder: Folder) -> None:
    """no fault, and a warning of routers that nothing fitted; typed, with DeepSeek-V4's padding"""
    ended = command("check", folder.path, "--data", folder.text.file, *READ, "--json")
    if ended.code == 2:
        raise RefusedError(ended.refusal())
    found = json.loads(ended.out)
    faults = {f["check"] for f in found if f["status"] == "fault"}
    assert len(found) > 10 and faults == FAULTS.get(folder.family, set()), faults
    assert ended.code == bool(faults), ended.out + ended.err
    untrained = {f["check"] for f in found if f["status"] == "warning"} & {"trained"}
    assert folder.kind not in ("preset", "exported") or untrained


def diagnose_data(folder: Folder, *, draw: bool = False) -> None:
    """15 numbers of each layer, loads, experts, certified radii, loss; hooks on the routers"""
    out, words = folder.new(), ("--certify", 3, "--gain", ROWS, "--text-tokens", LENGTH)
    with patch("l2r.report.diagnosis.write_diagnosis") if not draw else _nothing():
        done("diagnose", folder.path, "--data", folder.text.file, *READ, *words, "--out", out)
    assert (out / "index.html").is_file() == draw
    got = read_diagnosis(out / folder.path.name)
    logits, calls = folder.read
    assert len(got.layers) == len(calls)
    loss = next_token_loss(logits, folder.text.rows)
    assert got.info["model"]["cross_entropy"] == pytest.approx(loss, rel=1e-5)
    for layer, (call, said) in enumerate(zip(calls, got.layers, strict=True)):
        name = type(call.router).__name__
        assert ("stability" in said) != (name in BY_TOKEN)
        noisy = {} if name in BY_TOKEN else under_noise(call)
        for number, value in {**plain_numbers(call), **noisy}.items():
            assert said[number] == pytest.approx(float(value), rel=folder.near, abs=folder.near), (
                number
            )
        tokens, load = len(call.chosen), torch.bincount(call.chosen.flatten(), minlength=8)
        assert np.allclose(got.array(layer, "topk") * tokens, load)
        order = call.weights.argsort(dim=1, descending=True, stable=True)
        heaviest = call.chosen.gather(1, order).view(ROWS, LENGTH, -1)
        assert (got.array(layer, "experts") == heaviest.numpy()).all()
        if folder.family in NONE_KNOWN:
            why = f"its logits and {NONE_KNOWN[folder.family]}"
            why = "the ids of tokens" if name in BY_TOKEN else why
            assert said["certificate"] == f"{name} chooses by {why}; no certificate is known"
        else:
            assert_certified(call, got.arrays, layer)
            assert said["certified_top1"] > 0 and said["found_topk"] >= said["certified_topk"]


def diagnose_text(folder: Folder) -> None:
    """experts and weights of each token of a sentence; hooks on the routers"""
    more = ("--text", folder.text.sentence, "--out", folder.new(), "--json", "--device", "cpu")
    (said,) = json.loads(done("diagnose", folder.path, *more).out).values()
    ids = torch.tensor([folder.text.tokenizer(folder.text.sentence)["input_ids"]])
    _, calls = forward(folder.family, folder.model, ids)
    assert "".join(token["token"] for token in said).strip() == folder.text.sentence
    for layer, call in enumerate(calls):
        weights, order = call.weights.float().sort(dim=1, descending=True, stable=True)
        assert [token["experts"][layer] for token in said] == call.chosen.gather(1, order).tolist()
        assert np.allclose(
            [token["weights"][layer] for token in said], weights, rtol=folder.near, atol=0
        )


def mismatch_bf16(folder: Folder, dtype: str = "float32") -> None:
    """decisions, tokens and KL that change in bf16; a forward in each"""
    mismatch(folder, "bf16", dtype)


def mismatch_int8(folder: Folder, dtype: str = "auto") -> None:
    """the same in int8; weights rounded in the test"""
    mismatch(folder, "int8", dtype)


def mismatch_folder(folder: Folder) -> None:
    """the same of the stock folder, as it is, against this one; a forward of each"""
    mismatch(folder, str(folder.path), "auto")


def mismatch(folder: Folder, against: str, dtype: str) -> None:
    """One folder in two arithmetics, or the stock one and this."""
    swapped = folder.kind not in ("stock", "own")
    first = folder.before("stock") if swapped and against == str(folder.path) else folder
    words = (folder.text.file, *READ, "--against", against, "--dtype", dtype, "--json")
    with patch("l2r.report.mismatch.write_mismatch"):
        ended = done("mismatch", first.path, "--data", *words, "--out", folder.new())
    said = json.loads(ended.out)
    model = first.model if dtype == "auto" else first.in_float32
    if against == "bf16":
        other = opened(folder.path, torch.bfloat16)
        with_routers_of(folder.family, model, other)
    elif against == "int8":
        other = deepcopy(model)
        round_to_int8(folder.family, other)
    else:
        other = folder.model
    (one, calls), (two, others) = (
        of.read if m is of.model else forward(folder.family, m, folder.text.rows)
        for of, m in ((first, model), (folder, other))
    )
    changed = torch.stack(
        [(a.sets() != b.sets()).any(dim=1) for a, b in zip(calls, others, strict=True)]
    )
    assert said["decisions_changed"] == pytest.approx(float(changed.double().mean()))
    assert said["tokens_changed"] == pytest.approx(float(changed.any(dim=0).double().mean()))
    before, after = (logits.double().log_softmax(dim=-1) for logits in (one, two))
    kl = (before.exp() * (before - after)).sum(dim=-1).mean()
    assert said["log_probability"]["own"]["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)
    if against in ("bf16", "int8"):
        assert said["certified_changed"] == 0
        assert (said["certified"] is None) == (folder.family in NONE_KNOWN)
    if (against, dtype, folder.dtype) == ("bf16", "auto", "bf16"):
        assert said["decisions_changed"] == 0 and float(kl) == 0  # it is in bf16 already


def eval_text(folder: Folder) -> None:
    """nats per token of a sentence after the end-of-text token; cross-entropy of the logits"""
    words = ("--text", folder.text.sentence, "--out", folder.new(), "--device", "cpu", "--json")
    said = json.loads(done("eval", folder.path, *words).out)[-1]
    tokenizer = folder.text.tokenizer
    ids = tokenizer(folder.text.sentence)["input_ids"]
    ids = torch.tensor([[tokenizer.eos_token_id, *ids]])
    logits, _ = forward(folder.family, folder.model, ids)
    assert said["tokens"] == ids.shape[1] - 1
    assert said["nats/token"] == pytest.approx(next_token_loss(logits, ids), rel=1e-5)


def swap(folder: Folder) -> None:
    """every tensor but the routers', to the bit; transformers' of the file"""
    out = folder.new()
    done("swap", folder.path, "rank=2", "heads=4", "--out", out)
    routers = routers_of(folder.family, folder.model)
    kept = {path for path, router in routers.items() if type(router).__name__ in BY_TOKEN}
    new = opened(out, "auto")
    for path, router in routers_of(folder.family, new).items():
        assert type(router).__name__ == (BY_TOKEN[0] if path in kept else OURS[0])
    old, new = (
        {name: tensor for name, tensor in model.state_dict().items() if not _in(name, routers)}
        for model in (folder.model, new)
    )
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)


def export(folder: Folder) -> None:
    """logits of the folder's own code in float32; those of this folder"""
    out = folder.new()
    done("export", folder.path, "--out", out)
    config = json.loads((out / "config.json").read_text())
    (name,) = config["architectures"]
    place = next(p for p in config["auto_map"].values() if p.endswith(f".{name}"))
    code = get_class_from_dynamic_module(place, out)
    assert code.__module__.startswith("transformers_modules")
    theirs = code.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        one, two = (
            model(input_ids=folder.text.rows, use_cache=False).logits
            for model in (theirs, folder.in_float32)
        )
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def serve(folder: Folder) -> None:
    """tokens of a greedy answer, experts of its prompt; `generate` of transformers, hooks"""
    ids = folder.text.rows[0, :6].tolist()
    body = {"model": "served", "prompt": ids, "max_tokens": 4, "temperature": 0}
    body |= {"return_token_ids": True, "return_routed_experts": folder.family not in LOOPED}
    with serving(folder.path, ServeOptions(name="served", port=0)) as (port, _):
        address = f"http://localhost:{port}/v1/completions"
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(address, json.dumps(body).encode(), kind)
        with urllib.request.urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
    assert choice["token_ids"] == greedy(folder.model, ids)
    if folder.family not in LOOPED:
        _, calls = forward(folder.family, folder.model, torch.tensor([ids]))
        given = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        layers = [
            int(re.search(r"\.(\d+)\.", p)[1]) for p in routers_of(folder.family, folder.model)
        ]
        for layer, call in zip(layers, calls, strict=True):
            assert (np.sort(given[: len(ids), layer]) == call.sets().numpy()).all()


def generate(folder: Folder) -> None:
    """greedy tokens of `load_pretrained`'s model; those of transformers'"""
    ids = folder.text.rows[0, :6].tolist()
    assert greedy(folder.ours, ids) == greedy(folder.model, ids)


def greedy(model: Any, ids: Sequence[int]) -> list[int]:
    """Four tokens that transformers generates, or fewer to the end-of-text token."""
    if not model.can_generate():
        raise RefusedError(f"{type(model).__name__} cannot generate")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()


def load(folder: Folder) -> None:
    """every tensor and its dtype, saved and loaded again; transformers' of the file"""
    model = l2r.load_pretrained(folder.path, dtype="auto")
    out = folder.new()
    model.save_pretrained(out)
    for again in (model, l2r.load_pretrained(out, dtype="auto")):
        theirs, mine = folder.model.state_dict(), again.state_dict()
        assert theirs.keys() == mine.keys()
        assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
        assert {n: t.dtype for n, t in theirs.items()} == {n: t.dtype for n, t in mine.items()}
    if folder.kind == "linear":  # the family's own class with its own router
        models = (folder.before("stock").in_float32, folder.in_float32)
        with torch.no_grad():
            one, two = (model(input_ids=folder.text.rows).logits for model in models)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def record(folder: Folder) -> None:
    """experts and weights of every token; hooks on the routers"""
    routes = recorded(folder)
    assert routes.lengths.tolist() == [LENGTH] * ROWS
    for place, call in enumerate(folder.read[1]):
        order = np.argsort(routes.experts[:, place], axis=1)
        experts = np.take_along_axis(routes.experts[:, place], order, axis=1)
        weights = np.take_along_axis(routes.weights[:, place], order, axis=1)
        chosen, where = call.chosen.sort(dim=1)
        assert (experts == chosen.numpy()).all()
        assert np.allclose(weights, call.weights.float().gather(1, where), rtol=folder.near, atol=0)


def recorded(folder: Folder) -> Any:
    """Routes of the rows, with their weights."""
    with torch.no_grad(), l2r.record(folder.ours, weights=True) as recorder:
        folder.ours(input_ids=folder.text.rows, use_cache=False)
    return recorder.routes()


def replay(folder: Folder) -> None:
    """logits with the experts and weights of other rows; routers that return them, by hooks"""
    routes, ids = recorded(folder), folder.text.rows.roll(1, 0)
    with torch.no_grad(), l2r.replay(folder.ours, routes, weights="recorded"):
        logits = folder.ours(input_ids=ids, use_cache=False).logits.float()
    _, calls = folder.read
    expected = forced(folder.family, folder.model, ids, calls)
    plain, _ = forward(folder.family, folder.model, ids)
    allowed = 8 * torch.finfo(folder.torch_dtype).eps * float(expected.abs().max())
    apart = float((logits - expected).abs().max())
    assert apart <= allowed and 2 * apart < float((plain - expected).abs().max())


def capture(folder: Folder) -> None:
    """logits, weights, experts and inputs; hooks on the routers"""
    with torch.no_grad(), l2r.capture(folder.ours, inputs=True) as captured:
        folder.ours(input_ids=folder.text.rows, use_cache=False)
    calls = list(folder.read[1])
    path_of = {router: path for path, router in routers_of(folder.family, folder.model).items()}
    calls.sort(key=lambda call: list(captured.outputs).index(path_of[call.router]))
    for call, output in zip(calls, captured.logits(), strict=True):
        torch.testing.assert_close(call.logits, output, rtol=NEAR, atol=NEAR)
    for call, output in zip(calls, captured.indices(), strict=True):
        assert torch.equal(call.chosen, output)
    inputs = [x for several in captured.inputs.values() for x in several]
    for call, output in zip(calls, inputs, strict=True):
        assert torch.equal(call.x.flatten(0, -2), output.flatten(0, -2))
    said, expected = router_statistics(captured), losses(all_passes(calls))
    balance, z = (sum(v) / len(v) for v in (said.balance_loss, said.z_loss))
    assert (balance, z) == pytest.approx(expected, rel=NEAR)


def statistics(folder: Folder) -> None:
    """loads, margins and losses of each layer, as a trainer logs them; hooks on the routers"""
    from l2r.analysis.diagnostics import RouterWatch

    watch = RouterWatch(folder.ours)
    with torch.no_grad():
        watch.start()
        folder.ours(input_ids=folder.text.rows, use_cache=False)
    said, (_, calls) = watch.read(), folder.read
    for layer, call in enumerate(all_passes(calls)):
        numbers, (balance, z) = plain_numbers(call), losses([call])
        expected = {
            "load_entropy": numbers["entropy"], "max_over_mean": numbers["max_over_mean"],
            "dead_experts": numbers["dead_experts"], "mean_margin": numbers["mean_margin"],
            "balance_loss": balance, "z_loss": z,
        }  # fmt: skip
        for name, value in expected.items():
            assert getattr(said, name)[layer] == pytest.approx(float(value), rel=NEAR), name


def all_passes(calls: Sequence[Call]) -> list[Call]:
    """The calls of each router as one, with all their tokens."""
    passes: dict[Any, list[Call]] = {}
    for call in calls:
        passes.setdefault(call.router, []).append(call)
    return [
        Call(router, torch.cat([c.x for c in each]), each[0].more,
             *(torch.cat([c[part] for c in each]) for part in (3, 4, 5)))
        for router, each in passes.items()
    ]  # fmt: skip


def router_losses(folder: Folder) -> None:
    """balance and z-loss that Trainer logs; Eq. 34 and 35 of its forward's logits, by hooks"""
    model = l2r.load_pretrained(folder.path, dtype="auto").train()
    data = [{"input_ids": row, "labels": row} for row in folder.text.rows[:4]]
    arguments = TrainingArguments(
        str(folder.new()), per_device_train_batch_size=4, max_steps=1, logging_steps=1,
        use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_grad_norm=0.0,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=data)
    add_router_losses(trainer, balance=0.01, z=0.001)
    with calls_of(folder.family, model) as calls:
        trainer.train()
    calls = [call for call in calls if type(call.router).__name__ not in BY_TOKEN]
    logged = next(line for line in trainer.state.log_history if "balance_loss" in line)
    assert (logged["balance_loss"], logged["z_loss"]) == pytest.approx(losses(calls), rel=NEAR)


def fit_routers(folder: Folder) -> None:
    """agreement and perplexity before and after; experts and logits of the two models"""
    model, held_out = deepcopy(folder.model), folder.text.rows
    teachers = list(routers_of(folder.family, model).values())
    logits, calls = forward(folder.family, model, held_out)
    l2r.swap_routers(model, L2RConfig(rank=4, heads=2))
    batches = [held_out.roll(n, 1) for n in (1, 2)]
    report = l2r.fit_routers(
        model, batches, held_out=[held_out], report=lambda *given, **named: None
    )
    after, _ = forward(folder.family, model, held_out)
    for stage, values in (("original", logits), ("fitted", after)):
        loss = next_token_loss(values, held_out)
        assert np.log(report.perplexity[stage]) == pytest.approx(loss, rel=1e-5)
    new = dict(zip(teachers, routers_of(folder.family, model).values(), strict=True))
    shares: dict[Any, list[torch.Tensor]] = {}
    for call in calls:
        if type(new[call.router]).__name__ in OURS:
            with torch.no_grad():
                _, _, chosen = new[call.router](call.x, *call.more)
            both = (call.chosen[:, :, None] == chosen[:, None]).any(dim=2).double().mean()
            shares.setdefault(call.router, []).append(both)
    for layer, both in zip(report.layers, shares.values(), strict=True):
        assert layer.agreement == pytest.approx(float(sum(both) / len(both)))


def trainable(folder: Folder) -> None:
    """biases, and what trains or is frozen; tensors and parameters of transformers' model"""
    model = l2r.load_pretrained(folder.path, dtype="auto")
    routers = [
        path for path, router in routers_of(folder.family, model).items()
        if type(router).__name__ not in BY_TOKEN
    ]  # fmt: skip
    tensors = {**dict(folder.model.named_buffers()), **dict(folder.model.named_parameters())}
    blocks = [path.rpartition(".")[0] for path in routers]
    biases = [
        value for name, value in tensors.items()
        if name.endswith(BIASES) and (_in(name, routers) or _in(name, blocks))
    ]  # fmt: skip
    found = selection_biases(model)
    assert len(found) == len(biases)
    for mine, theirs in zip(found.values(), biases, strict=True):
        assert torch.equal(mine, theirs.flatten())
    names = {
        name for name, _ in model.named_parameters()
        if _in(name, routers_of(folder.family, model)) and not name.endswith(BIASES)
    }  # fmt: skip
    assert set(train_routers_only(model)) == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == names
    model.requires_grad_(True)
    assert set(freeze_routers(model)) == names
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == names


def landscape(folder: Folder) -> None:
    """anchors of rank 2 on the page; the file's"""
    out = folder.new().parent / "page.html"
    done("landscape", folder.path, "--out", out)
    page = re.search(r'<script id="data" type="application/json">(.*?)</script>', out.read_text())
    shown = [part["anchors"] for part in json.loads(page[1])["sets"]]
    anchors = [v.tolist() for n, v in folder.model.state_dict().items() if n.endswith(".anchors")]
    assert np.allclose(shown, anchors, rtol=1e-6, atol=0)


BIASES = ("e_score_correction_bias", "expert_bias")
COMMANDS: dict[str, Callable[[Folder], None]] = {
    f.__name__: f
    for f in (
        check, diagnose_data, diagnose_text, mismatch_bf16, mismatch_int8, mismatch_folder,
        eval_text, swap, export, serve, generate, load, record, replay, capture, statistics,
        router_losses, fit_routers, trainable, landscape,
    )
}  # fmt: skip


def _in(name: str, paths: Any) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# Facts


class Fact(NamedTuple):
    """Why some cells are refused: about the family or upstream, and a part of what is said."""

    commands: Sequence[str]
    said: str
    why: str
    families: Sequence[str] = ()
    kinds: Sequence[str] = ()
    past: bool = False  # of committed results alone

    def holds(self, cell: Cell) -> bool:
        return (
            cell.command in self.commands
            and cell.family in (self.families or (cell.family,))
            and cell.kind in (self.kinds or (cell.kind,))
        )


ALL_OURS = tuple(kind for kind in KINDS if kind != "stock")
FACTS = (
    Fact(
        ("capture", "router_losses"), "contains no l2r Router",
        "routers of the family's own give their outputs to `record` and `RouterWatch`",
        kinds=("stock",), past=True,
    ),
    Fact(
        ("export",), "with 0 of them", "transformers opens a stock folder by itself",
        kinds=("stock",),
    ),
    Fact(
        ("landscape",), "with anchors of rank 2", "a plane shows anchors of rank 2",
        kinds=tuple(kind for kind in KINDS if kind != "own"),
    ),
    Fact(
        ("diagnose_data", "diagnose_text", "mismatch_bf16", "mismatch_int8", "mismatch_folder")
        + ("record", "replay"),
        "was called twice in a call", "its layers run several times in a call", LOOPED,
    ),
    Fact(("generate", "serve"), "cannot generate", "it classifies tokens", CLASSIFIERS),
)  # fmt: skip


# Families whose forward fails in transformers itself, with the folder that it has written.
FAILS_UPSTREAM = {
    ("deepseek_v4", "fp16"): "transformers keeps parts in float32 and gives them float16 inputs",
}


def try_cell(
    cell: Cell,
    folder_of: Callable[[str, str, str], Folder],
    run: Callable[[Folder], None] | None = None,
) -> str:
    """Run a cell, or ``run`` in its place: empty where it is right, or why it is refused.

    Raises AssertionError for a wrong number, a refusal without a fact, and a fact that is none.
    """
    upstream = FAILS_UPSTREAM.get((cell.family, cell.dtype))
    if upstream:
        with pytest.raises(RuntimeError, match="same dtype"):
            _ = folder_of(cell.family, cell.dtype, "stock").read
        return upstream
    facts = [fact for fact in FACTS if fact.holds(cell) and not fact.past]
    try:
        (run or COMMANDS[cell.command])(folder_of(cell.family, cell.dtype, cell.kind))
    except (RefusedError, ValueError) as error:
        for fact in facts:
            if fact.said in str(error):
                return fact.why
        raise AssertionError(f"refused without a fact: {error}") from error
    assert not facts, f"not refused, though {facts[0].why}"
    return ""


def cover(families: Sequence[str] = OF_EACH_CONTRACT) -> list[Cell]:
    """Cells with each pair of a family, a dtype, a kind and a command; each command a family."""
    kinds, dtypes = [kind for kind in KINDS if kind != "own"], tuple(DTYPES)
    found = []
    for row, family in enumerate(families):
        runs = [dtype for dtype in dtypes if (family, dtype) not in FAILS_UPSTREAM]
        for column, kind in enumerate(kinds):
            dtype = dtypes[(row + column) % 3]
            dtype = dtype if dtype in runs else runs[column % len(runs)]
            found += [
                Cell(family, dtype, kind, command)
                for number, command in enumerate(COMMANDS)
                if (number + row) % len(kinds) == column
            ]
    found += [Cell(*pair, "stock", "load") for pair in FAILS_UPSTREAM]
    numbered = enumerate(COMMANDS)
    owns = [Cell("olmoe", dtypes[number % 3], "own", command) for number, command in numbered]
    return [*found, *sorted(owns, key=lambda cell: cell.dtype)]
