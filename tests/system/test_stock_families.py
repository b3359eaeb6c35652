"""Stock checkpoints of every family in half precision, by each command that opens one.

What commands say is compared with transformers' own forward, worked out here from nothing of
l2r.analysis.
"""

import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from l2r import load_pretrained, record
from l2r.hf.swap.families import FAMILIES
from l2r.runs.diagnosis import read_diagnosis
from tests.hf.families import FAULTS, LOOPED, tiny_model

pytestmark = pytest.mark.usefixtures("coarse", "unchecked")

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "fox", "by", "day")
ROWS, LENGTH = 8, 16
READ = ("--instances", ROWS, "--length", LENGTH, "--device", "cpu")
# Whose page is drawn, which takes longer than all else: with certificates, without for groups and
# a bias, for a bias of the block, and of layers of two kinds.
DRAWN = ("olmoe", "deepseek_v3", "afmoe", "jamba")
# A softmax, renormalized, renormalized over the k alone, a sparse mixer, a bias added to softmax or
# to sigmoids in groups, a bias of the block, layers of two kinds, a choice by token id, a wrapper.
OF_EACH_CONTRACT = (
    "olmoe", "mixtral", "gpt_oss", "phimoe", "ernie4_5_moe", "deepseek_v3", "afmoe", "jamba",
    "deepseek_v4", "qwen3_vl_moe",
)  # fmt: skip
# Families whose routers multiply what they get by their weights as they are, without a conversion.
SAME_DTYPE = (
    "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "qwen3_next", "mellum", "jamba", "mixtral",
    "minimax", "qwen3_5_moe_text", "gpt_oss", "granitemoe", "granitemoeshared", "granitemoehybrid",
    "cohere2_moe", "phimoe", "laguna", "lfm2_moe", "afmoe", "qwen4_exp_text",
    "qwen3_omni_moe_thinker", "qwen3_vl_moe", "aria_text", "granitemoe_swa", "mistral4",
    "deepseek_v4",
)  # fmt: skip
# Stock models whose forward raises in float16: some of its tensors stay in float32.
NO_FP16 = ("deepseek_v4",)
BY_TOKEN = ("DeepseekV4HashRouter",)
NONE_KNOWN = {
    "phimoe": "the rule of SparseMixer",
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


class Call(NamedTuple):
    """One call of a router: what its block passed, and what it returned."""

    router: nn.Module
    x: Tensor
    more: tuple[Tensor, ...]
    logits: Tensor
    weights: Tensor
    chosen: Tensor

    def first(self):
        return self.chosen.gather(1, self.weights.argmax(dim=1, keepdim=True))[:, 0]

    def sets(self):
        return self.chosen.sort(dim=1).values


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A tokenizer of 60 entries, a file of words, a sentence, and the file's tokens in rows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    order = torch.randint(len(WORDS), (300,), generator=torch.Generator().manual_seed(0))
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(WORDS[n] for n in order.tolist()))
    rows = torch.tensor(tokenizer(file.read_text())["input_ids"])[: ROWS * LENGTH]
    sentence = "the dog sat on the cat and a fox ran"
    return SimpleNamespace(
        tokenizer=tokenizer, file=file, sentence=sentence, rows=rows.view(ROWS, LENGTH)
    )


@pytest.fixture(
    scope="module",
    params=[
        *((family, torch.bfloat16) for family in OF_EACH_CONTRACT),
        *(
            pytest.param((family, torch.bfloat16), marks=pytest.mark.slow("every family"))
            for family in FAMILIES
            if family not in OF_EACH_CONTRACT
        ),
        *(  # other families in float16: make cells
            pytest.param((family, torch.float16), marks=pytest.mark.slow("another dtype"))
            for family in OF_EACH_CONTRACT
            if family not in NO_FP16
        ),
    ],
    ids=lambda case: "-".join(map(str, case)).replace("torch.", ""),
)
def stock(request, text, tmp_path_factory):
    """A family's name, its checkpoint, and what transformers reads from it."""
    family, dtype = request.param
    folder = tmp_path_factory.mktemp(family)
    tiny_model(FAMILIES[family]).to(dtype).save_pretrained(folder)
    text.tokenizer.save_pretrained(folder)
    return SimpleNamespace(family=family, dtype=dtype, folder=folder, model=opened(folder, "auto"))


@pytest.fixture
def routed(stock):
    """The same, of families with one route of each token in each layer."""
    if stock.family in LOOPED:
        pytest.skip("test_layers_in_a_loop_are_counted_and_have_no_routes")
    return stock


