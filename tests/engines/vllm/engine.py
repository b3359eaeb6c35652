"""Stand-ins for the parts of vLLM that the plug-in touches: layers, routers, registry, parser.

Written from vLLM 0.32's source; ``make serve-test`` runs the real one.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn


class LinearBase(nn.Module):
    def __init__(self, hidden, experts, return_bias=True):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, hidden))
        self.return_bias = return_bias

    def forward(self, x):
        logits = x @ self.weight.T
        return (logits, None) if self.return_bias else logits


class MoERunner(nn.Module):
    """Gives the weights and experts it chose, in place of the experts' output."""

    def __init__(self, prefix, router, gate, settings):
        super().__init__()
        self.layer_name, self.router, self.gate, self.settings = prefix, router, gate, settings

    def forward(self, hidden_states, router_logits):
        if self.gate is not None:
            router_logits, _ = self.gate(hidden_states)
        assert router_logits.dtype == self.settings["router_logits_dtype"]
        return self.router.select_experts(hidden_states=hidden_states, router_logits=router_logits)


class Chooses:
    """Softmax top-k; sigmoids or softmax in groups, with a bias there; or a given function."""

    def __init__(self, **settings):
        self.settings = settings

    def select_experts(self, hidden_states, router_logits):
        s = self.settings
        if s["use_grouped_topk"]:
            return self.grouped(router_logits)
        if s["custom_routing_function"] is not None:
            return s["custom_routing_function"](
                hidden_states=hidden_states,
                gating_output=router_logits,
                topk=s["top_k"],
                renormalize=s["renormalize"],
            )
        assert s["scoring_func"] == "softmax"
        weights, experts = router_logits.softmax(-1).topk(s["top_k"])
        if s["renormalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, experts.int()

    def grouped(self, logits):
        s = self.settings
        scores = logits.sigmoid() if s["scoring_func"] == "sigmoid" else logits.softmax(-1)
        biased = scores + (
            0 if s["e_score_correction_bias"] is None else s["e_score_correction_bias"]
        )
        parts = biased.view(len(logits), s["num_expert_group"], -1)
        best = parts.topk(1 if s["e_score_correction_bias"] is None else 2).values.sum(-1)
        kept = torch.zeros_like(best).scatter(1, best.topk(s["topk_group"]).indices, 1.0).bool()
        biased = parts.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        experts = biased.topk(s["top_k"]).indices
        weights = scores.gather(1, experts)
        if s["renormalize"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * s["routed_scaling_factor"], experts.int()


def create_fused_moe_router(
    top_k,
    global_num_experts,
    renormalize=True,
    use_grouped_topk=False,
    num_expert_group=None,
    topk_group=None,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    e_score_correction_bias=None,
    custom_routing_function=None,
):
    return Chooses(**locals())


def fused_moe_factory(
    num_experts,
    top_k,
    hidden_size,
    intermediate_size,
    renormalize=True,
    prefix="",
    gate=None,
    shared_expert_gate=None,
    router_logits_dtype=None,
    apply_routed_scale_to_output=False,
    use_grouped_topk=False,
    num_expert_group=None,
    topk_group=None,
    scoring_func="softmax",
    routed_scaling_factor=1.0,
    e_score_correction_bias=None,
    custom_routing_function=None,
):
    settings = dict(locals())
    router = create_fused_moe_router(
        top_k,
        num_experts,
        renormalize,
        use_grouped_topk,
        num_expert_group,
        topk_group,
        scoring_func,
        1.0 if apply_routed_scale_to_output else routed_scaling_factor,
        e_score_correction_bias,
        custom_routing_function,
    )
    return MoERunner(prefix, router, gate, settings)


class Block(nn.Module):
    """An MoE block of a family: its gate, and what it tells its MoE layer."""

    def __init__(self, factory, config, prefix, *, place="gate", inside=False, bias=None, **told):
        super().__init__()
        experts = next(
            getattr(config, name)
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if hasattr(config, name)
        )
        gate = LinearBase(config.hidden_size, experts, return_bias=place == "gate")
        setattr(self, place, gate)
        if bias is not None:
            holder = gate if bias == "gate" else self
            holder.e_score_correction_bias = nn.Parameter(torch.zeros(experts))
            told["e_score_correction_bias"] = holder.e_score_correction_bias
        self.experts = factory(
            experts, config.num_experts_per_tok, config.hidden_size, 16,
            prefix=f"{prefix}.experts", gate=gate if inside else None, **told,
        )  # fmt: skip
        self.place, self.inside = place, inside

    def forward(self, x):
        if self.inside:
            return self.experts(x, x)
        logits = getattr(self, self.place)(x)
        return self.experts(x, logits[0] if self.place == "gate" else logits)


class Registry:
    def __init__(self, **models):
        self.models = models

    def register_model(self, name, path):
        assert name not in self.models, "vLLM would warn"
        self.models[name] = SimpleNamespace(path=path)


class HFConfigParser:
    def parse(self, model, trust_remote_code, revision=None, code_revision=None, **options):
        return {}, SimpleNamespace(read_by="vLLM", trusts=trust_remote_code)


def stand_in(monkeypatch, told=None, **models):
    """Put the stand-ins under vLLM's names; returns the module ``vllm``.

    ``told`` are settings of ``Block`` for the class MixtralForCausalLM and its like, which all
    ``models`` names give.
    """
    modules = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.model_executor.layers.fused_moe": {"FusedMoEFactory": fused_moe_factory},
        "vllm.model_executor.layers.fused_moe.layer": {"MoERunner": MoERunner},
        "vllm.model_executor.layers.fused_moe.router.router_factory": {
            "create_fused_moe_router": create_fused_moe_router
        },
        "vllm.model_executor.layers.linear": {"LinearBase": LinearBase},
        "vllm.model_executor.models.config": {"MODELS_CONFIG_MAP": {}},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(is_rocm=lambda: False, device_type="cpu")
        },
        "vllm.transformers_utils.config": {
            "_CONFIG_FORMAT_TO_CONFIG_PARSER": {"hf": HFConfigParser}
        },
        "vllm.model_executor.models.family": {"FusedMoEFactory": fused_moe_factory},
    }
    made = {}
    for path, values in modules.items():
        for end in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:end])
            if name not in made:
                made[name] = ModuleType(name)
                monkeypatch.setitem(sys.modules, name, made[name])
                parent, _, last = name.rpartition(".")
                if parent:
                    setattr(made[parent], last, made[name])
        vars(made[path]).update(values)
    family = made["vllm.model_executor.models.family"]

    class ForCausalLM(nn.Module):
        def __init__(self, *, vllm_config, prefix=""):
            super().__init__()
            config = vllm_config.model_config.hf_config
            layers = [nn.Module() for _ in range(config.num_hidden_layers)]
            first = getattr(config, "first_k_dense_replace", 0)
            for index, layer in enumerate(layers[first:], first):
                path = f"model.layers.{index}.mlp"
                layer.mlp = Block(family.FusedMoEFactory, config, path, **(told or {}))
            self.model = nn.Module()
            self.model.layers = nn.ModuleList(layers)

        def load_weights(self, weights):
            known, seen = dict(self.named_parameters()), set()
            for name, value in weights:
                if name not in known:  # of a family whose block keeps the gate's bias
                    name = name.replace(".gate.e_score", ".e_score")  # noqa: PLW2901
                if name in known:
                    known[name].data.copy_(value)
                    seen.add(name)
            return seen

    registered = {
        name: SimpleNamespace(module_name=module, load_model_cls=lambda: ForCausalLM)
        for name, module in models.items()
    }
    made["vllm"].ModelRegistry = Registry(**registered)
    return made["vllm"]
