"""Checkpoints of torchtitan's Qwen3-MoE with our gates, and its command line."""

import dataclasses
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import l2r
from l2r.errors import InputError
from tests.engines.engines import ROUTERS, SIPS, assert_close

from .models import TARGET, qwen3_configuration, scaled
from .walk import IDS, logits, put

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import ConfigManager
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.moe import MoE

    from l2r.engines.torchtitan import L2RGate
    from l2r.engines.torchtitan.checkpoint import (
        L2RQwen3StateDictAdapter,
        hugging_face_model,
        load_hugging_face,
        to_hugging_face,
    )
    from l2r.engines.torchtitan.spec import with_routers

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")


def without_bias(config):
    return put(MoE, "load_balance_coeff", None)(config)


@pytest.mark.engine("torchtitan", "checkpoint to HF")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_a_folder_gives_the_logits_and_goes_back_to_the_bit(kind, tied, tmp_path):
    """With a balancing bias, with which the router of the folder chooses too."""
    router = {"kind": kind, **ROUTERS[kind]}
    model = scaled(qwen3_configuration(router, tied=tied, fused=tied))
    made = to_hugging_face(model, eos_token_id=5)
    made.save_pretrained(tmp_path)
    folder = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert_close(folder(IDS).logits, logits(model), "logits", room=1e-5)
    assert folder.config.tie_word_embeddings is tied and folder.config.eos_token_id == 5
    biases = l2r.hf.swap.selection_biases(folder)
    for layer, bias in enumerate(biases.values()):
        assert torch.equal(bias, model.layers[str(layer)].moe.expert_bias_E) and bias.any()
    back = qwen3_configuration(router, tied=tied, fused=tied).build()
    back.init_states()
    load_hugging_face(back, folder)
    for name, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_without_a_bias_the_folder_selects_as_its_family(tmp_path):
    model = scaled(without_bias(qwen3_configuration(SIPS)))
    made = to_hugging_face(model)
    made.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["l2r_swap"][0]
    assert entry["selection"] == "family" and not l2r.hf.swap.selection_biases(made)
    other = scaled(qwen3_configuration(SIPS))
    with pytest.raises(InputError, match=r"must hold .*expert_bias_E"):
        load_hugging_face(other, made)
    smaller = scaled(qwen3_configuration(SIPS, hidden=8))
    with pytest.raises(InputError, match="the same sizes"):
        load_hugging_face(smaller, to_hugging_face(other))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for field, router in (("gamma=2.0", {"gamma": 2.0}), ("kind=l2r_dot", {"kind": "l2r_dot"})):
        source = to_hugging_face(scaled(qwen3_configuration({**SIPS, **router})))
        with pytest.raises(InputError, match=f"the same router; got {field}"):
            load_hugging_face(other, source)
    source = to_hugging_face(other)
    source.config.num_experts_per_tok += 1
    with pytest.raises(InputError, match="the same num_experts_per_tok"):
        load_hugging_face(other, source)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_model_that_trains_stays_as_it_is_and_longer_claims_are_refused():
    model = scaled(qwen3_configuration(SIPS)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    counts = model.layers["0"].moe.tokens_per_expert_E.clone()
    to_hugging_face(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.layers["0"].moe.tokens_per_expert_E, counts)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(InputError, match="max_position_embeddings must be between 1 and 64"):
        to_hugging_face(model, max_position_embeddings=65)


def test_the_adapter_says_before_the_training_what_has_no_export():
    config = qwen3_configuration(SIPS)
    L2RQwen3StateDictAdapter(config, None)  # silent
    config.layers[1].moe.router.num_expert_groups = 2
    with pytest.warns(UserWarning, match=r"no Hugging .*num_expert_groups must be None"):
        adapter = L2RQwen3StateDictAdapter(config, None)
    with pytest.raises(InputError, match="num_expert_groups must be None"):
        adapter.to_hf({})
    spec = of_command_line("l2r.engines.torchtitan.qwen3", "qwen3_moe_debug").model_spec
    spec.model.layers = config.layers
    with pytest.warns(UserWarning, match=r"num_expert_groups must be None"), torch.device("meta"):
        spec.model.build()
    right = L2RQwen3StateDictAdapter(qwen3_configuration(SIPS), None)
    with pytest.raises(InputError, match=r"layers.0.new.weight has no place"):
        right.to_hf({"layers.0.new.weight": torch.zeros(1)})


def of_command_line(module, config, *more):
    gates = f"{TARGET}={json.dumps(SIPS)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ConfigManager().parse_args(
            ["--module", module, "--config", config, "--override.imports", gates, *more]
        )