def opened(folder, dtype):
    """By the class that wrote it."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()


def routers_of(family, model):
    kinds = (FAMILIES[family].router, *BY_TOKEN)
    return {
        path: part
        for path, part in model.named_modules()
        if type(part).__name__ in kinds and "vision_moe" not in path
    }


@torch.no_grad()
def forward(family, model, ids):
    """Logits [B, S, V] and the calls of all routers."""
    calls, hooks = [], []
    for router in routers_of(family, model).values():

        def keep(module, args, named, output):
            x, *more = (*args, *named.values())
            calls.append(Call(module, x, tuple(more), *output))

        hooks.append(router.register_forward_hook(keep, with_kwargs=True))
    logits = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits.float(), calls


def plain_numbers(call):
    """Margins, loads and directions of one router's tokens, in float64."""
    logits, weights, chosen = call.logits.double(), call.weights.double(), call.chosen
    x = call.x.double().flatten(0, -2)
    best = logits.topk(2).values
    margin, spread = best[:, 0] - best[:, 1], logits.std(dim=1, unbiased=False)
    count = logits.shape[1]
    load = torch.bincount(chosen.flatten(), minlength=count).double()
    importance = torch.zeros(count).double().scatter_add(0, chosen.flatten(), weights.flatten())

    def entropy(part):
        share = part / part.sum()
        return -(share * share.clamp_min(1e-300).log()).sum() / math.log(count)

    units = x / x.norm(dim=1, keepdim=True)
    cosines = (units @ units.T)[~torch.eye(len(x), dtype=torch.bool)]
    return {
        "mean_margin": margin.mean(),
        "low_margin_rate": (margin < 0.2).double().mean(),
        "scale_free_margin": (margin / spread).mean(),
        "logit_spread": spread.mean(),
        "entropy": entropy(load),
        "cv": load.std(unbiased=False) / load.mean(),
        "max_over_mean": load.max() / load.mean(),
        "min_over_mean": load.min() / load.mean(),
        "dead_experts": (load == 0).sum(),
        "importance_entropy": entropy(importance),
        "importance_cv": importance.std(unbiased=False) / importance.mean(),
        "first_experts": len(call.first().unique()),
        "weight_sum": weights.sum(dim=1).mean(),
        "cosine_variance": cosines.var(unbiased=False),
    }


@torch.no_grad()
def under_noise(call, sigma=0.02, repeats=5):
    """Shares of tokens with the same first expert, and of experts in both sets, by Jaccard."""
    # a sample of all tokens, in the order of their keys
    keys = torch.rand(len(call.logits), dtype=torch.float64, generator=seeded())
    x = call.x.reshape(len(keys), -1)[keys.argsort()]
    x = x[None] if call.x.dim() == 3 else x
    noise = seeded()
    _, weights, chosen = call.router(x, *call.more)
    same, overlap = [], []
    for _ in range(repeats):
        moved = x + sigma * torch.randn(x.shape, generator=noise).to(x.dtype)
        _, other_weights, other = call.router(moved, *call.more)
        firsts = [
            c.gather(1, w.argmax(dim=1, keepdim=True))
            for w, c in ((weights, chosen), (other_weights, other))
        ]
        same.append((firsts[0] == firsts[1]).double().mean())
        both = [len({*a} & {*b}) for a, b in zip(chosen.tolist(), other.tolist(), strict=True)]
        k = chosen.shape[1]
        overlap.append(sum(n / (2 * k - n) for n in both) / len(both))
    return {"stability": torch.stack(same).mean(), "topk_overlap": sum(overlap) / repeats}


def seeded():
    return torch.Generator().manual_seed(0)


@torch.no_grad()
def assert_certified(call, arrays, layer):
    """No radius is above the distance to the nearest tie, and none is broken by the router."""
    keys = torch.rand(len(call.logits), dtype=torch.float64, generator=seeded())
    radii = [torch.from_numpy(arrays[f"{layer}.certified_{name}"]) for name in ("top1", "topk")]
    x = call.x.reshape(len(keys), -1)[keys.argsort()][: len(radii[0])]
    matrix = next(p for p in call.router.parameters() if p.dim() == 2).double()
    bias = getattr(call.router, "bias", None)
    logits = x.double() @ matrix.T + (0 if bias is None else bias.double())
    _, weights, chosen = call.router(x)
    first = chosen.gather(1, weights.argmax(dim=1, keepdim=True))
    for radius, kept in zip(radii, (first, chosen), strict=True):
        for token, (within, experts) in enumerate(zip(radius, kept.tolist(), strict=True)):
            others = [n for n in range(len(matrix)) if n not in experts]
            ties = [
                (logits[token, i] - logits[token, j]) / (matrix[i] - matrix[j]).norm()
                for i in experts
                for j in others
            ]
            assert 0 <= within <= max(0.0, float(min(ties)))
    generator = seeded()
    for _ in range(20):
        way = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        for radius, kept in zip(radii, (first, chosen), strict=True):
            point = (x.double() + radius[:, None] * way / way.norm(dim=1, keepdim=True)).to(x.dtype)
            inside = (point.double() - x.double()).norm(dim=1) <= radius
            _, w, c = call.router(torch.where(inside[:, None], point, x))
            now = c.gather(1, w.argmax(dim=1, keepdim=True)) if kept is first else c
            assert torch.equal(now.sort(dim=1).values, kept.sort(dim=1).values)


