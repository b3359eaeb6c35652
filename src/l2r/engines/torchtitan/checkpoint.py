"""Qwen3-MoE trained in torchtitan as a Hugging Face folder with swapped routers, and back.

    model = to_hugging_face(torchtitan_model, max_position_embeddings=4096)
    if model is not None:  # rank 0
        model.save_pretrained("out")

Works on plain models and on those that torchtitan has parallelized with FSDP2, TP and EP.
"""

import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from l2r.engines.engine import check_router, check_sizes, own_stream, require, selecting_as
from l2r.engines.proof import ask, compare, on_first_rank
from l2r.engines.torchtitan import L2RGate, plug_of
from l2r.engines.torchtitan.fields import rule, settings, without_export
from l2r.engines.torchtitan.routes import record
from l2r.errors import InputError

require("torchtitan")

from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter  # noqa: E402

_GATE, _BIAS = "model.layers.{}.mlp.gate.", "e_score_correction_bias"
_THEIR_BIAS = "layers.{}.moe.expert_bias_E"


class L2RQwen3StateDictAdapter(Qwen3StateDictAdapter):
    """Qwen3's state-dict adapter, extended by the tensors of our gates.

    torchtitan builds it before the training: it warns, a line each, of settings that have no
    export. ``to_hf`` then raises InputError, and never drops a tensor.
    """

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        gates = [layer.moe.router.gate for layer in model_config.layers if layer.moe is not None]
        ours = {str(gate.router): gate for gate in gates if isinstance(gate, L2RGate.Config)}
        for config in ours.values():
            self.from_hf_map.pop(f"{_GATE}weight", None)
            for flat, name in plug_of(config, seed=0).names.items():
                self.from_hf_map[_GATE + name] = f"layers.{{}}.moe.router.gate.{flat}"
        if any(layer.moe and layer.moe.load_balance_coeff for layer in model_config.layers):
            self.from_hf_map[_GATE + _BIAS] = _THEIR_BIAS
        for line in self.without_export() if ours else []:
            warnings.warn(f"no Hugging Face folder can be written: {line}", stacklevel=1)

    def without_export(self) -> list[str]:
        """Return a line for each setting that Qwen3-MoE with swapped routers has not."""
        lines = without_export(self.model_config)
        if not lines:
            try:
                selected(self.model_config)
            except InputError as error:
                lines = [str(error)]
        return lines

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Tensors by Hugging Face name. Raises InputError for what has no place there."""
        for line in self.without_export():
            raise InputError(line)
        known = {name for name in self.from_hf_map.values() if name is not None}
        for name in state_dict:
            if re.sub(r"\d+", "{}", name, count=1) not in known:
                raise InputError(f"{name} has no place in a Hugging Face model; it would be lost")
        converted: dict[str, Any] = super().to_hf(state_dict)
        return converted


def selected(config: Any) -> tuple[Any, str]:
    """Return a configuration's router as a swap has it, and whose selection is in force.

    Raises InputError where no setting of the router selects as the engine does.
    """
    layer = next(layer for layer in config.layers if layer.moe is not None)
    router, wanted = plug_of(layer.moe.router.gate, seed=0).router, rule(config)
    family = wanted.gate == "softmax" and wanted.scale == 1.0 and wanted.bias is None
    if family and router.selection.bias is None:
        return replace(router.config, normalize_weights=False), "family"
    if wanted.bias is None and router.selection.bias is not None:
        wanted = replace(wanted, bias="expert_bias_E")  # of zeros
    try:
        return selecting_as(router, wanted), "router"
    except InputError:
        raise InputError(
            f"layers.*.moe.router.score_func must be softmax, and route_scale 1, for a "
            f"{router.config.kind} router, which selects by itself in the folder; got "
            f"{wanted.gate} and {wanted.scale}"
        ) from None


def hugging_face_model(config: Any, **changes: Any) -> Any:
    """Build a Qwen3MoeForCausalLM with swapped routers for a configuration, without weights.

    Its ``config.save_pretrained(folder)`` writes the config.json that ``last_save_in_hf`` of
    torchtitan's trainer leaves out. ``changes`` are further fields of the Hugging Face
    configuration. Raises InputError for a setting that has no export.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from l2r.hf.swap import replace_routers

    for line in without_export(config):
        raise InputError(line)
    router, selection = selected(config)
    ids: dict[str, Any] = {"pad_token_id": None, "eos_token_id": None, "bos_token_id": None}
    with own_stream(0):  # the start is overwritten, and the engine's stream stays where it is
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**ids | settings(config) | changes))
        return replace_routers(made, router, selection=selection)


