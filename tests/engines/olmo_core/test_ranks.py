"""Two gloo ranks give what one process gives: FSDP2, tensor and expert parallel, checkpoints."""

import pytest
import torch

from tests.engines.engines import SIPS, assert_close, periodic
from tests.processes import on_two_ranks

from .models import VOCABULARY, small

from olmo_core.distributed.checkpoint import (  # isort: skip
    load_model_and_optim_state,
    save_model_and_optim_state,
)
from olmo_core.nn.moe import MoELoadBalancingLossGranularity  # isort: skip
from torch.distributed.device_mesh import init_device_mesh  # isort: skip

from l2r.engines.olmo_core.checkpoint import to_hugging_face  # isort: skip
from l2r.engines.olmo_core.float32_routers import shard_routers  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grouped GEMM not available"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
ROOM = 1e-5
STEPS = 3
IDS = periodic(4, 16, VOCABULARY)


def build(init_device="cpu"):
    router = {**SIPS, "learn_temperature": True}
    _, model = small(router, granularity=MoELoadBalancingLossGranularity.instance)
    return model


def optimizer(model):
    # With a small eps the first updates are the signs of gradients, also where these are rounding.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.1, foreach=False)


def backward(model, ids):
    """Mean next-token loss; OLMo-core adds its router losses to the gradient by itself."""
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
    made = model(ids, labels=labels, loss_reduction="sum", return_logits=False)
    loss = made.loss / (labels != -100).sum()
    loss.backward()
    return loss.detach()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(model, parts):
    """Gradients of the first step by name, and weights after three steps of AdamW."""
    steps = optimizer(model)
    gradients = {}
    for step in range(STEPS):
        for ids in parts:
            backward(model, ids)
        for name, p in model.named_parameters():
            if len(parts) > 1:
                p.grad /= len(parts)
            if step == 0:
                gradients[name] = whole(p.grad).clone()
        steps.step()
        steps.zero_grad()
    return steps, gradients, {n: whole(p).detach() for n, p in model.named_parameters()}


def fsdp(rank, folder):
    model = build()
    model.apply_fsdp(dp_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    torch.manual_seed(7)
    model.init_weights(device=torch.device("cpu"))  # on shards, as the engine does
    steps, gradients, weights = run(model, [IDS.chunk(2)[rank]])
    save_model_and_optim_state(folder / "dcp", model, steps)
    exported(model, rank)
    refused(model)
    return gradients, weights


def exported(model, rank):
    """The export of a model on ranks: proven inside, and its logits once more on rank 0."""
    modes = [module.training for module in model.modules()]
    before = {name: type(p) for name, p in model.named_parameters()}
    made = to_hugging_face(model, max_position_embeddings=64)
    assert (made is None) == (rank == 1)
    assert [module.training for module in model.modules()] == modes
    assert {name: type(p) for name, p in model.named_parameters()} == before
    with torch.no_grad():
        logits = whole(model.eval()(IDS))
        if made is not None:
            assert_close(made(IDS).logits, logits, room=ROOM)
    model.train()


def refused(model):
    """What rank 0 finds wrong is raised on every rank, and none waits for another."""
    rope = model.blocks["1"].attention.rope
    rope._rotate_half = lambda t: -type(rope)._rotate_half(rope, t)
    with pytest.raises(ValueError, match=r"at position .* a logit differs"):
        to_hugging_face(model, max_position_embeddings=64)
    del rope._rotate_half
    norm = model.lm_head.norm.weight
    with torch.no_grad():
        plain = norm.clone()
        norm.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"not finite .*lm_head"):
        to_hugging_face(model, max_position_embeddings=64)
    with torch.no_grad():
        norm.copy_(plain)
    model.blocks["0"].attention.clip_qkv = 1.0
    with pytest.raises(ValueError, match="clip_qkv must be None"):
        to_hugging_face(model, max_position_embeddings=64)
    model.blocks["0"].attention.clip_qkv = None


def tensor_parallel(rank):
    model = build()
    model.apply_tp(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    torch.manual_seed(7)
    model.init_weights(device=torch.device("cpu"))
    found = run(model, [IDS])[1:]
    exported(model, rank)
    return found


def expert_parallel(rank):
    model = build()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model.apply_ep(mesh["dp_shard"])
    model.prepare_experts_for_fsdp(world_mesh=mesh)
    model.apply_fsdp(dp_mesh=mesh)
    torch.manual_seed(7)
    model.init_weights(device=torch.device("cpu"))
    found = run(model, [IDS.chunk(2)[rank]])[1]
    exported(model, rank)
    return found


def half_precision(rank, keeps):
    """Dtypes of a router's weights in the forward pass under OLMo-core's bfloat16 policy."""
    model = build()
    if keeps:
        shard_routers(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model.apply_fsdp(dp_mesh=mesh, param_dtype=torch.bfloat16)
    model.init_weights(device=torch.device("cpu"))
    seen = set()
    for block in model.blocks.values():
        block.router.register_forward_pre_hook(
            lambda router, args: seen.update(p.dtype for p in router.parameters())
        )
    logits = model.eval()(IDS)
    attention = model.blocks["0"].attention.w_q.weight.dtype
    if keeps:
        with pytest.raises(ValueError, match="shard_routers must come before"):
            shard_routers(model)
        exported(model, rank) if logits.dtype == torch.float32 else in_half(model)
    return seen, logits.dtype, attention


def in_half(model):
    """The export of a model that computes in bfloat16 is compared in it."""
    made = to_hugging_face(model, max_position_embeddings=64)
    if made is not None:
        assert {p.dtype for p in made.parameters()} == {torch.float32}


def all_three(rank, folder):
    return {
        "fsdp": fsdp(rank, folder),
        "tp": tensor_parallel(rank),
        "ep": expert_parallel(rank),
        "half": [half_precision(rank, keeps) for keeps in (False, True)],
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks found, and the folder of the checkpoint."""
    folder = tmp_path_factory.mktemp("ranks")
    return on_two_ranks(all_three, folder, folder), folder


@pytest.fixture(scope="module")
def alone():
    return run(build(), IDS.chunk(2))


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        assert_close(found[name], value, name, room=ROOM)


@pytest.mark.engine("olmo-core", "FSDP")
def test_fsdp2_equals_one_process_and_its_checkpoint_loads_there(alone, ran):
    for rank in ran[0]:
        assert_same(rank["fsdp"][0], alone[1])
        assert_same(rank["fsdp"][1], alone[2])
    model = build()
    load_model_and_optim_state(ran[1] / "dcp", model, optimizer(model))
    assert_same({n: p.detach() for n, p in model.named_parameters()}, alone[2])


@pytest.mark.engine("olmo-core", "TP")
def test_tensor_parallel_equals_one_process(ran):
    _, gradients, weights = run(build(), [IDS])
    for rank in ran[0]:
        assert_same(rank["tp"][0], gradients)
        assert_same(rank["tp"][1], weights)


@pytest.mark.engine("olmo-core", "EP")
def test_expert_parallel_with_fsdp_gives_the_gradients_of_one_process(alone, ran):
    """OLMo-core sums what ranks send to an expert and takes the mean of everything else."""
    expected = {n: g * (2 if ".experts." in n else 1) for n, g in alone[1].items()}
    for rank in ran[0]:
        assert_same(rank["ep"], expected)


def test_router_weights_stay_in_float32_under_a_bfloat16_policy(ran):
    for rank in ran[0]:
        (rounded, dtype, _), (kept, *_) = rank["half"]
        assert (rounded, kept) == ({torch.bfloat16}, {torch.float32})
        assert dtype == torch.bfloat16