def test_check_finds_no_fault(l2r, stock, text):
    code, out, err = l2r("check", stock.folder, "--data", text.file, *READ, "--json")
    assert code == (stock.family in FAULTS), out + err
    found = json.loads(out)
    faults = {f["check"] for f in found if f["status"] == "fault"}
    assert len(found) > 10 and faults == FAULTS.get(stock.family, set())


def test_layers_in_a_loop_are_counted_and_have_no_routes(l2r, text, tmp_path):
    """Loads count every pass; what needs one route of each token says why it has none."""
    folder = tmp_path / "looped"
    tiny_model(FAMILIES[LOOPED[0]]).to(torch.bfloat16).save_pretrained(folder)
    text.tokenizer.save_pretrained(folder)
    for command in (
        ("diagnose", folder, "--data", text.file, *READ, "--out", tmp_path / "a"),
        ("diagnose", folder, "--text", text.sentence, "--out", tmp_path / "b", "--device", "cpu"),
        ("mismatch", folder, "--data", text.file, *READ, "--against", "bf16", "--out", tmp_path),
    ):
        assert "was called twice in a call" in l2r(*command).refusal()
    options = ("--certify", 0, "--text-tokens", 0, "--out", tmp_path / "c")
    code, _, err = l2r("diagnose", folder, "--data", text.file, *READ, *options)
    assert code == 0, err
    _, calls = forward(LOOPED[0], opened(folder, "auto"), text.rows)
    layers = read_diagnosis(tmp_path / "c" / "looped").layers
    passes = [sum(c.router is r for c in calls) for r in dict.fromkeys(c.router for c in calls)]
    assert passes == [1, 2, 1] and len(layers) == 3


def test_diagnosis_of_data_says_what_transformers_does(l2r, routed, text, tmp_path, monkeypatch):
    if routed.family not in DRAWN:
        monkeypatch.setattr("l2r.report.diagnosis.write_diagnosis", lambda *given, **named: None)
    options = ("--certify", 3, "--gain", ROWS, "--text-tokens", LENGTH, "--out", tmp_path)
    code, _, err = l2r("diagnose", routed.folder, "--data", text.file, *READ, *options)
    assert code == 0, err
    assert (tmp_path / "index.html").is_file() == (routed.family in DRAWN)
    got = read_diagnosis(tmp_path / routed.folder.name)
    logits, calls = forward(routed.family, routed.model, text.rows)
    assert len(got.layers) == len(calls)
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), text.rows[:, 1:].flatten())
    assert got.info["model"]["cross_entropy"] == pytest.approx(float(loss), rel=1e-5)
    for layer, (call, said) in enumerate(zip(calls, got.layers, strict=True)):
        by_token = type(call.router).__name__ in BY_TOKEN
        assert ("stability" in said) != by_token
        noisy = {} if by_token else under_noise(call)
        for name, value in {**plain_numbers(call), **noisy}.items():
            assert said[name] == pytest.approx(float(value), rel=1e-9, abs=1e-12), name
        tokens, load = len(call.chosen), torch.bincount(call.chosen.flatten(), minlength=8)
        assert np.allclose(got.array(layer, "topk") * tokens, load)
        order = call.weights.argsort(dim=1, descending=True, stable=True)
        heaviest = call.chosen.gather(1, order).view(ROWS, LENGTH, -1)
        assert (got.array(layer, "experts") == heaviest.numpy()).all()
        if routed.family in NONE_KNOWN:
            name = type(call.router).__name__
            why = f"its logits and {NONE_KNOWN[routed.family]}"
            why = "the ids of tokens" if name in BY_TOKEN else why
            assert said["certificate"] == f"{name} chooses by {why}; no certificate is known"
        else:
            assert_certified(call, got.arrays, layer)
            assert said["certified_top1"] > 0 and said["found_topk"] >= said["certified_topk"]


