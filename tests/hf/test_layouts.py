"""Quantized folders: opened as they compute, foreseen in memory, and refused by name."""

import json
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

import l2r
from l2r import L2RConfig
from l2r.analysis.routes import in_other_arithmetic
from l2r.hf.checkpoints import Placement, load_causal_lm, placement, weight_sizes
from l2r.hf.models import layout_of, whole_matrix
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import find_sites
from tests.hf.families import sample_tokens, tiny_model
from tests.hf.layout_codes import unpacked
from tests.hf.layouts import (
    OPENED,
    copy_of,
    folder_of,
    multiply_by_codes,
    sample,
    set_config,
    stored,
    write,
)
from tests.tiers import few

FAST = ("mxfp4", "fp8")
EACH = few(OPENED, FAST, "every layout")
# Their activations are rounded too, so a product with whole weights gives other numbers.
ROUNDED_INPUTS = ("int8", "int8_gate", "w8a8", "torchao")
NAMES = {
    "mxfp4": "MXFP4, computed in bf16",
    "fp8": "block fp8, computed in bf16",
    "fp8_deepseek": "block fp8, computed in bf16",
    "nf4": "nf4 (bitsandbytes), computed in bf16; experts are not in 4 bit",
    "nf4_deepseek": "nf4 (bitsandbytes), computed in bf16; experts are not in 4 bit",
    "nf4_gate": "nf4 (bitsandbytes), computed in bf16; experts are not in 4 bit",
    "int8": "int8 (bitsandbytes), computed in bf16; experts are not in 8 bit",
    "int8_gate": "int8 (bitsandbytes), computed in bf16; experts are not in 8 bit",
    "w4a16": "int4 (compressed-tensors), computed in bf16",
    "w8a8": "fp8 (compressed-tensors), computed in bf16",
    "torchao": "Int8WeightOnly (torchao), computed in bf16; experts are not in 8 bit",
}
UNPACKED = ("mxfp4", "fp8", "fp8_deepseek")


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=sample(), use_cache=False).logits


@pytest.mark.parametrize("layout", EACH)
def test_a_folder_computes_what_transformers_computes(layout):
    folder = folder_of(layout)
    ours, theirs = (
        load(folder, dtype="auto").eval()
        for load in (l2r.load_pretrained, AutoModelForCausalLM.from_pretrained)
    )
    assert torch.equal(logits_of(ours), logits_of(theirs))


SAME_PRODUCTS = [name for name in OPENED if name not in (*ROUNDED_INPUTS, "nf4_gate")]


@pytest.mark.parametrize("layout", few(SAME_PRODUCTS, FAST, "every layout"))
def test_the_weights_are_those_that_the_codes_say(layout, tmp_path):
    """Equal to the bit: the same products of the same numbers."""
    copy = copy_of(layout, tmp_path / "copy")
    write(copy, unpacked(stored(copy)), quantization_config=None)
    whole = AutoModelForCausalLM.from_pretrained(copy, dtype="auto").eval()
    ours = l2r.load_pretrained(folder_of(layout), dtype="auto")
    assert torch.equal(logits_of(ours), logits_of(whole))


def test_a_packed_gate_has_its_true_sizes_and_weights():
    folder = folder_of("nf4_gate")
    model = l2r.load_pretrained(folder, dtype="auto")
    weights = unpacked(stored(folder))
    for site in find_sites(model):
        assert site.sizes == {"num_experts": 8, "hidden_size": 128, "top_k": 2}
        stored_weight = weights[f"{site.path}.wg.weight"]
        assert torch.equal(whole_matrix(site.router, "wg.weight"), stored_weight)
    with torch.no_grad(), l2r.record(model) as recorder:
        model(sample())
    assert recorder.fingerprint.num_experts == 8 and recorder.fingerprint.top_k == 2