def to_hugging_face(model: Any, **changes: Any) -> Any:
    """Return the model on Hugging Face, in fp32 on the CPU, proved; None on ranks other than 0.

    ``changes`` are further fields of its configuration (max_position_embeddings, token ids). Every
    rank calls it. Raises InputError for a setting that has no export, and where both models' logits
    of one row as long as max_position_embeddings differ by more than rounding.
    """
    config = model.config
    for line in without_export(config):
        raise InputError(line)
    room = settings(config)["max_position_embeddings"]
    positions = changes.get("max_position_embeddings", room)
    if not 1 <= positions <= room:
        raise InputError(
            f"max_position_embeddings must be between 1 and {room}, the length of torchtitan's "
            f"rotary cache; got {positions}"
        )
    selected(config)
    state = {name: _whole(value) for name, value in model.state_dict().items()}
    device = next(model.parameters()).device
    half = mock.patch.object(torch.Tensor, "bfloat16", _as_it_is)
    training = model.training
    try:
        model.eval()
        with half:  # experts compute in bfloat16 whatever their weights are
            answer = ask(
                lambda ids: _logits(model, ids.to(device)),
                config.vocab_size,
                positions=positions,
                record=record(model),
            )
    finally:
        model.train(training)

    def written() -> Any:
        made = hugging_face_model(config, **changes)
        made.load_state_dict(_fused(made, config, state))
        compare(answer, made)
        return made.eval()

    return on_first_rank(written)


def load_hugging_face(model: Any, source: Any) -> None:
    """Fill a torchtitan model, sharded or not, from a Hugging Face model of the same sizes.

    Raises InputError for a setting that has no export, and for other sizes, settings or routers.
    """
    adapter = L2RQwen3StateDictAdapter(model.config, None)
    for line in adapter.without_export():
        raise InputError(line)
    with torch.no_grad():
        state = adapter.from_hf(dict(_split(source.state_dict())))
    own = model.state_dict()
    for name, value in state.items():
        if name not in own or own[name].numel() != value.numel():
            raise InputError(f"both models must have the same sizes; {name} differs")
        state[name] = _as(value.reshape(own[name].shape), own[name])
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise InputError(f"the Hugging Face model must hold {missing[0]}; it does not")
    wanted = settings(model.config)
    del wanted["max_position_embeddings"]  # of the rotary cache; the folder may claim fewer
    check_sizes(source.config, wanted)
    router, selection = selected(model.config)
    check_router(source, router, family=selection == "family")
    model.load_state_dict(state)


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()


def _as(value: Tensor, own: Tensor) -> Tensor:
    """Return a value on the device of the model's own tensor, and cut over ranks as it is."""
    value = value.to(own.device, own.dtype)
    return (
        distribute_tensor(value, own.device_mesh, own.placements)
        if isinstance(own, DTensor)
        else value
    )


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of whole rows; flex and varlen attention want masks, SDPA takes none."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    inner = model.config.first_attention.inner_attention
    plain = isinstance(inner, ScaledDotProductAttention.Config)
    out = model(ids, places, None if plain else model.get_attention_masks(places))
    return out.full_tensor() if isinstance(out, DTensor) else out


def _fused(made: nn.Module, config: Any, state: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors of the Hugging Face model by its own names, from the engine's whole ``state``."""
    from l2r.hf.models import check_finite

    check_finite(state.items())
    flat = L2RQwen3StateDictAdapter(config, None).to_hf(state)
    found, wanted = dict[str, Tensor](), made.state_dict()
    for name, value in wanted.items():
        layer = name.rpartition(".experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            pairs = (
                torch.cat(
                    [flat.pop(f"{layer}.experts.{n}.{w}.weight") for w in ("gate_proj", "up_proj")]
                )
                for n in range(len(value))
            )
            found[name] = torch.stack(list(pairs))
        elif name.endswith("experts.down_proj"):
            rows = [flat[f"{layer}.experts.{n}.down_proj.weight"] for n in range(len(value))]
            found[name] = torch.stack(rows)
        elif name == "lm_head.weight" and name not in flat:  # tied
            found[name] = flat["model.embed_tokens.weight"]
        elif name.endswith(_BIAS) and name not in flat:  # an engine without a bias
            found[name] = torch.zeros_like(value)
        else:
            found[name] = flat[name].reshape(value.shape)
    return found


def _split(state: dict[str, Tensor]) -> Any:
    """Names and tensors of a Hugging Face state, one tensor an expert."""
    for name, value in state.items():
        stem, found, kind = name.rpartition("experts.")
        if found and kind == "gate_up_proj":
            for n, both in enumerate(value):
                gate, up = both.chunk(2)
                yield f"{stem}experts.{n}.gate_proj.weight", gate
                yield f"{stem}experts.{n}.up_proj.weight", up
        elif found and kind == "down_proj":
            for n, down in enumerate(value):
                yield f"{stem}experts.{n}.down_proj.weight", down
        else:
            yield name, value
