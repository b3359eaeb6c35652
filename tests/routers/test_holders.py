"""Tools that give a module its tensors for its own forward alone meet every router.

accelerate's offload, FSDP2, ZeRO-3 and PEFT all work by hooks of the module that owns a parameter.
The hooks here do the same: outside of that module's forward, and of the backward of what it
returned, its parameters are empty.
"""

import copy
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from l2r import L2RConfig, XMoEConfig, build_router
from l2r.kernels import dispatch
from l2r.routers import LinearSipsConfig, Router, constrain, make_config, router_names
from l2r.routers.holder import Holder

SIZES = {"hidden_size": 16, "num_experts": 8, "top_k": 2}
CONFIGS = {
    **{name: make_config(name) for name in router_names()},
    "l2r_sips, batchnorm": L2RConfig(query_norm="batchnorm", heads=4),
    "l2r_sips, learned temperature": L2RConfig(learn_temperature=True),
    "l2r_sips, bfloat16": L2RConfig(dtype="bfloat16"),
    "linear_sips, no norm": LinearSipsConfig(query_norm="none"),
    "xmoe, fairseq": XMoEConfig.preset("fairseq"),
    "xmoe, tutel": XMoEConfig(rank=4, bias=True, normalize_query=False),
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
LEAVE_OUT = pytest.mark.filterwarnings("ignore:.*non-leaf Tensor:UserWarning")


def lend(model):
    """Empty all parameters; each module gets its own back while it or its backward runs."""
    for module in model.modules():
        owned = {p: p.data for p in module.parameters(recurse=False)}
        if not owned:
            continue

        def fill(*_, owned=owned):
            for parameter, value in owned.items():
                parameter.data = value

        def empty(module, args, output, owned=owned, fill=fill):
            for parameter, value in owned.items():
                parameter.data = value.new_empty(0)
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: fill())

        module.register_forward_pre_hook(fill)
        module.register_forward_hook(empty)
        empty(module, (), None)
    return model


def inputs():
    return torch.randn(12, 16, generator=torch.Generator().manual_seed(1))


def routed(router, x):
    """Outputs, and the gradients of x and of every parameter."""
    x = x.clone().requires_grad_()
    output = router(x)
    (output.logits.sin().sum() + output.weights.square().sum()).backward()
    gradients = {name: p.grad for name, p in router.named_parameters()}
    return output, {"x": x.grad, **gradients}


@configs
@pytest.mark.parametrize("form", ["cpu", "plain"])
def test_every_router_reads_its_tensors_in_their_owners_forward(config, form):
    router = build_router(config, **SIZES)
    lent = lend(copy.deepcopy(router))
    with dispatch.implementation(form):
        expected, gradients = routed(router, inputs())
        output, found = routed(lent, inputs())
    for value, wanted in zip(output, expected, strict=True):
        assert torch.equal(value, wanted)
    for name, gradient in gradients.items():
        assert torch.equal(found[name], gradient), name


@configs
def test_hooks_of_every_submodule_run_once_a_call(config):
    router = build_router(config, **SIZES)
    calls = []
    owners = [m for m in router.modules() if any(True for _ in m.parameters(recurse=False))]
    for module in owners:
        module.register_forward_pre_hook(lambda module, args: calls.append(("before", module)))
        module.register_forward_hook(lambda module, args, output: calls.append(("after", module)))
        module.register_full_backward_hook(lambda module, *grads: calls.append(("back", module)))
    routed(router, inputs())
    assert len(calls) == 3 * len(owners)
    assert {when: {m for w, m in calls if w == when} for when in ("before", "after", "back")} == {
        when: set(owners) for when in ("before", "after", "back")
    }


def test_a_holder_is_called_where_something_takes_part_and_only_there(monkeypatch):
    calls, own = [], Holder.forward

    def forward(self, x, run):
        calls.append(self)
        return own(self, x, run)

    monkeypatch.setattr(Holder, "forward", forward)
    router = build_router("l2r_sips", **SIZES)
    norm, projection = router.norm, router.projection
    expected = router(inputs())
    assert calls == [] and torch.equal(router.logits(inputs()), expected.logits)

    def called():
        calls.clear()
        assert torch.equal(router(inputs()).logits, expected.logits)
        assert torch.equal(router.logits(inputs()), expected.logits)
        return calls[:1] if calls[: len(calls) // 2] * 2 == calls else calls

    for register in (
        norm.register_forward_pre_hook,
        norm.register_forward_hook,
        norm.register_full_backward_hook,
        norm.register_full_backward_pre_hook,
    ):
        handle = register(lambda *_: None)
        assert called() == [norm]
        handle.remove()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    calls.clear()
    assert torch.equal(router(inputs()).logits, expected.logits) and calls == [projection, norm]
    handle.remove()
    projection.forward = functools.partial(forward, projection)  # as accelerate's offload does
    assert called() == [projection]
    del projection.forward
    norm.add_module("inside", nn.Identity())  # as a parametrization is
    assert called() == [norm]
    del norm.inside
    assert called() == []


def test_a_submodules_hook_may_replace_the_input():
    router = build_router("l2r_sips", **SIZES)
    expected = router(2 * inputs() + 1)
    for name in ("norm", "projection"):
        handle = router.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (2 * args[0] + 1, *args[1:])
        )
        assert torch.equal(router(inputs()).logits, expected.logits)
        handle.remove()