@pytest.mark.slow("every layout")
def test_a_packed_gate_of_8_bits_has_its_weights():
    """Codes with a scale for each row, as the model's own product rounds them to bfloat16."""
    tensors = stored(folder_of("int8_gate"))
    model = l2r.load_pretrained(folder_of("int8_gate"), dtype="auto")
    for site in find_sites(model):
        assert site.sizes == {"num_experts": 8, "hidden_size": 128, "top_k": 2}
        name = f"{site.path}.wg.weight"
        whole = (
            tensors[name].float() * tensors[name.replace("weight", "SCB")].float()[:, None] / 127
        )
        got = whole_matrix(site.router, "wg.weight").float()
        torch.testing.assert_close(got, whole, rtol=2**-7, atol=0)  # two roundings of 8 bits


def test_a_processor_with_bfloat16_in_avx_512_computes_with_the_same_codes(monkeypatch):
    """bitsandbytes would pack each matrix anew in the first call, and stop at a gate of 8 rows."""
    from bitsandbytes.nn import modules

    folder = folder_of("nf4_gate")
    plain = l2r.load_pretrained(folder, dtype="auto")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    model = l2r.load_pretrained(folder, dtype="auto")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert torch.equal(logits_of(model), logits_of(plain))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    states = model(input_ids=sample(), output_hidden_states=True, use_cache=False).hidden_states
    assert torch.autograd.grad(states[-1].sum(), states[0])[0].abs().sum() > 0