def test_diagnosis_of_a_sentence_has_the_experts_of_every_token(l2r, routed, text, tmp_path):
    more = ("--text", text.sentence, "--out", tmp_path, "--json", "--device", "cpu")
    code, out, err = l2r("diagnose", routed.folder, *more)
    assert code == 0, err
    (said,) = json.loads(out).values()
    _, calls = forward(
        routed.family, routed.model, torch.tensor([text.tokenizer(text.sentence)["input_ids"]])
    )
    assert "".join(token["token"] for token in said).strip() == text.sentence
    for layer, call in enumerate(calls):
        weights, order = call.weights.float().sort(dim=1, descending=True, stable=True)
        assert [token["experts"][layer] for token in said] == call.chosen.gather(1, order).tolist()
        assert [token["weights"][layer] for token in said] == weights.tolist()


@pytest.mark.parametrize(
    ("against", "dtype"),
    [
        ("bf16", "float32"),
        ("int8", "auto"),
        pytest.param("bf16", "auto", marks=pytest.mark.slow("every family")),
        pytest.param("int8", "float32", marks=pytest.mark.slow("every family")),
    ],
)
def test_mismatch_counts_what_changes_in_the_other_arithmetic(
    l2r, routed, text, tmp_path, against, dtype
):
    options = ("--against", against, "--dtype", dtype, "--out", tmp_path, "--json")
    code, out, err = l2r("mismatch", routed.folder, "--data", text.file, *READ, *options)
    assert code == 0, err
    said = json.loads(out)
    model = opened(routed.folder, dtype)
    other = opened(routed.folder, torch.bfloat16 if against == "bf16" else dtype)
    if against == "bf16":
        with_routers_of(routed.family, model, other)
    else:
        round_to_int8(routed.family, other)
    (one, calls), (two, others) = (forward(routed.family, m, text.rows) for m in (model, other))
    changed = torch.stack(
        [(a.sets() != b.sets()).any(dim=1) for a, b in zip(calls, others, strict=True)]
    )
    assert said["decisions_changed"] == pytest.approx(float(changed.double().mean()))
    assert said["tokens_changed"] == pytest.approx(float(changed.any(dim=0).double().mean()))
    assert said["certified_changed"] == 0
    assert (said["certified"] is None) == (routed.family in NONE_KNOWN)
    first, second = (logits.double().log_softmax(dim=-1) for logits in (one, two))
    kl = (first.exp() * (first - second)).sum(dim=-1).mean()
    assert said["log_probability"]["own"]["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-7)
    if (against, dtype, routed.dtype) == ("bf16", "auto", torch.bfloat16):
        assert said["decisions_changed"] == 0 and float(kl) == 0  # it is in bf16 already


def with_routers_of(family, model, other):
    """Give a model in bf16 the routers of another, and the biases that its blocks pass."""
    for path, router in routers_of(family, model).items():
        copy, block = other.get_submodule(path), path.rpartition(".")[0]
        dtype, plain = next(router.parameters()).dtype, copy.forward
        if family in SAME_DTYPE and dtype != torch.bfloat16:

            def in_own(x, *more, plain=plain, dtype=dtype):
                logits, weights, chosen = plain(x.to(dtype), *more)
                return logits, weights.to(x.dtype), chosen

            copy.forward = in_own
        copy.load_state_dict(router.state_dict(), assign=True)
        for name in ("e_score_correction_bias", "expert_bias"):
            given = getattr(model.get_submodule(block), name, None)
            if given is not None:
                getattr(other.get_submodule(block), name).data = given.data


def round_to_int8(family, model):
    """Linear layers and experts rounded to 255 steps of each output's largest weight."""
    skipped = (*routers_of(family, model), "lm_head")
    for path, part in model.named_modules():
        if path.startswith(skipped):
            continue
        inputs = -2 if getattr(part, "is_transposed", False) else -1
        weights = [part.weight] if isinstance(part, nn.Linear) else []
        if path.endswith("experts"):
            weights = [p for p in part.parameters(recurse=False) if p.dim() == 3]
        for weight in weights:
            step = weight.data.float().abs().amax(dim=inputs, keepdim=True).clamp_min(1e-30) / 127
            weight.data = ((weight.data.float() / step).round() * step).to(weight.dtype)


def test_record_has_the_experts_that_transformers_chooses(routed, text):
    model = load_pretrained(routed.folder, dtype="auto").eval()
    with torch.no_grad(), record(model) as recorder:
        model(input_ids=text.rows, use_cache=False)
    routes = recorder.routes()
    _, calls = forward(routed.family, routed.model, text.rows)
    assert routes.lengths.tolist() == [LENGTH] * ROWS
    for place, call in enumerate(calls):
        assert (np.sort(routes.experts[:, place]) == call.sets().numpy()).all()