@pytest.mark.parametrize("name", ["anchors", "projection.weight"])
@pytest.mark.parametrize("kind", ["l2r_dot", "l2r_cosine", "l2r_sips", "xmoe", "low_rank"])
def test_a_weight_normed_parameter_trains_as_its_two_parts(kind, name):
    """v |g| / |v|: the gradients are those of the whole parameter through that expression."""
    router = build_router(kind, **SIZES)
    owner, _, short = name.rpartition(".")
    plain = copy.deepcopy(router)
    parametrizations.weight_norm(router.get_submodule(owner), short, dim=0)
    for step in range(3):
        router.zero_grad(), plain.zero_grad()
        x = inputs() + step
        output, found = routed(router, x)
        whole = plain.get_parameter(name)
        size, direction = [
            found[f"{owner}.".lstrip(".") + f"parametrizations.{short}.original{n}"]
            for n in range(2)
        ]
        values = dict(router.named_parameters())
        parts = [
            values[f"{owner}.".lstrip(".") + f"parametrizations.{short}.original{n}"]
            .detach()
            .requires_grad_()
            for n in range(2)
        ]
        made = torch._weight_norm(parts[1], parts[0], 0)
        with torch.no_grad():
            whole.copy_(made)
        expected, gradients = routed(plain, x)
        torch.testing.assert_close(output.logits, expected.logits)
        wanted = torch.autograd.grad(made, parts, gradients[name])
        torch.testing.assert_close(size, wanted[0])
        torch.testing.assert_close(direction, wanted[1])
        with torch.no_grad():  # a step: what is computed from the parts has to follow
            for parameter in router.parameters():
                parameter.sub_(0.1 * parameter.grad)
            for key, parameter in plain.named_parameters():
                if key != name:
                    parameter.sub_(0.1 * parameter.grad)


def test_a_constrained_norm_holds_for_parametrized_anchors():
    router = build_router(XMoEConfig(anchor_norm=1.5), **SIZES)
    parametrizations.weight_norm(router, "anchors", dim=0)
    with torch.no_grad():
        router.parametrizations.anchors.original0.mul_(3)
    constrain(router)
    norms = router.anchors.norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 1.5))


class Holds(nn.Module):
    def __init__(self, router):
        super().__init__()
        self.gate = router

    def forward(self, x):
        return self.gate(x).logits


TARGETS = [["gate.projection.weight"], ["gate.anchors"]]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("kind", ["l2r_dot", "l2r_sips", "xmoe", "low_rank", "perturbed_cosine"])
def test_lora_on_a_routers_weights_trains_and_merges(kind, targets):
    model = Holds(build_router(kind, **SIZES))
    before = model(inputs()).detach()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=[], target_parameters=targets))
    assert torch.equal(adapted(inputs()), before)  # B starts at zero
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(inputs()).sin().sum().backward()
        optimizer.step()
    moved = {name: p for name, p in adapted.named_parameters() if "lora_B" in name}
    assert moved and all(p.abs().max() > 0 for p in moved.values())
    trained = adapted(inputs()).detach()
    assert not torch.allclose(trained, before, atol=1e-3)
    with adapted.disable_adapter():
        assert torch.equal(adapted(inputs()), before)
    merged = adapted.merge_and_unload()
    assert type(merged.gate) is type(model.gate) and isinstance(merged.gate, Router)
    torch.testing.assert_close(merged(inputs()), trained)
    names = [name for name, _ in merged.named_parameters()]
    assert names == [name for name, _ in Holds(build_router(kind, **SIZES)).named_parameters()]


def test_what_lora_cannot_do_on_a_router_is_refused():
    def adapt(**options):
        model = Holds(build_router("l2r_sips", **SIZES))
        get_peft_model(model, LoraConfig(r=2, **{"target_modules": [], **options}))

    with pytest.raises(ValueError, match="use_dora"):
        adapt(target_parameters=["gate.projection.weight"], use_dora=True)
    with pytest.raises(ValueError, match="only 2d and 3d"):
        adapt(target_parameters=["gate.norm.weight"])
    with pytest.raises(ValueError, match=r"BareLinear.* is not supported"):
        adapt(target_modules=["projection"])
