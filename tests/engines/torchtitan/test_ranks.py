"""Two gloo ranks give what one process gives: tensor and expert parallel, FSDP2."""

import warnings
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from tests.engines.engines import SIPS, assert_close
from tests.processes import on_two_ranks

from .models import EXPERTS, UP, WIDTH, X, built, configuration, qwen3_configuration, scaled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts
    from torchtitan.models.common.moe_sharding import set_moe_sharding_config
    from torchtitan.models.qwen3.sharding import _GROUPED_EXPERTS_PARAM_LAYOUT

    from l2r.engines.torchtitan.checkpoint import to_hugging_face
    from l2r.engines.torchtitan.spec import with_routers

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
ROUTER = {**SIPS, "learn_temperature": True}
ROOM = 1e-5
DOWN = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))


def dimensions(**degrees):
    parallel_dims.device_type = "cpu"
    set_spmd_backend("partial_dtensor")
    one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"), 1)
    dims = ParallelDims(**one | degrees, world_size=2, spmd_backend="partial_dtensor")
    dims.build_mesh()
    return dims


def shard(config, *, ep):
    """Layouts as torchtitan writes them for its Qwen3."""
    set_moe_sharding_config(
        config, enable_ep=ep, enable_sp=True, expert_param_layout=_GROUPED_EXPERTS_PARAM_LAYOUT
    )


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(module):
    return {name: whole(p.grad) for name, p in module.named_parameters()}


def tensor_parallel(rank):
    """Gradients of the gate at TP 2: tokens copied without EP, cut over ranks with it."""
    found, dims = {}, dimensions(tp=2)
    for ep in (False, True):
        torch.manual_seed(0)
        gate = configuration(ROUTER, shard=partial(shard, ep=ep)).router.gate.build()
        gate.parallelize(dims)
        gate.reset_parameters()
        x, upstream = ((v.chunk(2, dim=1)[rank] if ep else v) for v in (X, UP))
        (local(gate(x)) * upstream).sum().backward()
        found[ep] = gradients(gate)
    return found


def fsdp(rank):
    torch.manual_seed(0)
    gate = configuration(ROUTER).router.gate.build()
    fully_shard(gate)
    gate.reset_parameters()
    (gate(X.chunk(2)[rank]) * UP.chunk(2)[rank]).sum().backward()
    return {n: 2 * g for n, g in gradients(gate).items()}  # FSDP2 takes the mean


def grouped(self, *, A, B_t, offs):
    """The engine's product of every expert, in fp32: bf16 would hide what is compared."""
    ends = [0, *offs.tolist()]
    parts = zip(ends, ends[1:], B_t, strict=False)
    return torch.cat([A[start:end].float() @ w.float() for start, end, w in parts])


def backward(layer, x, upstream):
    """Output of a layer, and gradients of all its parameters."""
    out = local(layer(x))
    (out * upstream).sum().backward()
    return out.detach(), gradients(layer)


def expert_parallel(rank, start, *, tp):
    """One layer whose ranks have half of the experts, and half of every sequence or of the rows."""
    GroupedExperts._grouped_mm = grouped
    dims = dimensions(ep=2, tp=tp, dp_shard=2 // tp)
    layer = configuration(ROUTER, shard=partial(shard, ep=True)).build()
    layer.load_state_dict(start)
    layer.parallelize(dims)
    assert local(layer.routed_experts.inner_experts.w1_EFD).shape[0] == EXPERTS // 2
    if tp == 1:
        fully_shard(layer.router.gate, mesh=dims.get_mesh("fsdp"))
    x, upstream = (v.chunk(2, dim=tp - 1)[rank].contiguous() for v in (X, DOWN))
    out, found = backward(layer, x, upstream)
    if tp == 1:
        found |= {n: 2 * g for n, g in found.items() if ".gate." in n}
    return out, found


def all_of_them(rank, start):
    found = {f"ep tp={tp}": expert_parallel(rank, start, tp=tp) for tp in (1, 2)}
    return found | {"tp": tensor_parallel(rank), "fsdp": fsdp(rank)}


@pytest.fixture(scope="module")
def layer():
    return built(ROUTER)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, layer):
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    return on_two_ranks(all_of_them, tmp_path_factory.mktemp("ranks"), start)


@pytest.fixture(scope="module")
def alone():
    torch.manual_seed(0)
    gate = configuration(ROUTER).router.gate.build()
    gate.reset_parameters()
    (gate(X) * UP).sum().backward()
    return gradients(gate)


