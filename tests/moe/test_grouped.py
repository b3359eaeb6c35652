"""The grouped product where torch's own refuses, and in the dtype that autocast asks for."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from l2r.hf.models.experts_backend import register_experts
from l2r.hf.models.stock_models import one_layer
from l2r.moe import Experts, grouped
from l2r.moe.grouped import grouped_linear
from l2r.moe.token_dispatch import ByRow, assign
from tests.processes import script

ENDS = torch.tensor([2, 2, 9, 11], dtype=torch.int32)  # the second expert gets nothing


def per_segment(x, weight):
    parts = zip([0, *ENDS[:-1].tolist()], ENDS.tolist(), weight, strict=True)
    return torch.cat([x[start:end] @ matrix.T for start, end, matrix in parts])


def results(function, x, weight, upstream):
    x, weight = (t.detach().requires_grad_() for t in (x, weight))
    output = function(x, weight)
    return [output, *torch.autograd.grad(output, (x, weight), upstream)]


@pytest.mark.parametrize(("inputs", "outputs"), [(37, 21), (16, 21), (37, 16), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("product", [grouped_linear, grouped._as_operation], ids=["eager", "graph"])
def test_any_width_gives_the_product_and_its_gradients(inputs, outputs, dtype, product):
    x, weight = torch.randn(11, inputs).to(dtype), torch.randn(4, outputs, inputs).to(dtype)
    upstream = torch.randn(11, outputs).to(dtype)
    found = results(lambda x, w: product(x, w, ENDS), x, weight, upstream)
    exact = results(per_segment, x.double(), weight.double(), upstream.double())
    for got, want in zip(found, exact, strict=True):
        assert got.dtype == dtype
        # n products of order one: n roundings while summing in fp32 or wider, one on the way out
        wide = torch.promote_types(dtype, torch.float32)
        terms = max(inputs, outputs, 11)
        room = torch.finfo(dtype).eps + terms * torch.finfo(wide).eps
        assert (got.double() - want).abs().max() <= room * 4 * max(1.0, want.abs().max())


def refuse_many(monkeypatch, most):
    """Let the product refuse more than so many matrices, as it does in bf16 on a GPU."""
    product = grouped.grouped_mm

    def small(a, b, *, offs):
        assert len(offs) <= most, f"Can't process more than {most} groups"
        return product(a, b, offs=offs)

    monkeypatch.setattr(grouped, "grouped_mm", small)
    monkeypatch.setattr(grouped, "_MATRICES", most)
    monkeypatch.setattr(grouped, "_too_many", lambda x, ends: len(ends) > most)


@pytest.mark.parametrize("most", [3, 4, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_experts_than_a_product_takes_give_the_same_bits(dtype, most, monkeypatch):
    """Seven experts, the first, one in the middle and the last without a row."""
    ends = torch.tensor([0, 3, 3, 4, 9, 11, 11], dtype=torch.int32)
    x, weight = torch.randn(11, 37).to(dtype), torch.randn(7, 21, 37).to(dtype)
    upstream = torch.randn(11, 21).to(dtype)
    whole = results(lambda x, w: grouped_linear(x, w, ends), x, weight, upstream)
    refuse_many(monkeypatch, most)
    parts = results(lambda x, w: grouped_linear(x, w, ends), x, weight, upstream)
    for got, want in zip(parts, whole, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("device", "dtype", "most"),
    [("cuda", torch.bfloat16, 1023), ("cuda", torch.float32, 5000), ("cpu", torch.bfloat16, 5000)],
)
def test_only_bf16_on_a_gpu_has_a_limit_of_matrices(device, dtype, most):
    with FakeTensorMode():
        x, ends = torch.empty(4, 8, device=device, dtype=dtype), torch.empty(5000)
        assert not grouped._too_many(x, ends[:most])
        assert grouped._too_many(x, ends) == (most < 5000)
        assert grouped._too_many(x, ends[: most + 1]) == (most < 5000)


def unaligned(tensor):
    """The same values at an address that is no multiple of 16 bytes."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:]
    assert room.data_ptr() % 16
    return room.copy_(tensor.flatten()).view(tensor.shape)


def test_no_unaligned_address_reaches_the_grouped_product(monkeypatch):
    """As in a model whose weights are views of a mapped safetensors file."""
    x, weight, upstream = torch.randn(11, 16), torch.randn(4, 8, 16), torch.randn(11, 8)
    expected = results(per_segment, x, weight, upstream)
    seen = []
    product = grouped.grouped_mm

    def watched(a, b, **options):
        seen.append(a.data_ptr() % 16 or b.data_ptr() % 16)
        return product(a, b, **options)

    monkeypatch.setattr(grouped, "grouped_mm", watched)
    function = lambda x, w: grouped_linear(x, w, ENDS)  # noqa: E731
    found = results(function, unaligned(x), unaligned(weight), upstream)
    assert seen == [0]
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def watch_products(monkeypatch):
    """Dtypes of input, weight and output of every grouped product."""
    seen = []
    product = grouped.grouped_mm

    def watched(a, b, **options):
        out = product(a, b, **options)
        seen.append((a.dtype, b.dtype, out.dtype))
        return out

    monkeypatch.setattr(grouped, "grouped_mm", watched)
    return seen


