"""Small models of a family: trained on our pages, swapped, fitted, exported, with adapters.

Each is made once; a folder that is there is taken as it is.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import l2r
from l2r.fitting.fit_options import FitOptions
from l2r.hf.checkpoints import load_causal_lm
from tests.hf.family_sizes import OWN_SIZES

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("data", "evaluation", "inspect", "scale", "swap", "vision")
VOCABULARY, LENGTH, BATCH = 256, 128, 8  # bytes
HEADS = 32  # features a head, for vLLM on a CPU
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_E, _L = {"num_experts": 8}, {"num_local_experts": 8}
_HEAD = {"head_dim": HEADS}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_MLA = {  # the one size of DeepSeek's attention that vLLM has on a CPU
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
}
_GRANITE = {
    **_L,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": HEADS**-0.5,
}
_EXAONE = {
    **_DEEPSEEK,
    **_E,
    **_HEAD,
    "num_shared_experts": 1,
    "layer_types": ["full_attention"] * 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_HYBRID = {**_GRANITE, "shared_intermediate_size": 64, "layer_types": ["attention"] * 3}
# By the name of a row: model type, and what differs from ``COMMON``.
SIZES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "mixtral": ("mixtral", _L),
    "qwen3_moe": ("qwen3_moe", {**_E, **_HEAD, "norm_topk_prob": True}),
    "qwen3_moe, not normalized": ("qwen3_moe", {**_E, **_HEAD, "norm_topk_prob": False}),
    "qwen2_moe": ("qwen2_moe", {**_E, "shared_expert_intermediate_size": 64}),
    "olmoe": ("olmoe", {**_E, "norm_topk_prob": False}),
    "olmoe, normalized": ("olmoe", {**_E, "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {**_DEEPSEEK, **_HEAD}),
    "gpt_oss": ("gpt_oss", {**_L, **_HEAD, "sliding_window": 32}),
    "granitemoe": ("granitemoe", _GRANITE),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, "shared_intermediate_size": 64}),
    "deepseek_v3": ("deepseek_v3", {**_DEEPSEEK, **_MLA}),
    "deepseek_v2": (
        "deepseek_v2",
        {**_DEEPSEEK, **_MLA, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "dots1": ("dots1", {**_DEEPSEEK, **_HEAD}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "exaone_moe": ("exaone_moe", _EXAONE),
    "glm4_moe_lite": ("glm4_moe_lite", {**_DEEPSEEK, **_MLA}),
    "granitemoehybrid": ("granitemoehybrid", _HYBRID),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**_E, **_HEAD, "moe_topk": 2}),
    "phimoe": ("phimoe", {**_L, "attention_bias": True, "lm_head_bias": True}),
    "cohere2_moe": ("cohere2_moe", {**_E, **_HEAD, "layer_types": ["full_attention"] * 3}),
    "flex_olmo": ("flex_olmo", _E),
    "minimax_m2": ("minimax_m2", {**_L, **_HEAD, "rotary_dim": HEADS}),
    "lfm2_moe": (
        "lfm2_moe",
        {**_E, "num_dense_layers": 1, "norm_topk_prob": True, "use_expert_bias": True,
         "layer_types": ["full_attention"] * 3},
    ),
    "afmoe": (
        "afmoe",
        {**_E, **_HEAD, "num_dense_layers": 1, "num_shared_experts": 1,
         "layer_types": ["full_attention"] * 3},
    ),
    "hy_v3": ("hy_v3", {**_E, **_HEAD, "first_k_dense_replace": 1, "num_shared_experts": 1}),
    "laguna": ("laguna", {**_E, **_HEAD, "shared_expert_intermediate_size": 64}),
    "mellum": ("mellum", {**_E, **_HEAD, "sliding_window": 32, "num_nextn_predict_layers": 0}),
    "solar_open": ("solar_open", {**_DEEPSEEK, **_HEAD}),
    "minimax": ("minimax", {**_L, **_HEAD, "block_size": 32}),
}  # fmt: skip

# Others, in the sizes of our tests with heads for vLLM.
_WIDE = ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_INDEX = {"index_head_dim": 128}  # not less than the part of a head that turns
_WORDS = {"unpadded_vocab_size": VOCABULARY, "swa_head_dim": HEADS}
_FITTING: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v32": _INDEX,
    "glm_moe_dsa": _INDEX,
    "hy_v4": _INDEX,
    "axk2": _INDEX,
    "dots3_note_text": _INDEX,
    # two attentions a layer
    "longcat_flash": {"head_dim": _MLA["qk_rope_head_dim"], "num_hidden_layers": 4},
    "deepseek_v4": {"num_hidden_layers": 4},
    "qwen4_exp_text": {"indexer_head_dim": HEADS},
    "inkling2_text": _WORDS,
    "inkling2_loop_text": _WORDS,
}
for _name in (
    "qwen3_next", "qwen3_5_moe_text", "jamba", "nemotron_h", "deepseek_v32", "glm_moe_dsa",
    "mimo_v2_flash", "kimi_linear", "hy_v4", "axk1", "axk2", "longcat_flash", "granitemoe_swa",
    "deepseek_v4", "aria_text", "qwen4_exp_text", "bailing_hybrid", "beam", "dots3_note_text",
    "flint", "inkling2_text", "inkling2_loop_text", "kolibri1", "lara_mini", "minimax_m3_vl_text",
):  # fmt: skip
    _own = dict(OWN_SIZES[_name])
    _layers = len(_own.get("layer_types") or _own.get("layers_block_type") or [0, 0])
    _own |= {key: HEADS for key in _WIDE if key in _own} | {"num_hidden_layers": _layers}
    _own |= _MLA if "kv_lora_rank" in _own else {}
    SIZES[_name] = (_name, {**_own, **_FITTING.get(_name, {})})


def text_ids() -> Tensor:
    """So little of our pages, as bytes, that it is learned: answers differ, far from ties."""
    pages = [(DOCS / f"{name}.md").read_text(encoding="utf-8")[:3000] for name in PAGES]
    return torch.tensor(list("".join(pages).encode("ascii", errors="ignore")))


def batches(count: int, seed: int) -> list[Tensor]:
    """Batches of ids [BATCH, LENGTH] from drawn places of the text."""
    ids, draw = text_ids(), torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - LENGTH, (count, BATCH), generator=draw)
    return [torch.stack([ids[s : s + LENGTH] for s in row.tolist()]) for row in starts]


def prompts(count: int = 16) -> list[list[int]]:
    """Prompts of 20 to 50 bytes of the text."""
    ids = text_ids().tolist()
    return [ids[n * 1000 : n * 1000 + 20 + 2 * n] for n in range(count)]


def make(name: str, out: Path, steps: int) -> dict[str, Any]:
    """Folders ``stock``, ``swapped``, ``lora`` and ``lora-routers`` of a row.

    With ``steps`` 0 nothing is trained or fitted, and there are no adapters.
    Returns losses a token: of the stock model, with its routers
    swapped and not fitted, fitted, and fitted with the experts of each token drawn.
    """
    kind, changes = SIZES[name]
    torch.manual_seed(0)
    known = {**COMMON, **changes}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **known)).float()
    _enlarge(model, "experts" if steps else "")
    if steps:
        _train(model, steps)
    _spread_biases(model)
    model.eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(out / "stock")
    losses = {"stock": _loss(model)}
    l2r.swap_routers(model)
    losses["swapped"] = _loss(model)
    if steps:
        l2r.fit_routers(
            model, batches(10, seed=2), held_out=batches(2, seed=6), options=FitOptions(updates=100)
        )
    losses["fitted"] = _loss(model)
    losses["other experts"] = _loss_with_drawn_experts(model)
    model.save_pretrained(out / "swapped")
    if steps:
        _adapters(out)
    return losses


def _train(model: Any, steps: int) -> None:
    """Train all weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 10))
    model.train()
    for ids in batches(steps, seed=1):
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def _enlarge(model: Any, part: str) -> None:
    """Matrices that matter from the start on: of experts, or all of a model that is not trained."""
    for path, weight in model.named_parameters():
        if part in path and weight.ndim > 1:
            weight.mul_(2 if part else 4)