@pytest.mark.engine("torchtitan", "TP")
@pytest.mark.parametrize("ep", [False, True])
def test_a_gate_at_tp_2_learns_what_one_process_does(ran, alone, ep):
    for found in ran:
        for name, gradient in alone.items():
            assert_close(found["tp"][ep][name], gradient, name, room=ROOM)


@pytest.mark.engine("torchtitan", "FSDP")
def test_a_gate_under_fsdp2_learns_what_one_process_does(ran, alone):
    for found in ran:
        for name, gradient in alone.items():
            assert_close(found["fsdp"][name], gradient, name, room=ROOM)


@pytest.mark.engine("torchtitan", "EP")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_at_ep_2_answers_and_learns_as_one_process_does(ran, layer, tp, monkeypatch):
    """Tokens go to the experts of the other rank and back, under FSDP2 or sequence parallel."""
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped)
    layer.zero_grad()
    out, expected = backward(layer, X, DOWN)
    parts = [found[f"ep tp={tp}"] for found in ran]
    assert_close(torch.cat([part for part, _ in parts], dim=tp - 1), out, "output", room=ROOM)
    for _, found in parts:
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            # Experts get their gradient in bf16, which either side rounds by 2^-9 of it.
            room = 2**-8 if ".inner_experts." in name else ROOM
            assert_close(found[name], gradient, name, room=room)


def bf16(rank, start, ours):
    """Choices and dtypes of gates in a model that torchtitan shards with its bfloat16 policy."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.qwen3 import model_registry

    spec = model_registry("debugmodel_moe")
    spec.model = qwen3_configuration(ROUTER, dim=64, experts=32, top_k=4)
    spec = with_routers(spec) if ours else spec
    model = spec.model.build()
    model.init_states()
    model.load_state_dict(start)
    model = spec.parallelize_fn(
        model,
        parallel_dims=dimensions(dp_shard=2),
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo scales no sum
    gates = [layer.moe.router.gate for layer in model.layers.values()]
    seen = []
    for gate in gates:
        gate.register_forward_hook(
            lambda gate, args, out: seen.append(
                ({p.dtype for p in gate.parameters()}, args[0].detach().clone(), out.detach())
            )
        )
    ids = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(rank))
    model(ids, torch.arange(64).expand(8, 64), None).float().square().mean().backward()
    grads = [{n: p.grad.dtype for n, p in gate.named_parameters()} for gate in gates]
    made = to_hugging_face(model) if ours else None
    anchors = None if made is None else made.get_submodule("model.layers.1.mlp.gate").anchors
    return seen[: len(gates)], grads, None if anchors is None else anchors.detach().clone()


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    start = scaled(qwen3_configuration(ROUTER, dim=64, experts=32, top_k=4)).state_dict()
    folders = {ours: tmp_path_factory.mktemp(f"bf16-{ours}") for ours in (False, True)}
    return {
        ours: on_two_ranks(bf16, folder, start, ours, within=120)
        for ours, folder in folders.items()
    }


@pytest.mark.engine("torchtitan", "FSDP")
def test_gates_stay_in_float32_under_torchtitans_bf16_policy(in_bf16):
    """Without the plug's parallelize_fn the policy rounds them, and tokens take other experts."""
    whole = scaled(qwen3_configuration(ROUTER, dim=64, experts=32, top_k=4))
    share = {}
    for ours, ranks in in_bf16.items():
        flips = []
        for seen, grads, _ in ranks:
            for number, (dtypes, x, found) in enumerate(seen):
                assert dtypes == {torch.float32 if ours else torch.bfloat16}
                with torch.no_grad():
                    own = whole.layers[str(number)].moe.router.gate(x)
                first, second = (v.topk(4).indices.sort(-1).values for v in (own, found))
                flips.append((first != second).any(-1).float().mean())
            assert all(d == torch.float32 for each in grads for d in each.values())
        share[ours] = float(torch.stack(flips).mean())
        print(f"float32 gates {ours}: {share[ours]:.2%} of tokens take other experts")
    assert share[True] == 0 and share[False] > 0.005, share


@pytest.mark.engine("torchtitan", "checkpoint to HF")
def test_two_ranks_export_what_they_hold_to_the_bit(in_bf16):
    """The proof compares in bfloat16, in which these ranks compute; rank 0 has the model."""
    (_, _, anchors), (_, _, nothing) = in_bf16[True]
    whole = scaled(qwen3_configuration(ROUTER, dim=64, experts=32, top_k=4))
    assert nothing is None
    gate = whole.layers["1"].moe.router.gate
    assert torch.equal(anchors, gate.anchors.view(anchors.shape))