@pytest.mark.parametrize(("activation", "bias"), [("swiglu", False), ("gelu", True)])
def test_autocast_decides_the_dtype_of_the_experts(monkeypatch, activation, bias):
    experts = Experts(4, 16, 8, activation=activation, bias=bias)
    weights, indices = torch.rand(9, 4).topk(2)
    x = torch.randn(9, 16, requires_grad=True)
    seen = watch_products(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = experts(x, indices, weights)
    assert output.dtype == torch.bfloat16  # as nn.Linear's
    assert seen == [(torch.bfloat16,) * 3] * 2
    output.sum().backward()
    assert {p.grad.dtype for p in experts.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.float16), torch.no_grad():
        assert experts(x, indices, weights).dtype == torch.float16
    assert experts(x, indices, weights).dtype == torch.float32
    wide = experts.double()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which leaves float64 alone everywhere
        assert wide(x.double(), indices, weights.double()).dtype == torch.float64


@pytest.mark.parametrize("tokens", [1, 9])
def test_autocast_decides_in_decoding_and_in_transformers_experts_too(monkeypatch, tokens):
    experts = one_layer(hidden_size=16, num_experts=6, top_k=2).model.layers[0].mlp.experts
    experts.config._experts_implementation = register_experts()
    weights, indices = torch.rand(tokens, 6).topk(2)
    x = torch.randn(tokens, 16)
    seen = watch_products(monkeypatch)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        by_row = isinstance(assign(x, indices, 6), ByRow)
        output = experts(x, indices, weights)
        assert by_row == (tokens == 1)
        plan = assign(x, indices, 6)
        assert plan.linear(plan.spread(x), experts.gate_up_proj).dtype == torch.bfloat16
    assert output.dtype == x.dtype  # transformers' contract: the stream's dtype
    assert all(row == (torch.bfloat16,) * 3 for row in seen)


SCRIPT = """
import torch
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rViTConfig
from l2r.hf.models import L2rViTForImageClassification
from l2r.hf.models.experts_backend import register_experts
from l2r.moe.grouped import grouped_linear

torch.manual_seed(0)
vit = L2rViTForImageClassification(L2rViTConfig(
    hidden_size=37, num_hidden_layers=1, num_attention_heads=1, intermediate_size=21,
    image_size=8, patch_size=4, moe_layers=[0], num_experts=4, num_experts_per_tok=2))
lm = L2rOlmoeForCausalLM(L2rOlmoeConfig(
    hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, vocab_size=64,
    max_position_embeddings=32, eos_token_id=0, use_cache=False, router={"kind": "l2r_sips"}))
lm.set_experts_implementation(register_experts())
inputs = {
    "vit": (vit, {"pixel_values": torch.randn(5, 3, 8, 8)}),
    "lm": (lm, {"input_ids": torch.arange(14).view(2, 7)}),
}
for name, (model, batch) in inputs.items():
    parameters = [p for p in model.parameters() if p.requires_grad]
    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
    expected = model.eval()(**batch).logits
    compiled = torch.compile(model, backend="aot_eager")(**batch).logits
    torch.testing.assert_close(compiled, expected)
    for got, want in zip(gradients(compiled), gradients(expected), strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        exported = torch.export.export(model, (), batch, strict=False).module()
        torch.testing.assert_close(exported(**batch).logits, expected)
    print(name)

def check(dtype, inputs, outputs):
    x = torch.randn(6, inputs).to(dtype).requires_grad_()
    w = torch.randn(3, outputs, inputs).to(dtype).requires_grad_()
    ends = torch.tensor([1, 1, 6], dtype=torch.int32)
    compiled = torch.compile(grouped_linear, fullgraph=True, backend="aot_eager")
    up = torch.randn(6, outputs).to(dtype)
    found, wanted = compiled(x, w, ends), grouped_linear(x, w, ends)
    torch.testing.assert_close(found, wanted)
    grads = zip(torch.autograd.grad(found, (x, w), up),
                torch.autograd.grad(wanted, (x, w), up))
    for got, want in grads:
        torch.testing.assert_close(got, want)
    meta = grouped_linear(x.detach().to("meta"), w.detach().to("meta"), ends.to("meta"))
    assert meta.shape == found.shape and meta.dtype == dtype

for dtype in (torch.float32, torch.float64, torch.bfloat16):
    check(dtype, 13, 7)
arguments = [torch.randn(6, 8, requires_grad=True), torch.randn(3, 4, 8, requires_grad=True)]
ends = torch.tensor([1, 1, 6], dtype=torch.int32)
torch.library.opcheck(torch.ops.l2r.grouped_linear.default, (*arguments, ends))
print("products")
"""


@pytest.mark.slow("a compiler")
def test_models_with_experts_compile_and_export_in_fp32(tmp_path):
    assert script(tmp_path, SCRIPT).succeed().split() == ["vit", "lm", "products"]