@pytest.mark.slow("packs a model with bitsandbytes")
@pytest.mark.parametrize(
    ("family", "opens"), [("afmoe", True), ("phimoe", True), ("longcat_flash", False)]
)
def test_other_families_with_linear_gates(family, opens, tmp_path):
    """LongCat-Flash multiplies by the codes of its gate, so transformers' own forward fails."""
    from transformers import BitsAndBytesConfig

    multiply_by_codes()
    tiny_model(FAMILIES[family]).bfloat16().save_pretrained(tmp_path / "whole")
    method = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": method, "dtype": torch.bfloat16}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", **options).eval()
    model.save_pretrained(tmp_path / "packed")
    if not opens:
        with pytest.raises(RuntimeError), torch.no_grad():
            model(sample_tokens())
        with pytest.raises(ValueError, match=r"router model\.layers\.0\.mlp\.router is packed"):
            l2r.load_pretrained(tmp_path / "packed")
        return
    ours = l2r.load_pretrained(tmp_path / "packed")
    assert [site.sizes["num_experts"] for site in find_sites(ours)] == [8] * len(find_sites(model))
    with torch.no_grad():
        assert torch.equal(ours(sample_tokens()).logits, model(sample_tokens()).logits)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({"text_config": {"dtype": "float16"}}, "float16"),
        ({"vision_config": {}, "text_config": {"torch_dtype": "float32"}}, "float32"),
        ({"torch_dtype": "torch.float16", "text_config": {"dtype": "float32"}}, "float16"),
        ({}, "bfloat16"),
    ],
)  # fmt: skip
def test_the_dtype_of_a_wrapper_may_stand_in_its_texts_part_alone(dtypes, expected, tmp_path):
    folder = copy_of("fp8", tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    kept = {n: v for n, v in config.items() if n not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps({**kept, **dtypes}))
    assert layout_of(folder).dtype == expected


@pytest.mark.parametrize("layout", EACH)
def test_the_layout_is_named(layout):
    assert weight_sizes(folder_of(layout)).layout == NAMES[layout]


def bytes_of(tensor):
    """Bytes of a tensor, of torchao's those of its parts: it has the dtype of the whole."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.numel() * tensor.itemsize
    return sum(bytes_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])


@pytest.mark.parametrize("layout", EACH)
def test_memory_is_foreseen(layout):
    """Of parameters and buffers that a file holds; scales that stay beside whole weights are 2%."""
    folder = folder_of(layout)
    model, _ = load_causal_lm(folder, placement=Placement("auto"))
    held = sum(map(bytes_of, filter(torch.is_tensor, model.state_dict().values())))
    assert weight_sizes(folder).held == pytest.approx(held, rel=0.02)
    if layout_of(folder).takes_any_dtype or "compressed" in layout_of(folder).name:
        assert weight_sizes(folder).held > 1.5 * weight_sizes(folder).stored


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_an_integer_of_packed_codes_holds_as_many_as_their_bits_say(bits, tmp_path):
    values = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    groups = {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}
    config = {"dtype": "bfloat16", "quantization_config": {**values, "config_groups": groups}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = layout_of(tmp_path)
    assert layout.name == f"int{bits} (compressed-tensors)"
    packed = (24, 64 * bits // 32)  # of a matrix of 24 x 64
    assert layout.bytes_in_memory("q_proj.weight_packed", "I32", packed, 2) == 24 * 64 * 2


@pytest.mark.parametrize("layout", few(UNPACKED, FAST, "every layout"))
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_unpacked_weights_are_read_in_any_dtype(layout, dtype):
    """All of them: half of a model in bf16 is no reference. Norms may stay in float32."""
    folder = folder_of(layout)
    model, _ = load_causal_lm(folder, placement=Placement(dtype))
    kinds = {parameter.dtype for parameter in model.parameters()}
    assert kinds <= {getattr(torch, dtype), torch.float32}
    held = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    assert weight_sizes(folder, dtype).held == pytest.approx(held, rel=0.02)


CODES = [name for name in OPENED if name not in UNPACKED]


@pytest.mark.parametrize("layout", few(CODES, ("nf4",), "every layout"))
def test_codes_are_read_in_their_own_dtype_alone(layout):
    folder = folder_of(layout)
    name = layout_of(folder).name
    for dtype in (torch.float32, torch.float16, "float32"):
        with pytest.raises(ValueError, match="dtype must be auto or bfloat16 for") as said:
            l2r.load_pretrained(folder, dtype=dtype)
        assert name in str(said.value) and str(said.value).count("\n") == 0
    l2r.load_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("layout", few([n for n in CODES if n[0] != "w"], ("nf4",), "every layout"))
def test_codes_are_not_rounded_once_more(layout):
    model = l2r.load_pretrained(folder_of(layout), dtype="auto")
    for name in ("bf16", "int8", "fp8"):
        with pytest.raises(
            ValueError, match=f"{name} arithmetic has no meaning for packed weights"
        ):
            in_other_arithmetic(model, name)


@pytest.mark.slow("every layout")
@pytest.mark.parametrize("layout", ["w4a16", "w8a8"])
def test_routes_of_the_first_call_of_a_compressed_model(layout):
    """compressed-tensors replaces every forward in the first call; the blocks are open before."""
    folder = folder_of(layout)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval() for _ in range(3)]
    logits = logits_of(models[0])
    with torch.no_grad(), l2r.record(models[1]) as recorder:
        assert torch.equal(models[1](sample(), use_cache=False).logits, logits)
    with torch.no_grad(), l2r.replay(models[2], recorder.routes()):
        assert torch.equal(models[2](sample(), use_cache=False).logits, logits)
    with torch.no_grad(), l2r.record(models[0]) as again:
        models[0](sample(), use_cache=False)
    assert (again.routes().experts == recorder.routes().experts).all()


@pytest.mark.parametrize("layout", EACH)
def test_routers_of_ours_learn_and_are_captured_in_packed_models(layout):
    """What `l2r swap --fit` runs in memory: the fit, and what the new routers return."""
    model = AutoModelForCausalLM.from_pretrained(folder_of(layout), dtype="auto").eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        l2r.swap_routers(model, L2RConfig(rank=4, heads=2))
    quiet = {"held_out": [sample()], "report": lambda *given, **named: None}
    report = l2r.fit_routers(model, [sample()] * 20, **quiet)
    for layer in report.layers:
        assert layer.divergence < layer.divergence_before / 2
        assert layer.agreement > layer.agreement_before
    with torch.no_grad(), l2r.capture(model) as captured:
        model(sample(), use_cache=False)
    assert [tuple(x.shape) for x in captured.logits()] == [(96, 8), (96, 8)]


def test_fp8_blocks_that_transformers_would_read_wrong():
    """192 rows have blocks of 128 and 64; transformers takes 96 and 96, without a word."""
    folder = folder_of("fp8_halves")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    name = "model.layers.0.self_attn.q_b_proj.weight"
    right = unpacked(stored(folder))[name]
    assert right.shape[0] == 192 and not torch.equal(theirs[name], right)
    assert torch.equal(theirs[name][:96], right[:96])
    with pytest.raises(
        ValueError, match=r"[qv]_b_proj\.weight is 192 x 64, no whole blocks of 128"
    ):
        l2r.load_pretrained(folder)


def test_an_unknown_quantizer_and_a_missing_package_are_named(tmp_path, monkeypatch):
    copy = copy_of("fp8", tmp_path / "copy")
    set_config(copy, quantization_config={"quant_method": "plum", "grade": 3})
    with pytest.raises(
        ValueError, match=r"quantized by 'plum', which transformers .* has quant_method, grade"
    ):
        l2r.load_pretrained(copy)
    set_config(copy, quantization_config={"quant_method": "hqq", "bits": 4})
    with pytest.raises(ValueError, match=r"hqq weights need hqq: pip install hqq$"):
        l2r.load_pretrained(copy)
    set_config(copy, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ValueError, match=r"GPTQ weights need .*pip install"):
        l2r.load_pretrained(copy)


@pytest.mark.parametrize("layout", ["mxfp4", "nf4"])
def test_weights_that_do_not_fit(layout, monkeypatch):
    """By what they are in memory: unpacked ones stay on disk, codes are refused."""
    folder, lines = folder_of(layout), []
    room = int(
        (weight_sizes(folder).stored + weight_sizes(folder).held) / 2 / placement._MEMORY_SHARE
    )
    room = (
        room
        if layout == "mxfp4"
        else int(0.8 * weight_sizes(folder).held / placement._MEMORY_SHARE)
    )
    monkeypatch.setattr(placement, "available_memory", lambda: room)
    if layout == "mxfp4":
        model, _ = load_causal_lm(folder, placement=Placement("auto", report=lines.append))
        assert "do not fit" in lines[0] and "disk" in model.hf_device_map.values()
        monkeypatch.undo()
        assert torch.equal(logits_of(model), logits_of(l2r.load_pretrained(folder, dtype="auto")))
    else:
        with pytest.raises(
            ValueError, match=r"and nf4 \(bitsandbytes\) weights cannot stay on disk"
        ):
            load_causal_lm(folder, placement=Placement("auto"))


ABSURD = [
    {"quant_method": "plum\n\x1b[31m" * 40},
    {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": "x"}}}},
    {"quant_method": "compressed-tensors", "config_groups": [1]},
    {"quant_method": "torchao", "quant_type": {"default": {}}},
    {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "a\nb"},
    {"quant_method": "fp8", "weight_block_size": [0, -1]},
    {"quant_method": "gptq", "bits": 0},
    ["gptq"],
]


@pytest.mark.parametrize("method", ABSURD)
def test_an_absurd_method_is_one_line_and_an_error_that_says_so(method, tmp_path):
    copy = copy_of("fp8", tmp_path / "copy")
    set_config(copy, quantization_config=method, dtype="float8_e4m3fn")
    assert weight_sizes(copy).layout.isprintable() and weight_sizes(copy).layout
    assert weight_sizes(copy).held > 0
    with pytest.raises(ValueError, match="cannot load a language model"):
        l2r.load_pretrained(copy)
