"""Router saturation: when in training the routing became what it is at the end (OLMoE, 5.1)."""

from collections.abc import Mapping, Sequence
from typing import Any

from l2r.analysis.diagnostics.choice_log import Experts
from l2r.errors import InputError
from l2r.runs.diagnosis import Diagnosis, same_tokens
from l2r.stats.agreement import Overlap, overlap, overlap_by_chance


def saturation(
    earlier: Mapping[Any, Sequence[Experts]], last: Sequence[Experts]
) -> dict[str, list[Any]]:
    """Overlap of each checkpoint's choices, by its name, with those of the last, by layer.

    top1, topk [checkpoints][layers], and top1_by_chance, topk_by_chance [layers]: of the last
    with itself in other documents. Raises ValueError for choices of other tokens.
    """
    for name, layers in earlier.items():
        if [layer.shape for layer in layers] != [layer.shape for layer in last]:
            raise InputError(
                f"checkpoints over time must be of one model on the same tokens; {name} differs "
                "from the last in layers, experts per token or data"
            )
    found = [
        [overlap(*pair) for pair in zip(layers, last, strict=True)] for layers in earlier.values()
    ]
    chance = [overlap_by_chance(layer, layer) for layer in last]
    result: dict[str, list[Any]] = {"checkpoints": list(earlier)}
    for side, name in enumerate(Overlap._fields):
        result[name] = [[layer[side] for layer in layers] for layers in found]
        if None not in chance:
            result[f"{name}_by_chance"] = [layer[side] for layer in chance if layer is not None]
    return result


def saturation_of_diagnoses(views: Mapping[str, Diagnosis]) -> dict[str, list[Any]]:
    """Saturation over diagnosed checkpoints, by name, against the last of them.

    Raises ValueError where they did not read the same tokens.
    """
    *_, last = views.values()
    other = [name for name, view in views.items() if not same_tokens(view, last)]
    if other:
        raise InputError(f"over-time needs checkpoints that read the same tokens; not {other[0]}")
    experts = {name: view.by_layer("experts") for name, view in views.items()}
    return saturation(experts, last.by_layer("experts"))