@pytest.mark.parametrize("config", ["qwen3_moe_debug", "qwen3_30b_a3b"])
def test_the_command_line_has_our_adapter_and_keeps_the_other_settings(config):
    ours = of_command_line("l2r.engines.torchtitan.qwen3", config, "--training.steps", "7")
    theirs = of_command_line("qwen3", config)
    spec = ours.model_spec
    assert spec.state_dict_adapter is L2RQwen3StateDictAdapter and ours.training.steps == 7
    for field in dataclasses.fields(theirs.model_spec.model):
        if field.name not in ("layers", "lm_head", "tok_embeddings", "norm"):
            value = getattr(theirs.model_spec.model, field.name)
            assert getattr(spec.model, field.name) == value, field.name
    assert len(apply_overrides(ours.override, spec.model)) == sum(
        layer.moe is not None for layer in spec.model.layers
    )


def test_a_configuration_that_torchtitan_has_not_is_named():
    with pytest.raises(AttributeError, match="no configuration Trainer"):
        from l2r.engines.torchtitan import qwen3

        qwen3.__getattr__("Trainer")
    with pytest.raises(ValueError, match="Config function 'qwen9' not found"):
        of_command_line("l2r.engines.torchtitan.qwen3", "qwen9")
    with pytest.raises(InputError, match="the model must be qwen3, which has an adapter; got"):
        from torchtitan.models.gpt_oss import model_registry

        with_routers(model_registry("debugmodel"))


def test_compiled_blocks_are_left_to_fsdp_with_a_warning():
    from torchtitan.config import CompileConfig
    from torchtitan.models.qwen3 import model_registry, parallelize

    plain, found = parallelize.apply_fsdp_to_decoder, []
    spec = dataclasses.replace(
        model_registry("debugmodel_moe"),
        parallelize_fn=lambda model, **_: found.append(parallelize.apply_fsdp_to_decoder is plain),
    )
    ours = with_routers(spec)
    ours.parallelize_fn(None, compile_config=CompileConfig())
    with pytest.warns(UserWarning, match=r"compile.enable: .*FSDP rounds router weights"):
        ours.parallelize_fn(None, compile_config=CompileConfig(enable=True))
    assert found == [False, True] and parallelize.apply_fsdp_to_decoder is plain


def test_the_seed_gives_the_routers_the_same_on_cpu_and_meta():
    def gates(device, seed=0):
        spec = of_command_line("l2r.engines.torchtitan.qwen3", "qwen3_moe_debug").model_spec
        spec.model.layers = spec.model.layers[:3]
        apply_overrides(OverrideConfig(imports=[(TARGET, SIPS)]), spec.model)
        for layer in spec.model.layers:  # small, and with draws of the common stream before gates
            layer.moe.routed_experts.inner_experts.hidden_dim = 8
        torch.manual_seed(seed)
        with torch.device(device):
            model = spec.model.build()
        model.to_empty(device="cpu")
        model.init_states()
        return [dict(m.named_parameters()) for m in model.modules() if isinstance(m, L2RGate)]

    first, second, other = gates("cpu"), gates("meta"), gates("cpu", seed=1)
    assert len(first) > 1
    for one, two, three in zip(first, second, other, strict=True):
        assert all(torch.equal(one[n], two[n]) for n in one)
        assert any(not torch.equal(one[n], three[n]) for n in one)
    assert any(not torch.equal(first[0][n], first[1][n]) for n in first[0])


def test_last_save_in_hf_and_the_configuration_beside_it_are_a_folder(tmp_path):
    """What the trainer's checkpointer writes, and the file of hugging_face_model."""
    settings = of_command_line(
        "l2r.engines.torchtitan.qwen3",
        "qwen3_moe_debug",
        "--checkpoint.enable",
        "--checkpoint.last_save_model_only",
        "--checkpoint.last_save_in_hf",
        "--checkpoint.export_dtype",
        "float32",
    )
    config = qwen3_configuration(SIPS)
    model = scaled(config)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpointer = settings.checkpoint.build(
            dataloader=None,
            model_parts=[model],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=settings.model_spec.state_dict_adapter(config, None),
            base_folder=str(tmp_path),
        )
        checkpointer.save(7, last_step=True)
    finally:
        dist.destroy_process_group()
    (weights,) = (p for p in tmp_path.rglob("*.safetensors") if p.parent.name != "sharded")
    folder = weights.parent
    hugging_face_model(config).config.save_pretrained(folder)
    loaded = l2r.load_pretrained(folder)
    with torch.no_grad():
        assert_close(loaded(IDS).logits, logits(model), "logits", room=1e-5)
