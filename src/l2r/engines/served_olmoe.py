"""What serving engines that have an OLMoE need to run ours: its router as their gate."""

from typing import Any

from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers import Router, RouterConfig, build_router
from l2r.routers.selection_rule import Selection

# Fields that those engines have as constants.
_CONSTANTS = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "clip_qkv": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


class LogitsGate(nn.Module):
    """Hidden states [T, D] -> (logits [T, N], None), as the engines' linear layers return.

    The router computes in float32 whatever the dtype of the model; experts are chosen from its
    logits by the engine's own softmax top-k.
    """

    def __init__(self, router: Router) -> None:
        super().__init__()
        self.router = router.float()

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
        return self.router.logits(hidden_states), None


def gate_of(config: Any) -> LogitsGate:
    """The gate of one layer of an L2rOlmoeConfig.

    Raises ValueError for a model that the engines' own OLMoE would compute otherwise.
    """
    for name, value in _CONSTANTS.items():
        actual = getattr(config, name, value)
        if actual != value:
            raise InputError(
                f"{name} must be {value} in the engine's own OLMoE; got {name}={actual}; serve the "
                "exported folder with the engine's Transformers backend"
            )
    router = build_router(
        RouterConfig.from_dict(config.router),
        hidden_size=config.hidden_size,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
    )
    if router.selection != Selection():
        raise InputError(
            "the engine's own OLMoE weighs experts by their softmax as it is; this "
            f"{config.router['kind']} has {router.selection}; serve the exported folder with the "
            "engine's Transformers backend"
        )
    return LogitsGate(router)


# Where a router's parameters stand in a checkpoint, and in a model with a LogitsGate.
RENAMED = (".mlp.gate.", ".mlp.gate.router.")
