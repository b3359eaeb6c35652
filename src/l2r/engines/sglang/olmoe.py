"""SGLang's OLMoE with a router of ours."""

from collections.abc import Iterable
from typing import Any

import sglang
from sglang.srt.models.olmoe import OlmoeForCausalLM
from torch import Tensor

from l2r.engines.served_olmoe import RENAMED, gate_of
from l2r.versions import check_version

check_version("sglang", sglang.__version__)  # SGLang prints what an import raises as one warning


class L2rOlmoeForCausalLM(OlmoeForCausalLM):
    """Named as in config.json's ``architectures``; its softmax top-k follows our logits."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for layer in self.model.layers:
            layer.mlp.gate = gate_of(config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Any:
        return super().load_weights((name.replace(*RENAMED), value) for name, value in weights)


EntryClass = L2rOlmoeForCausalLM
