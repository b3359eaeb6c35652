"""Router losses of any model's captured outputs, against the equations written out in float64."""

import copy
import math
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import l2r
from l2r import build_router, capture
from l2r.engines.trainer.own_loss import OwnLossWeights
from l2r.functional import sequence_balance_loss
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import running_sites
from l2r.routers import RouterOutput, StepLoads, router_losses, step_loads
from l2r.routers.capture import RouterSite
from l2r.routers.model_calls import ModelCall
from tests.hf.families import each_rule, each_rule_and_dtype, sample_tokens, tiny_model
from tests.processes import Running, on_ranks
from tests.routers.test_capture import model_of
from tests.second_device import second_device

GATES = {  # affinities by the family's paper or code: sigmoid, or sqrt(softplus); else softmax
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda z: nn.functional.softplus(z).sqrt(),
    "softmax": lambda z: z.softmax(-1),
}


def balance_by_hand(logits, indices, keep):
    """N sum_i (share of tokens that chose i) (mean softmax probability of i), Eq. 34."""
    z, chosen = logits.detach().double()[keep], indices[keep]
    counts = torch.bincount(chosen.flatten(), minlength=z.shape[1]).double()
    return float(z.shape[1] * (counts / len(z) * z.softmax(-1).mean(0)).sum())


def sequence_by_hand(logits, k, gate, documents):
    """DeepSeek-V3's Eq. 17 to 20, document by document; ``documents``: lists of token numbers.

    Those of the k largest affinities count, whatever a bias or groups choose.
    """
    z, found = logits.detach().double(), []
    scores = GATES[gate](z)
    affinities = scores / scores.sum(-1, keepdim=True)
    experts = z.shape[1]
    indices = z.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    for tokens in documents:
        counts = torch.bincount(indices[tokens].flatten(), minlength=experts).double()
        f = experts / (k * len(tokens)) * counts
        found.append(float((f * affinities[tokens].mean(0)).sum()))
    return sum(found) / len(found)


@each_rule_and_dtype(FAMILIES)
def test_losses_of_every_family_are_the_equations_and_train_its_routers(name, dtype, tmp_path):
    model, ids = model_of(name, dtype, tmp_path).train(), sample_tokens()
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    with capture(model) as captured:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    keep, rows = mask.flatten().bool(), [list(range(12)), list(range(12, 20))]
    sites = {site.path: site for site in running_sites(model) if not site.by_token}
    calls = [(sites[p], o) for p, c in captured.outputs.items() if p in sites for o in c]
    calls = [(s, o._replace(logits=o.logits.detach())) for s, o in calls]
    wanted = {
        "balance": [balance_by_hand(o.logits, o.indices, keep) for _, o in calls],
        "z": [float(o.logits.double()[keep].logsumexp(-1).square().mean()) for _, o in calls],
        "sequence": [
            sequence_by_hand(o.logits, o.indices.shape[1], s.selection.gate, rows) for s, o in calls
        ],
    }
    found = router_losses(captured, balance=0.5, z=0.25)
    balance, z, each = (sum(values) / len(values) for values in wanted.values())
    # sums of float32 numbers of order one; logits are given, so that bfloat16 adds nothing
    assert float(found.balance) == pytest.approx(balance, rel=1e-5)
    assert float(found.z) == pytest.approx(z, rel=1e-5)
    assert found.total.item() == pytest.approx(0.5 * balance + 0.25 * z, rel=1e-5)
    sequence = router_losses(captured, balance=1, balance_scope="sequence")
    assert sequence.total.item() == pytest.approx(each, rel=1e-5)
    (found.total + sequence.total).backward()
    for site in sites.values():
        gradients = [p.grad for p in site.router.parameters() if p.grad is not None]
        assert any(g.abs().max() > 0 for g in gradients), site.path


