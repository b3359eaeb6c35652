"""Which models transformers' tests run on, beside which stock model, and what is left out."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

# The first family of each rule of src/l2r/hf/swap/rules.py that transformers has a causal language
# model of, and those that keep their routers or their experts in another way.
FAMILIES = (
    "olmoe",
    "mixtral",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "cohere2_moe",
    "phimoe",
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "laguna",
    "minimax_m2",
    "lfm2_moe",
    "afmoe",
    "hy_v3",
    "axk2",
    "beam",
    "deepseek_v4",
    "flint",
    "kolibri1",
    "longcat_flash",
)
SWAPPED = ("swapped", "captured")  # modes in which the routers are ours
_FEW = ("mixtral", "deepseek_v3", "gpt_oss")
# One that chooses by more than its logits, and those that keep routers or experts in other ways.
_MORE = ("olmoe", "granitemoe", "jamba", "phimoe", "longcat_flash", "kolibri1")
MODES: Mapping[str, tuple[str, ...]] = {
    "stock": FAMILIES,
    "swapped": FAMILIES,
    "recorded": _FEW,
    "replayed": _FEW,
    "captured": _FEW,
    "observed": (*_FEW, *_MORE),
}
FAMILY_CASES = [(mode, family) for family in FAMILIES for mode in MODES if family in MODES[mode]]
# Our class in hf_suites.py -> the stock class beside it; None for those themselves.
SUBJECTS: Mapping[str, str | None] = {
    "StockOlmoe": None,
    "L2rOlmoeLinear": "StockOlmoe",
    "L2rOlmoe": "StockOlmoe",
    "StockViT": None,
    "L2rViT": "StockViT",
    **{
        f"{mode.capitalize()}_{family}": None if mode == "stock" else f"Stock_{family}"
        for mode, family in FAMILY_CASES
    },
}
# Families of the slow test that runs in CI, and what is run on one of them only.
IN_CI = ("mixtral", "deepseek_v3", "gpt_oss")
CI_CASES = [
    *(f"{mode}_{family}" for family in IN_CI for mode in ("Stock", "Swapped")),
    "Recorded_mixtral",
    "Replayed_mixtral",
    "Observed_mixtral",
    "Observed_deepseek_v3",
]
# Seconds each, and nothing of them is a router's: a training to a small loss, dtypes by old names.
NOT_IN_CI = ("test_training_overfit", "test_bc_torch_dtype")


@dataclass(frozen=True)
class Excluded:
    """A test that subjects, by a pattern of their names, need not pass, and why."""

    subjects: str
    test: str
    reason: str


EXCLUDED = (
    Excluded(
        "(Swapped|Captured)_(phimoe|granitemoe|hy_v3)",
        "test_reverse_loading_mapping",
        "it wants a tensor for each renaming of the family, which renames the matrix of its own "
        "router too; a router of ours has none of that name",
    ),
    Excluded(
        "(Swapped|Captured)_.*",
        "test_can_init_all_missing_weights",
        "it wants the same numbers from building a model and from initializing it later; a swap "
        "draws its routers when the model is built, from a stream of their own, and missing ones "
        "are drawn anew from the same distribution (tests/hf/swap/test_initial_weights.py); all "
        "other tensors are equal",
    ),
    Excluded(
        "(Swapped|Captured)_(laguna|longcat_flash)",
        "test_keep_in_fp32_modules_strict_also_hardcode_fp32",
        "stock skips it, since it keeps nothing in float32; of a swapped model the whole router is "
        "kept, a selection bias that the family makes in the model's dtype included",
    ),
    Excluded(
        "(Swapped|Captured)_lfm2_moe",
        "test_keep_in_fp32_modules",
        "stock skips it, since it names nothing to keep in float32; its block makes the selection "
        "bias in float32 all the same, which the test does not expect beside names",
    ),
)


def excluded(subject: str) -> dict[str, str]:
    """Tests that a subject need not pass, with their reasons."""
    return {each.test: each.reason for each in EXCLUDED if re.fullmatch(each.subjects, subject)}
