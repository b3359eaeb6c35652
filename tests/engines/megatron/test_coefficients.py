"""What Megatron's balance losses add, by its own router and schedule, for the page."""

import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch

from scripts.others.coefficients import references
from scripts.others.coefficients.batch import COEFFICIENT, Added, as_weights, batch_logits
from scripts.others.coefficients.measure import Loss, measure, write

from .models import configuration, logged_losses, one_rank

from megatron.core.pipeline_parallel.schedules import forward_step  # isort: skip
from megatron.core.transformer.moe import moe_utils  # isort: skip
from megatron.core.transformer.moe.router import TopKRouter  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")
if not hasattr(moe_utils, "te_general_gemm"):  # without Transformer Engine its name is missing
    moe_utils.te_general_gemm = None


class Routers(torch.nn.Module):
    """Megatron's routers, one a layer, over the same inputs."""

    def __init__(self, kind, weights, top_k, **fields):
        super().__init__()
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None  # of a schedule before
        layers, experts, width = weights.shape
        self.config = configuration(
            num_layers=layers,
            hidden_size=width,
            num_moe_experts=experts,
            moe_router_topk=top_k,
            moe_router_load_balancing_type=kind,
            moe_aux_loss_coeff=COEFFICIENT,
            moe_z_loss_coeff=None,
            num_attention_heads=1,
            num_query_groups=1,
            **fields,
        )
        self.routers = torch.nn.ModuleList(
            TopKRouter(self.config, moe_utils.get_default_pg_collection()) for _ in weights
        )
        for number, (router, weight) in enumerate(zip(self.routers, weights, strict=True), 1):
            router.set_layer_number(number)
            with torch.no_grad():
                router.weight.copy_(weight)

    def set_input_tensor(self, tensor):
        """Nothing comes from another stage of a pipeline."""

    def forward(self, x, mask=None):
        """A loss of 0 whose backward pass gives the routers their own; x is [B, S, D]."""
        padding = {} if mask is None else {"padding_mask": ~mask.T.contiguous()}
        rows = x.transpose(0, 1).contiguous()  # [S, B, D]
        return sum(router(rows, **padding)[0].sum() * 0 for router in self.routers)

    def gradient(self):
        return torch.stack([router.weight.grad for router in self.routers])


def balance(kind, name, fields, x, weights, top_k, mask):
    logged_losses()
    routers = Routers(kind, weights, top_k, **fields)
    routers(x, mask).backward()
    return Added(COEFFICIENT * float(logged_losses()[name].sum()), routers.gradient())


def micro_batches(kind, fields, x, weights, top_k):
    """Every row as a micro-batch of Megatron's schedules."""
    routers = Routers(kind, weights, top_k, **fields)

    def step(batches, model):
        return model(next(batches)), lambda loss: (loss, {"loss": loss.detach()})

    batches = iter(x[:, None])
    for number in range(len(x)):  # the schedule itself makes a tensor on a GPU
        loss, _ = forward_step(
            step, batches, routers, len(x), None, [], routers.config, 1, current_microbatch=number
        )
        loss.backward()
    return routers.gradient()


SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False}
SEQUENCE = {"balance_scope": "sequence"}
# kind, name in Megatron's log, fields, equation, factor, ours
KINDS = (
    ("aux_loss", "load_balancing_loss", {}, references.over_k, "L / k", {}),
    ("seq_aux_loss", "seq_load_balancing_loss", {}, references.sequence, "L", SEQUENCE),
    (
        "global_aux_loss", "global_load_balancing_loss", {}, references.over_k, "L / k",
        {"balance_scope": "step"},
    ),
    (
        "seq_aux_loss", "seq_load_balancing_loss", SIGMOID, references.sigmoid_sequence, "L",
        SEQUENCE,
    ),
)  # fmt: skip


def losses():
    for kind, logged, fields, reference, factor, here in KINDS:
        yield Loss(
            f"Megatron-core: `{kind}`{', sigmoid' if fields else ''}",
            partial(balance, kind, logged, fields),
            reference,
            factor,
            here,
            router="sigmoid" if fields else "linear",
            sums_layers=True,
            micro_batches=partial(micro_batches, kind, fields),
        )


def test_coefficients(tmp_path):
    with one_rank(tmp_path):
        rows = [measure(loss) for loss in losses()]
        x, weights = as_weights(batch_logits())
        kind, logged, *_ = KINDS[0]  # the softmax of chosen logits is no part of the loss
        before, after = (
            balance(kind, logged, {"moe_router_pre_softmax": each}, x, weights, 4, None)
            for each in (True, False)
        )
        assert before.value == after.value
        assert torch.equal(before.gradient, after.gradient)
    write(Path(sys.prefix).name, metadata.version("megatron-core"), rows)
