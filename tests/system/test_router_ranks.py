"""Routers whose state must agree between ranks: two gloo processes give what one gives."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from l2r import L2RConfig, XMoEConfig, build_router
from l2r.routers import constrain
from l2r.routers.norms import MagnitudeBatchNorm, sum_over_ranks
from l2r_lab.training.parallel import gathered_weights, parallelize
from l2r_lab.training.ranks import Ranks
from tests.processes import on_two_ranks

pytestmark = pytest.mark.slow("two processes")

STEPS = 12

ALONE = Ranks(0, 1, torch.device("cpu"))


XMOE = XMoEConfig.preset("torchscale")
LEARNED = XMoEConfig.preset("fairseq")
L2R = L2RConfig(rank=2, heads=4)


def trained(kind, ranks, config=XMOE):
    """Whole weights after a few steps of two routers on this rank's half of the batch."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_experts": 6, "top_k": 2}
    model = _Sum(nn.ModuleList(build_router(config, **sizes) for _ in range(2)))
    if kind == "fsdp2 of parts":  # each module that owns parameters is a unit of its own
        for module in reversed([m for m in model.modules() if m._parameters]):
            fully_shard(module)
        fully_shard(model)
    else:
        model = parallelize(model, kind, ranks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    batches = torch.randn(STEPS, 8, 16, generator=torch.Generator().manual_seed(1))
    targets = torch.randn(STEPS, 8, 6, generator=torch.Generator().manual_seed(2))
    for x, y in zip(batches, targets, strict=True):
        part = slice(ranks.rank, None, ranks.world)
        loss = (model(x[part]) - y[part]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        constrain(model)
    return {name.removeprefix("module."): w for name, w in gathered_weights(model).items()}


class _Sum(nn.Module):
    def __init__(self, routers):
        super().__init__()
        self.routers = routers

    def forward(self, x):
        return sum(router(x).logits for router in self.routers)


def standardized(rho, upstream):
    norm = MagnitudeBatchNorm(momentum=1.0)  # the running statistics are those of the batch
    rho = rho.clone().requires_grad_()
    out = norm(rho)
    (out * upstream).sum().backward()
    return out.detach(), rho.grad, norm.running_mean, norm.running_var


RHO = 19.6 + 0.003 * torch.randn(2048, generator=torch.Generator().manual_seed(3))
UP = torch.randn(2048, generator=torch.Generator().manual_seed(4))


def both(rank):
    ranks = Ranks(rank, 2, torch.device("cpu"))
    found = {kind: trained(kind, ranks) for kind in ("ddp", "fsdp2")}
    found["learned"] = trained("fsdp2", ranks, LEARNED)
    for config in (XMOE, L2R):
        found[config.kind] = trained("fsdp2 of parts", ranks, config)
    return found, standardized(RHO.chunk(2)[rank], UP.chunk(2)[rank])


def all_on_the_first(rank):
    part = slice(None) if rank == 0 else slice(0, 0)
    return standardized(RHO[part], UP[part])


def test_a_rank_without_tokens_takes_part_in_the_statistics(tmp_path):
    """Else the others wait for it; its running statistics are theirs."""
    first, second = on_two_ranks(all_on_the_first, tmp_path, within=100)
    alone = standardized(RHO, UP)
    for there, here in zip(first, alone, strict=True):
        torch.testing.assert_close(there, here)
    for there, here in zip(second[2:], alone[2:], strict=True):
        torch.testing.assert_close(there, here)


def no_tokens(rank):
    return standardized(RHO[:0], UP[:0])


def test_without_a_token_on_any_rank_the_running_statistics_stay(tmp_path):
    for _, _, mean, var in on_two_ranks(no_tokens, tmp_path, within=100):
        assert (mean.item(), var.item()) == (0, 1)


def second_derivative(rank):
    """Of the cube of a sum over the ranks of rank + 1, all ranks' losses and penalties added."""
    value = torch.tensor(rank + 1.0, requires_grad=True)
    loss = sum_over_ranks(value) ** 3
    (first,) = torch.autograd.grad(loss, value, create_graph=True)
    (second,) = torch.autograd.grad(first, value)
    return first.item(), second.item()


def test_a_sum_over_ranks_has_a_second_derivative(tmp_path):
    """2 S^3 has 6 S^2, of which there is one on each of two ranks: 24 S, with S = 3."""
    assert on_two_ranks(second_derivative, tmp_path, within=100) == ((54, 72), (54, 72))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return on_two_ranks(both, tmp_path_factory.mktemp("ranks"))


def test_constrained_anchors_keep_their_norm_under_ddp_and_fsdp2(ran):
    alone = trained("ddp", ALONE)
    for kind in ("ddp", "fsdp2"):
        found = ran[0][0][kind]
        assert found.keys() == alone.keys()
        for name, value in found.items():
            if name.endswith("anchors"):
                norms = value.norm(dim=-1)
                torch.testing.assert_close(norms, torch.full_like(norms, 1.5))
            torch.testing.assert_close(value, alone[name], atol=1e-4, rtol=1e-4, msg=kind)


def test_a_learned_temperature_trains_under_fsdp2(ran):
    """FSDP2 shards no scalar; the weights that come out are those of one process."""
    alone, found = trained("ddp", ALONE, LEARNED), ran[0][0]["learned"]
    assert {name: w.shape for name, w in found.items()} == {n: w.shape for n, w in alone.items()}
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], atol=1e-4, rtol=1e-4)
    assert any(name.endswith("log_temperature") for name in found)


@pytest.mark.parametrize("config", [XMOE, L2R], ids=lambda config: config.kind)
def test_parts_of_a_router_may_be_sharded_by_themselves(ran, config):
    alone, found = trained("ddp", ALONE, config), ran[0][0][config.kind]
    assert found.keys() == alone.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, alone[name], atol=1e-4, rtol=1e-4)


def test_variance_of_the_magnitude_over_ranks_is_not_lost_to_rounding(ran):
    """Mean 19.6, deviation 0.003: the difference of two means of squares is all rounding."""
    out, _, mean, var = standardized(RHO, UP)
    exact = RHO.double()
    wide = exact.var(unbiased=True).item()
    # |q| is rounded to 2**-20 here, and its distance from the mean is about 0.003
    room = 4 * 2**-20 / 0.003
    assert mean.item() == pytest.approx(exact.mean().item(), abs=2**-20)
    assert var.item() == pytest.approx(wide, rel=room)
    expected = (exact - exact.mean()) * (exact.var(unbiased=False) + 1e-5).rsqrt()
    assert (out - expected).abs().max() < 5 * room
    both = torch.cat([ran[0][1][0], ran[1][1][0]])
    assert (both - expected).abs().max() < 5 * room
    for rank in range(2):
        assert ran[rank][1][3].item() == pytest.approx(wide, rel=room)
    gradient = torch.cat([ran[0][1][1], ran[1][1][1]])
    wide_gradient = standardized(exact, UP.double())[1]
    assert (gradient - wide_gradient).abs().max() < 5 * room * wide_gradient.abs().max()
