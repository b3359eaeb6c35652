"""Two gloo ranks give what one process gives: tensor, sequence and expert parallel, FSDP2, DCP."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tests.engines.engines import SIPS, assert_close, periodic
from tests.processes import on_two_ranks

from .models import EXPERTS, VOCABULARY, on_cpu, one_rank, small

from megatron.core import dist_checkpointing, parallel_state  # isort: skip
from megatron.core.distributed import (  # isort: skip
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    torch_fully_sharded_data_parallel,
)

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = periodic(4, 16, VOCABULARY)
ROUTER = {**SIPS, "learn_temperature": True}
ROOM = 1e-5
PARALLEL = {
    "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
}


class Norm(torch.nn.RMSNorm):
    """Megatron's torch norm refuses sequence parallel; all it takes is the mark."""

    def __init__(self, config, hidden_size, eps):
        super().__init__(hidden_size, eps)
        self.weight.sequence_parallel = config.sequence_parallel


def build(**changes):
    return small(ROUTER, norm=Norm, **changes)


def backward(model, ids):
    """Mean next-token loss; Megatron adds its router losses to the gradient by itself."""
    rows, length = ids.shape
    places = torch.arange(length).expand(rows, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    labels = torch.roll(ids, -1, dims=1)
    model(ids, places, mask, labels=labels)[:, :-1].mean().backward()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def own_name(name, rank):
    """Name in the whole model of a parameter on a rank that holds half of the experts."""
    if ".local_experts." not in name:
        return name
    before, after = name.split(".local_experts.")
    expert, rest = after.split(".", 1)
    return f"{before}.local_experts.{int(expert) + rank * EXPERTS // 2}.{rest}"


def tensor_parallel(rank, folder, start):
    """TP 2 with sequence parallel, EP 2; gradients of the whole model from both ranks' parts."""
    parallel_state.initialize_model_parallel(**PARALLEL)
    model = build(**PARALLEL, sequence_parallel=True)
    cut = {n: getattr(p, "partition_dim", -1) for n, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            value, expert = start[own_name(name, rank)], ".experts." in name
            sliced = cut[name] >= 0 and not expert
            p.copy_(value.chunk(2, cut[name])[rank] if sliced else value)
    backward(model, IDS)
    found = {}
    for name, p in model.named_parameters():
        gradient = p.grad
        if getattr(p, "sequence_parallel", False):
            dist.all_reduce(gradient)  # as finalize_model_grads does
        elif cut[name] >= 0 and ".experts." not in name:
            parts = [torch.empty_like(gradient) for _ in range(2)]
            dist.all_gather(parts, gradient.contiguous())
            gradient = torch.cat(parts, cut[name])
        found[own_name(name, rank)] = gradient
    dist_checkpointing.save(model.sharded_state_dict(), folder / "dcp")
    parallel_state.destroy_model_parallel()
    return found


class _CpuMesh(DeviceMesh):
    @staticmethod
    def from_group(group, device):
        return DeviceMesh.from_group(group, "cpu")


def fsdp(rank):
    torch_fully_sharded_data_parallel.DeviceMesh = _CpuMesh
    parallel_state.initialize_model_parallel()
    model = build()
    wrapped = TorchFullyShardedDataParallel(model.config, DistributedDataParallelConfig(), model)
    steps = torch.optim.AdamW(wrapped.parameters(), lr=0.01, eps=1e-3)
    backward(wrapped, IDS.chunk(2)[rank])
    gradients = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
    steps.step()
    weights = {n: whole(p).detach() for n, p in model.named_parameters()}
    parallel_state.destroy_model_parallel()
    return gradients, weights


def both(rank, folder, start):
    on_cpu()
    return {"fsdp": fsdp(rank), "tp": tensor_parallel(rank, folder, start)}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What both ranks found; the folder of the checkpoint; gradients and weights of one process."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "dcp").mkdir()
    with one_rank(folder):
        model = build()
        start = {n: p.detach().clone() for n, p in model.named_parameters()}
        backward(model, IDS)
        full = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        for half in IDS.chunk(2):
            backward(model, half)
        for p in model.parameters():
            p.grad /= 2
        halves = {n: p.grad.clone() for n, p in model.named_parameters()}
        torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3).step()
        weights = {n: p.detach() for n, p in model.named_parameters()}
        yield on_two_ranks(both, folder, folder, start), folder, (start, full, halves, weights)


def assert_same(found, expected):
    for name, value in found.items():
        assert expected[name].abs().max() > 0, name
        assert_close(value, expected[name], name, room=ROOM)


@pytest.mark.engine("megatron", "TP")
@pytest.mark.engine("megatron", "EP")
def test_tensor_sequence_and_expert_parallel_equal_one_process(ran):
    ranks, _, (_, full, *_) = ran
    assert set().union(*(rank["tp"] for rank in ranks)) == set(full)
    for rank in ranks:
        assert_same(rank["tp"], full)


@pytest.mark.engine("megatron", "FSDP")
def test_fsdp2_equals_one_process(ran):
    ranks, _, (_, _, halves, weights) = ran
    for rank in ranks:
        assert rank["fsdp"][0].keys() == halves.keys()
        assert_same(rank["fsdp"][0], halves)
        assert_same(rank["fsdp"][1], weights)


def test_a_distributed_checkpoint_of_two_ranks_loads_into_a_model_of_one(ran):
    _, folder, (start, *_) = ran
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder / "dcp"))
    for name, p in model.named_parameters():
        assert torch.equal(p, start[name]), name