@torch.no_grad()
def _spread_biases(model: Any) -> None:
    """Selection biases that change choices, and experts by token: training leaves them at 0."""
    draw = torch.Generator().manual_seed(3)
    for path, value in [*model.named_buffers(), *model.named_parameters()]:
        if path.endswith(("correction_bias", "expert_bias")):
            value.copy_(torch.rand(value.shape, generator=draw) / 10)
        if path.endswith("tid2eid"):  # DeepSeek-V4's experts by token
            order = torch.rand(len(value), 8, generator=draw).argsort(1)
            value.copy_(order[:, : value.shape[1]])


@torch.no_grad()
def _loss(model: Any) -> float:
    losses = [model(input_ids=ids, labels=ids).loss for ids in batches(4, seed=7)]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def _loss_with_drawn_experts(model: Any) -> float:
    """The loss where other experts take the tokens: how much they matter."""
    from l2r.hf.swap import find_sites

    draw = torch.Generator().manual_seed(4)

    def shuffled(module: Any, args: Any, output: Any) -> Any:
        logits, weights, indices = output
        order = torch.rand(logits.shape, generator=draw).argsort(-1)
        return logits, weights, order[:, : indices.shape[1]]

    hooks = [site.router.register_forward_hook(shuffled) for site in find_sites(model)]
    try:
        return _loss(model)
    finally:
        for hook in hooks:
            hook.remove()


def _adapters(out: Path) -> None:
    """One adapter of the attention, and one that holds routers too, both drawn, not trained."""
    for name, gates in (("lora", ()), ("lora-routers", ("gate", "router"))):
        model, _ = load_causal_lm(out / "swapped")
        torch.manual_seed(5)
        linear = sorted(
            {path.rpartition(".")[2] for path, part in model.named_modules()
             if isinstance(part, torch.nn.Linear) and "attn" in path and path[-5:] == "_proj"}
        )  # fmt: skip
        found = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        saved = [part for part in gates if part in found] or None
        config = LoraConfig(
            r=8, lora_alpha=16, target_modules=linear, modules_to_save=saved,
            init_lora_weights=False, task_type="CAUSAL_LM",
        )  # fmt: skip
        adapted = get_peft_model(model, config)
        with torch.no_grad():  # some tokens become others, and none far from what was learned
            for path, weight in adapted.named_parameters():
                if "lora_B" in path:
                    weight.mul_(0.2)
                if "modules_to_save" in path:
                    weight.add_(torch.randn_like(weight) * 0.1)
        adapted.save_pretrained(out / name)


def names_of(rows: Sequence[str]) -> list[str]:
    """Names of rows. Raises ValueError for one that is not in ``SIZES``."""
    for row in rows:
        if row not in SIZES:
            raise ValueError(f"family must be one of {', '.join(SIZES)}; got {row!r}")
    return list(rows) or list(SIZES)