def drawn(tokens=24, experts=8, k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    return logits, logits.topk(k).indices


def test_a_balanced_sequence_has_a_loss_of_one_and_a_collapsed_one_n_over_k():
    even = torch.arange(16).view(8, 2) % 8
    flat = torch.full((8, 8), 1 / 8)
    documents = torch.zeros(8, dtype=torch.int64)
    assert float(sequence_balance_loss(flat, even, documents)) == pytest.approx(1)
    sure = nn.functional.one_hot(torch.zeros(8, dtype=torch.int64), 8).float()
    one = torch.tensor([[0, 1]] * 8)
    assert float(sequence_balance_loss(sure, one, documents)) == pytest.approx(8 / 2)
    # two sequences, each collapsed onto experts of its own: even over the batch alone
    both = torch.cat([one, one + 2, one + 4, one + 6])
    probs = torch.zeros(32, 8).scatter(1, both, 0.5)
    numbers = torch.arange(4).repeat_interleave(8)
    assert float(sequence_balance_loss(probs, both, numbers)) == pytest.approx(8 / 2)
    assert float(sequence_balance_loss(probs, both, numbers * 0)) == pytest.approx(1)


def test_gradients_of_the_sequence_loss_are_those_of_autograd_in_float64():
    logits, indices = drawn()
    documents = torch.tensor([0] * 5 + [1] * 12 + [2] * 7)
    mask = torch.arange(24) % 5 != 0
    ours = logits.clone().requires_grad_()
    sequence_balance_loss(ours.sigmoid() / ours.sigmoid().sum(-1, True), indices, documents,
                          mask=mask).backward()  # fmt: skip
    theirs = logits.double().requires_grad_()
    parts = []
    for number in range(3):
        keep = (documents == number) & mask
        scores = theirs[keep].sigmoid()
        p = (scores / scores.sum(-1, True)).mean(0)
        f = torch.bincount(indices[keep].flatten(), minlength=8) * 8 / (2 * int(keep.sum()))
        parts.append((f * p).sum())
    (sum(parts) / 3).backward()
    torch.testing.assert_close(ours.grad, theirs.grad.float(), rtol=1e-5, atol=1e-8)


def test_refusals_of_the_sequence_loss():
    logits, indices = drawn()
    with pytest.raises(ValueError, match="lists of one length"):
        sequence_balance_loss([logits], [indices, indices], torch.zeros(24, dtype=torch.int64))
    with pytest.raises(ValueError, match="one number per token; got 3 for 24"):
        sequence_balance_loss(logits, indices, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("told", ["position_ids", "borders", "rows"])
def test_packed_documents_are_told_apart(told):
    """Two documents of 5 and 7 tokens in a row of 12, or rows of their own; the same loss."""
    model, ids = tiny_model(FAMILIES["deepseek_v3"]), sample_tokens()[:1]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    arguments = {"input_ids": ids, "position_ids": positions}
    if told == "borders":
        arguments["cu_seq_lens_q"] = torch.tensor([0, 5, 12], dtype=torch.int32)
        arguments.pop("position_ids")
    if told == "rows":
        arguments = {"input_ids": ids.view(2, 6)}
        documents = [list(range(6)), list(range(6, 12))]
        arguments["attention_mask"] = torch.ones(2, 6, dtype=torch.int64)
    else:
        documents = [list(range(5)), list(range(5, 12))]
    with torch.no_grad(), capture(model) as captured:
        model(**arguments, use_cache=False)
    found = router_losses(captured, balance=1, balance_scope="sequence")
    ((output,),) = captured.outputs.values()
    wanted = sequence_by_hand(output.logits, output.indices.shape[1], "sigmoid", documents)
    assert float(found.balance) == pytest.approx(wanted, rel=1e-5)


def test_rows_without_masks_and_positions_are_documents_where_labels_or_inputs_say_so():
    model, ids = tiny_model(FAMILIES["deepseek_v3"]), sample_tokens()
    with torch.no_grad(), capture(model) as captured:
        model(ids, use_cache=False)
    found = router_losses(captured, balance=1, balance_scope="sequence")
    ((output,),) = captured.outputs.values()
    rows = [list(range(12)), list(range(12, 24))]
    wanted = sequence_by_hand(output.logits, output.indices.shape[1], "sigmoid", rows)
    assert float(found.balance) == pytest.approx(wanted, rel=1e-5)


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("variant", ["paper", "olmoe", "hf", "tutel"])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_step_does_not_depend_on_how_it_is_cut(name, variant):
    """Micro-batches with different numbers of real tokens, against the step in one batch."""
    model, ids = tiny_model(FAMILIES[name]).train(), sample_tokens(3)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask[2, 9:] = 0
    settings = {"balance": 1, "balance_variant": variant, "balance_scope": "step"}
    with capture(model) as captured:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    router_losses(captured, **settings).total.backward()
    whole = gradients(model)
    parts = [slice(0, 1), slice(1, 3)]
    with torch.no_grad(), step_loads(model, first_choice=variant == "tutel") as loads:
        for part in parts:
            model(input_ids=ids[part], attention_mask=mask[part], use_cache=False)
    assert loads.micro_batches == 2
    for part in parts:
        with capture(model) as captured:
            model(input_ids=ids[part], attention_mask=mask[part], use_cache=False)
        (router_losses(captured, **settings, loads=loads).total / 2).backward()
    cut = gradients(model)
    assert whole.keys() == cut.keys()
    for key, gradient in whole.items():
        near = 64 * torch.finfo(torch.float32).eps * max(1e-3, float(gradient.abs().max()))
        torch.testing.assert_close(cut[key], gradient, rtol=0, atol=near)


def test_the_loads_of_a_step_are_those_of_the_largest_logit_and_of_real_tokens_on_any_device():
    """Families return the k unsorted; a mask may lie elsewhere than the layer."""
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    indices = torch.tensor([[2, 1], [0, 2], [1, 2]])
    mask = torch.tensor([True, True, False])
    call = Mock(spec=ModelCall, real=lambda tokens: mask)
    site = Mock(spec=RouterSite, path="gate")
    with second_device() as device:
        away = RouterOutput(logits.to(device), logits.to(device)[:, :2], indices.to(device))
        loads = {first: StepLoads(first) for first in (False, True)}
        for load in loads.values():
            load.add(site, away.logits, away, call)
            assert load.counts["gate"].device == load.tokens["gate"].device == device
        assert loads[False].counts["gate"].tolist() == [1, 1, 2]
        assert loads[True].counts["gate"].tolist() == [1, 1, 0]
        assert loads[True].tokens["gate"].tolist() == 2


def own_off(model):
    return OwnLossWeights(object(), model).off()


@pytest.mark.parametrize("name", each_rule(FAMILIES))
def test_the_family_s_own_loss_is_off_inside_and_as_it_was_after(name):
    model, ids = tiny_model(FAMILIES[name]), sample_tokens()
    call = {"input_ids": ids, "use_cache": False}
    if "labels" in model.forward.__code__.co_varnames and model.can_generate():
        call["labels"] = ids
    names = [m for m in model.modules() if "router_aux_loss_coef" in vars(m)]
    for module in names:
        module.router_aux_loss_coef = 10.0
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "router_aux_loss_coef"):
            config.router_aux_loss_coef = 10.0
    with torch.no_grad():
        plain = model(**call, output_router_logits=False)
        on = model(**call, output_router_logits=True)
        with own_off(model):
            off = model(**call, output_router_logits=True)
        again = model(**call, output_router_logits=True)
    for one, other in ((off, plain), (again, on)):
        if getattr(one, "loss", None) is not None:
            assert float(one.loss) == float(other.loss)
    for module in names:
        assert module.router_aux_loss_coef == 10.0


def test_calls_without_gradients_do_not_count_while_gradients_are_on():
    model, ids = tiny_model(FAMILIES["mixtral"]).train(), sample_tokens()
    with capture(model) as both:
        with torch.no_grad():
            model(ids.flip(1), use_cache=False)
        model(ids, use_cache=False)
    with capture(model) as one:
        model(ids, use_cache=False)
    assert router_losses(both).balance == router_losses(one).balance


def test_what_cannot_train_routers_is_refused():
    model, ids = tiny_model(FAMILIES["mixtral"]).train(), sample_tokens()
    with capture(model) as captured:
        pass
    with pytest.raises(ValueError, match="no router output was recorded"):
        router_losses(captured)
    site = running_sites(model)[0]
    hook = site.router.register_forward_hook(lambda m, a, out: (out[0].detach(), *out[1:]))
    with capture(model) as captured:
        model(ids, use_cache=False)
    hook.remove()
    with pytest.raises(ValueError, match="router outputs carry no gradient"):
        router_losses(captured)
    for settings, message in (
        ({"balance": -1.0}, "balance must be >= 0"),
        ({"z": math.nan}, "z must be >= 0"),
        ({"balance_scope": "sequence", "balance_variant": "olmoe"}, "has no variants"),
    ):
        with pytest.raises(ValueError, match=message):
            router_losses(captured, **settings)


def test_layers_that_choose_by_token_ids_do_not_count():
    model = tiny_model(FAMILIES["deepseek_v4"])
    hashed = [s for s in running_sites(model) if s.by_token]
    assert hashed
    with torch.no_grad(), capture(model) as captured:
        model(sample_tokens(), use_cache=False)
    found = float(router_losses(captured).balance)
    for site in hashed:
        captured.outputs.pop(site.path)
    assert found == float(router_losses(captured).balance)
    assert copy.copy(captured).logits()


def test_default_weights_are_what_the_evidence_prefers():
    model = tiny_model(FAMILIES["mixtral"]).train()
    with capture(model) as captured:
        model(sample_tokens(), use_cache=False)
    found = router_losses(captured)
    assert found.total.item() == pytest.approx(0.01 * float(found.balance))
    assert l2r.router_losses is router_losses


def rank_batches():
    ids = sample_tokens(4)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask[3, 9:] = 0
    return ids, mask


def _on_a_rank(folder):
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model, (ids, mask) = tiny_model(FAMILIES["qwen3_moe"]).train(), rank_batches()
    parts = [slice(2 * rank + n, 2 * rank + n + 1) for n in range(2)]
    with torch.no_grad(), step_loads(model) as loads:
        for part in parts:
            model(input_ids=ids[part], attention_mask=mask[part], use_cache=False)
    for part in parts:
        with capture(model) as captured:
            model(input_ids=ids[part], attention_mask=mask[part], use_cache=False)
        found = router_losses(captured, balance=1, balance_scope="step", loads=loads)
        (found.total / 2).backward()
    torch.save(gradients(model), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow("two processes")
def test_a_step_over_two_ranks_is_that_of_one_batch(tmp_path):
    on_ranks(2, tmp_path / "output", Running, _on_a_rank, tmp_path)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model, (ids, mask) = tiny_model(FAMILIES["qwen3_moe"]).train(), rank_batches()
    with capture(model) as captured:
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    router_losses(captured, balance=1, balance_scope="step").total.backward()
    for key, gradient in gradients(model).items():
        near = 64 * torch.finfo(torch.float32).eps * max(1e-3, float(gradient.abs().max()))
        torch.testing.assert_close((one[key] + two[key]) / 2, gradient, rtol=0, atol=near)


def test_the_sequence_loss_counts_the_largest_affinities_not_what_a_bias_chose():
    """DeepSeek-V3's Eq. 18: a bias that evens the load must not hide uneven affinities."""
    model, ids = tiny_model(FAMILIES["deepseek_v3"]), sample_tokens()[:1]
    (site,) = running_sites(model)
    with torch.no_grad():
        site.router.e_score_correction_bias.copy_(torch.linspace(0, 5, 8))
    with torch.no_grad(), capture(model) as captured:
        model(ids, use_cache=False, attention_mask=torch.ones_like(ids))
    ((output,),) = captured.outputs.values()
    k = output.indices.shape[1]
    assert not torch.equal(
        output.indices.sort().values, output.logits.topk(k).indices.sort().values
    )
    found = router_losses(captured, balance=1, balance_scope="sequence")
    wanted = sequence_by_hand(output.logits, k, "sigmoid", [list(range(ids.shape[1]))])
    assert float(found.balance) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("order", [1, -1])
def test_layers_of_different_experts_and_k_have_the_mean_of_their_losses(order):
    sizes = [(8, 2), (16, 4)][::order]
    model = nn.Sequential(
        *(build_router("linear", hidden_size=8, num_experts=n, top_k=k) for n, k in sizes)
    )
    x = torch.randn(20, 8)
    with capture(model) as captured:
        outputs = [router(x) for router in model]
    found = router_losses(captured, balance=1, z=1, margin=1, z_variant="olmoe")
    for name, each in (
        ("balance", [balance_by_hand(o.logits, o.indices, slice(None)) for o in outputs]),
        ("z", [o.logits.logsumexp(-1).square().mean().item() / o.indices.shape[1]
               for o in outputs]),
    ):  # fmt: skip
        assert getattr(found, name).item() == pytest.approx(sum(each) / 2, rel=1e-5)


def test_a_configuration_that_is_a_dict_holds_no_other():
    """As of a module of one's own; ``vars`` of it is a TypeError."""
    model = nn.Linear(2, 2)
    model.config = {"hidden": 64}
    with OwnLossWeights(object(), model).off():
        assert model.config == {"hidden": 64}


def test_counting_leaves_running_statistics_as_they_were():
    """BatchNorm of |q| moves in a training forward, with gradients or without."""
    sizes = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
    router = build_router("l2r_sips", **sizes, query_norm="batchnorm").train()
    model = nn.Sequential(router)
    before = {name: value.clone() for name, value in router.named_buffers()}
    with torch.no_grad(), step_loads(model) as loads:
        router(torch.randn(20, 8))
    assert loads.counts and before
    for name, value in router.named_buffers():
        assert torch.equal(value, before[name]), name


def test_loads_of_another_variant_or_scope_are_refused():
    """The first choice counts for tutel, all k for others: the loss would be k times too large."""
    model = nn.Sequential(build_router("linear", hidden_size=8, num_experts=4, top_k=2))
    x = torch.randn(20, 8)
    for first, variant in ((False, "tutel"), (True, "paper")):
        with torch.no_grad(), step_loads(model, first_choice=first) as loads:
            model(x)
        with capture(model) as captured:
            model(x)
        with pytest.raises(ValueError, match=f"got first_choice={first} and '{variant}'"):
            router_losses(captured, balance_variant=variant, balance_scope="step", loads=loads)
        with pytest.raises(ValueError, match="loads are for balance_scope='step'; got"):
            router_losses(captured, loads=loads)
