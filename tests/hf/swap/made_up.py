"""Two families that no table has, as folders that bring their code.

``plum`` routes as DeepSeek-V3 does; ``quince`` scales its scores before it normalizes them, which
its default scale of 1 hides.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.hf.family_sizes import TINY

_CODE = """
import torch
from torch import nn
from torch.nn import functional as F
from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel
from transformers.utils.output_capturing import OutputRecorder


class {name}Config(MixtralConfig):
    model_type = "{type}"
    routed_scaling_factor: float = 1.0
    n_group: int = 2
    topk_group: int = 1
    norm_topk_prob: bool = True


class {name}Router(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.experts = config.num_local_experts
        self.width = config.hidden_size
        self.routed_scaling_factor = config.routed_scaling_factor
        self.num_group = config.n_group
        self.topk_group = config.topk_group
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.zeros(self.experts, self.width))
        self.register_buffer("e_score_correction_bias", torch.zeros(self.experts))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states.reshape(-1, self.width).float(), self.weight.float())
        scores = logits.sigmoid()
        ranked = (scores + self.e_score_correction_bias).view(len(scores), self.num_group, -1)
        best = ranked.topk(2, dim=-1).values.sum(dim=-1).topk(self.topk_group, dim=-1).indices
        left = torch.zeros(ranked.shape[:2], dtype=torch.bool).scatter(1, best, True)
        ranked = ranked.masked_fill(~left.unsqueeze(-1), float("-inf")).flatten(1)
        indices = ranked.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, indices){before}
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights{after}, indices


class {name}Model(MixtralModel):
    config_class = {name}Config
    _can_record_outputs = {{"router_logits": OutputRecorder({name}Router, index=0)}}

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.gate = {name}Router(config)


class {name}ForCausalLM(MixtralForCausalLM):
    config_class = {name}Config

    def __init__(self, config):
        super().__init__(config)
        self.model = {name}Model(config)
        self.post_init()
"""
_SCALE = " * self.routed_scaling_factor"
TYPES = ("plum", "quince")


def write_folder(folder: Path, model_type: str, tokenizer: Any, **settings: Any) -> Path:
    """A folder with code, a configuration, random weights and a tokenizer, which ``folder`` is."""
    name = model_type.capitalize()
    before = _SCALE if model_type == "quince" else ""
    values = {"name": name, "type": model_type, "before": before, "after": _SCALE}
    values["after"] = "" if before else _SCALE
    folder.mkdir(parents=True)
    (folder / f"modeling_{model_type}.py").write_text(_CODE.format(**values))
    config = {
        **TINY,
        "vocab_size": len(tokenizer),
        "num_local_experts": 8,
        "head_dim": 8,
        "model_type": model_type,
        "architectures": [f"{name}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"modeling_{model_type}.{name}Config",
            "AutoModelForCausalLM": f"modeling_{model_type}.{name}ForCausalLM",
        },
        **settings,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(open_config(folder), trust_remote_code=True)
        for key, tensor in model.state_dict().items():
            if "gate." in key:
                tensor.normal_(0, 0.3)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def open_config(folder: Path) -> Any:
    """The configuration in a folder, by its own code."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=True)
