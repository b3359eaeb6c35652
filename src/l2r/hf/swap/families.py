"""Model families whose routers can be replaced, and the selection each one keeps.

A family is recognized by the class name of its router, so that models built around the same
decoder (vision-language models, classifiers) are recognized too. Every router here returns
(logits [T, N], weights [T, K], indices [T, K]); selections are read from the router being replaced.

A new family is a line of TABLE, with a rule of rules.py, and its tiny sizes in
tests/hf/family_sizes.py; its tests then run, and ``make families`` writes it into docs/swap.md.
recognition.py looks at the routers of families that are not in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2r.hf.swap.rules import (
    afmoe,
    always_normalized,
    axk2,
    beam,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    deepseek_v4,
    deepseek_v4_hash,
    ernie,
    flint,
    hy_v3,
    kolibri1,
    laguna,
    lfm2,
    longcat_flash,
    minimax_m2,
    mistral4,
    mistral_large4,
    muse_spark,
    normalized_by_flag,
    openai_privacy_filter,
    phimoe,
)
from l2r.routers.observe import reads_text
from l2r.routers.selection_rule import Selection


@dataclass(frozen=True)
class Family:
    """A model family, by transformers' model type and the class name of its router.

    rule: function from an old router to its selection. weight: path of the router's [N, D] matrix.
    recorded: whether ``output_router_logits`` reads the router, and not the block around it.
    top_k: path of the number of experts per token. note: what was seen of a router that is in no
    table, in words.
    """

    model_type: str
    router: str
    rule: Callable[[Any], Selection]
    weight: str = "weight"
    recorded: bool = True
    top_k: str = "top_k"
    note: str = ""

    def selection(self, old: Any) -> Selection:
        """Return the selection of an old router of this family."""
        return replace(self.rule(old), family=self.model_type)


TABLE = (
    Family("olmoe", "OlmoeTopKRouter", normalized_by_flag),
    Family("flex_olmo", "FlexOlmoTopKRouter", normalized_by_flag),
    Family("qwen2_moe", "Qwen2MoeTopKRouter", normalized_by_flag),
    Family("qwen3_moe", "Qwen3MoeTopKRouter", normalized_by_flag),
    Family("qwen3_next", "Qwen3NextTopKRouter", normalized_by_flag),
    Family("mellum", "MellumTopKRouter", normalized_by_flag),
    Family("jamba", "JambaTopKRouter", normalized_by_flag),
    Family("mixtral", "MixtralTopKRouter", always_normalized),
    Family("minimax", "MiniMaxTopKRouter", always_normalized),
    Family("qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", always_normalized),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Gate", always_normalized, weight="wg.weight"),
    Family("gpt_oss", "GptOssTopKRouter", always_normalized),
    Family("granitemoe", "GraniteMoeTopKRouter", always_normalized),
    Family("granitemoeshared", "GraniteMoeSharedTopKRouter", always_normalized),
    Family("granitemoehybrid", "GraniteMoeHybridTopKRouter", always_normalized),
    Family("cohere2_moe", "Cohere2MoeTopKRouter", cohere2),
    Family("phimoe", "PhimoeTopKRouter", phimoe),
    Family("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", ernie),
    Family("deepseek_v2", "DeepseekV2TopkRouter", deepseek_v2),
    Family("deepseek_v3", "DeepseekV3TopkRouter", deepseek_v3),
    Family("deepseek_v32", "DeepseekV32TopkRouter", deepseek_v3),
    Family("glm4_moe", "Glm4MoeTopkRouter", deepseek_v3),
    Family("glm4_moe_lite", "Glm4MoeLiteTopkRouter", deepseek_v3),
    Family("dots1", "Dots1TopkRouter", deepseek_v3),
    Family("solar_open", "SolarOpenTopkRouter", deepseek_v3),
    Family("exaone_moe", "ExaoneMoeTopkRouter", deepseek_v3),
    Family("nemotron_h", "NemotronHTopkRouter", deepseek_v3),
    Family("laguna", "LagunaTopKRouter", laguna),
    Family("minimax_m2", "MiniMaxM2TopKRouter", minimax_m2),
    Family("lfm2_moe", "Lfm2MoeTopKRouter", lfm2),
    Family("afmoe", "AfmoeTokenChoiceRouter", afmoe, weight="gate.weight"),
    Family("hy_v3", "HYV3TopKRouter", hy_v3),
    Family("lara_mini", "LaraMiniTopKRouter", normalized_by_flag),
    Family("qwen4_exp_text", "Qwen4ExpTextTopKRouter", normalized_by_flag),
    Family("qwen3_omni_moe_thinker", "Qwen3OmniMoeThinkerTextTopKRouter", normalized_by_flag),
    Family("qwen3_vl_moe", "Qwen3VLMoeTextTopKRouter", always_normalized),
    Family("aria_text", "AriaTextTopKRouter", always_normalized),
    Family("granitemoe_swa", "GraniteMoeSWATopKRouter", always_normalized),
    Family("openai_privacy_filter", "OpenAIPrivacyFilterTopKRouter", openai_privacy_filter),
    Family("mistral4", "Mistral4TopkRouter", mistral4),
    Family("mistral_large4", "MistralLarge4TextTopkRouter", mistral_large4),
    Family("ernie4_5_vl_moe", "Ernie4_5_VLMoeMoeTopKRouter", ernie, recorded=False),
    Family("unlimited_ocr", "UnlimitedOcrTextTopkRouter", deepseek_v2),
    Family("deepseek_ocr2", "DeepseekOcr2TextTopkRouter", deepseek_v2),
    Family("deepseek_v4", "DeepseekV4TopKRouter", deepseek_v4),
    Family("glm_moe_dsa", "GlmMoeDsaTopkRouter", deepseek_v3),
    Family("glm5_next", "Glm5NextTextTopkRouter", deepseek_v3),
    Family("glm4v_moe", "Glm4vMoeTextTopkRouter", deepseek_v3),
    Family("kimi_linear", "KimiLinearTopkRouter", deepseek_v3),
    Family("hy_v4", "HYV4TopkRouter", deepseek_v3),
    Family("hy_v4_vl", "HYV4VLTopkRouter", deepseek_v3),
    Family("axk1", "AXK1TopkRouter", deepseek_v3),
    Family("axk2", "AXK2TopkRouter", axk2),
    Family("bailing_hybrid", "BailingHybridTopkRouter", deepseek_v3),
    Family("dots3_note_text", "Dots3NoteTextTopkRouter", deepseek_v3),
    Family("mimo_v2_flash", "MiMoV2FlashTopkRouter", deepseek_v3),
    Family("beam", "BeamTopKRouter", beam),
    Family("minimax_m3_vl_text", "MiniMaxM3VLTopKRouter", laguna),
    Family("step3p7", "Step3p7TopKRouter", laguna),
    Family("muse_spark", "MuseSparkTopkRouter", muse_spark),
    Family("flint", "FlintTopKRouter", flint),
    Family("kolibri1", "Kolibri1TopKRouter", kolibri1),
    Family("inkling2_text", "Inkling2TopKRouter", deepseek_v4),
    Family("inkling2_loop_text", "Inkling2LoopTopKRouter", deepseek_v4),
    Family("longcat_flash", "LongcatFlashTopkRouter", longcat_flash, "classifier.weight"),
)
# Routers that choose by token ids, not by logits: seen and recorded, never replaced.
_BY_TOKEN = (Family("deepseek_v4", "DeepseekV4HashRouter", deepseek_v4_hash),)

# Before these versions the router has another class, or returns its triple in another order.
_SINCE = dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), "5.21")
_SINCE["jamba"] = "5.20"
_TOO_NEW = {
    name: f"its router needs transformers >= {since}; this is {transformers.__version__}"
    for name, since in _SINCE.items()
    if Version(transformers.__version__) < Version(since)
}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in TABLE
    if family.model_type in CONFIG_MAPPING and family.model_type not in _TOO_NEW
}
FAMILY_OF_ROUTER: Mapping[str, Family] = {
    family.router: family for family in (*FAMILIES.values(), *_BY_TOKEN)
}

# What recognition.py found, by router; None for no router.
RECOGNIZED: WeakKeyDictionary[Any, Family | None] = WeakKeyDictionary()


def family_of(router: Any) -> Family | None:
    """Return the family whose rule a stock router follows; None for another module.

    In no table are those that ``find_sites`` has recognized before.
    """
    return FAMILY_OF_ROUTER.get(_class_name(router)) or RECOGNIZED.get(router)


def is_of_family(router: Any, path: str) -> bool:
    """Say whether a module at a path of its model is a text router of a family in the table."""
    return _class_name(router) in FAMILY_OF_ROUTER and reads_text(path)


def _class_name(router: Any) -> str:
    """Name of a router's class; FSDP2 gives what it shards a class of its own."""
    return type(router).__name__.removeprefix("FSDP")


_CAPACITY = "its router returns one-hot masks with expert capacity and drops tokens"
_OWN_SCALE = "its router owns a learned scale per expert and returns probabilities as logits"
_JOINT = "its router weighs the shared experts together with the chosen ones"
REFUSED: Mapping[str, str] = {
    **_TOO_NEW,
    "llama4": "it multiplies the expert inputs, not the outputs, by a score for every expert",
    "dbrx": "its router returns logits alone and the experts' module selects",
    "jetmoe": "its router also sorts tokens by expert, and routes attention heads",
    "switch_transformers": _CAPACITY,
    "nllb-moe": _CAPACITY,
    "zaya": "its router reads the previous layer's router state and has a skip expert",
    "gemma4": _OWN_SCALE,
    "diffusion_gemma": _OWN_SCALE,
    "inkling": _JOINT,
    "inkling_mm_model": _JOINT,
    "doge": "its experts are rows of embeddings, found by product keys inside the block",
    "vitpose_backbone": "the data set that an image is from, not a router, chooses its expert",
}
