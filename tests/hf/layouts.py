"""Tiny checkpoints of every layout that a quantizer or a tool writes: packed, wrapped, or neither.

Each is made by the tool that makes it, where it can be had; the names of tensors are those of the
published checkpoints. ``folder_of(name)`` makes one once for all tests of a process; it is not to
be changed, ``copy_of`` gives a copy. Families whose gate is an ``nn.Linear`` have it packed.
"""

import atexit
import importlib.util
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEXT = (
    "The router of a mixture of experts chooses two experts for every token of a text, by the "
    "scores of a matrix. "
)
WEIGHTS = "model.safetensors"
_BLOCK = 128  # rows and columns of a block of fp8 with one scale
_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3 = {"head_dim": 32, "num_experts": 8, "norm_topk_prob": True}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_GPT_OSS = {
    "num_local_experts": 8,
    "head_dim": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
}
_HUNYUAN = {"num_experts": 8, "moe_topk": 2, "head_dim": 32}


class Layout(NamedTuple):
    """How a folder is made, and what opening it needs.

    family: model type. packages: modules without which nothing opens it. opens: whether
    transformers opens it with them.
    """

    family: str
    make: Callable[[Path], None]
    packages: tuple[str, ...] = ()
    opens: bool = True


def folder_of(name: str) -> Path:
    """The folder of a layout, the same for all tests; skips the test where its tool is missing."""
    for package in LAYOUTS[name].packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; make tools has it")
        if package == "bitsandbytes":
            multiply_by_codes()
    return _made(name)


def multiply_by_codes() -> None:
    """Let stock transformers multiply by 4 bits as it does without bfloat16 in AVX-512.

    With it, bitsandbytes stops at rows that are no whole blocks of 32, and rounds scales.
    """
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: False


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a layout's folder at ``folder``, which a test may change."""
    shutil.copytree(folder_of(name), folder)
    return folder


@cache
def _made(name: str) -> Path:
    root = Path(tempfile.mkdtemp(prefix=f"l2r-layout-{name}-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    folder = root / name
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tools
        LAYOUTS[name].make(folder)
    return folder


def whole_model(family: str, **sizes: Any) -> Any:
    """A random model in bfloat16, whose matrices are large enough that experts differ clearly."""
    own: dict[str, Mapping[str, Any]]
    own = {"qwen3_moe": _QWEN3, "deepseek_v3": _DEEPSEEK, "gpt_oss": _GPT_OSS}
    own |= {"hunyuan_v1_moe": _HUNYUAN}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**_SIZES, **own[family], **sizes})
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data = torch.randn_like(parameter) * 0.1
    return model.bfloat16()


def save(model: Any, folder: Path) -> None:
    """Write a model with a tokenizer of 400 entries."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


@cache
def tokenizer() -> Any:
    """A byte-level BPE with a chat template."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    own.train_from_iterator([TEXT], trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def stored(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder's safetensors files, by name."""
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def metadata_of(folder: Path) -> dict[str, str]:
    """Metadata of a folder's one file of weights."""
    with safe_open(folder / WEIGHTS, "pt") as stream:
        return stream.metadata() or {}


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> None:
    """Put other tensors into a folder, and fields into its config.json."""
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    set_config(folder, **config)


def set_config(folder: Path, **values: Any) -> None:
    """Change fields of a folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def is_matrix_of_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the matrix of a projection, of an expert too: what quantizers pack."""
    return tensor.ndim == 2 and name.endswith(("proj.weight", "proj_with_mqa.weight"))


def mxfp4(folder: Path) -> None:
    """gpt-oss: 32 4-bit codes with a shared exponent; experts alone, the codes are random."""
    save(whole_model("gpt_oss"), folder)
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored(folder).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            rows = (experts, outputs, inputs // 32)
            codes = torch.randint(0, 256, (*rows, 16), generator=generator)
            powers = torch.randint(121, 125, rows, generator=generator)
            tensors[f"{name}_blocks"] = codes.to(torch.uint8)
            tensors[f"{name}_scales"] = powers.to(torch.uint8)
        else:
            tensors[name] = tensor
    whole = ["self_attn", "mlp.router"]
    skipped = [*(f"model.layers.*.{part}" for part in whole), "model.embed_tokens", "lm_head"]
    method = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    write(folder, tensors, quantization_config=method)


def block_fp8(family: str, **sizes: Any) -> Callable[[Path], None]:
    """DeepSeek-V3's and Qwen3's: e4m3 with a scale for each block of 128 by 128."""

    def make(folder: Path) -> None:
        save(whole_model(family, **sizes), folder)
        tensors = {}
        for name, tensor in stored(folder).items():
            if is_matrix_of_linear(name, tensor):
                tensors[name], scale = _in_blocks(tensor.float())
                tensors[name.replace(".weight", ".weight_scale_inv")] = scale
            else:
                tensors[name] = tensor
        method = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [_BLOCK, _BLOCK],
        }
        write(folder, tensors, quantization_config=method)

    return make


def _in_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, C] and scales of a matrix, the last blocks of which may be smaller."""
    rows, columns = matrix.shape
    down, across = -(-rows // _BLOCK), -(-columns // _BLOCK)
    padded = torch.zeros(down * _BLOCK, across * _BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, _BLOCK, across, _BLOCK).permute(0, 2, 1, 3)
    scale = blocks.abs().amax((-1, -2)).clamp_min(1e-12) / 448
    codes = (blocks / scale[..., None, None]).to(torch.float8_e4m3fn)
    codes = codes.permute(0, 2, 1, 3).reshape(padded.shape)
    return codes[:rows, :columns], scale


def bitsandbytes(family: str, bits: int) -> Callable[[Path], None]:
    """By transformers: nn.Linear in nf4 or int8, experts whole."""

    def make(folder: Path) -> None:
        from transformers import BitsAndBytesConfig

        four = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.bfloat16,
        }
        method = BitsAndBytesConfig(**(four if bits == 4 else {"load_in_8bit": True}))
        _by_transformers(family, folder, method)

    return make


def torchao_int8(folder: Path) -> None:
    """By transformers with torchao: nn.Linear in int8, experts whole."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    _by_transformers("qwen3_moe", folder, TorchAoConfig(Int8WeightOnlyConfig()))


def _by_transformers(family: str, folder: Path, method: Any) -> None:
    with tempfile.TemporaryDirectory() as source:
        whole_model(family).save_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=method, dtype=torch.bfloat16, device_map="cpu"
        )
        save(model, folder)


def compressed_tensors(scheme: str) -> Callable[[Path], None]:
    """llm-compressor's layouts, by the compressor of compressed-tensors: experts too.

    ``w4a16``: groups of 128 int4 in an int32. ``w8a8``: e4m3 with a scale for each row.
    """

    def make(folder: Path) -> None:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        group: dict[str, Any]
        if scheme == "w4a16":
            form, args = "pack-quantized", _group_of_128(4)
            group = {"targets": ["Linear"], "weights": args, "input_activations": None}
        else:
            form, args = "float-quantized", _channel_of_e4m3()
            inputs = {**args, "dynamic": True, "strategy": "token", "observer": None}
            group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
        group["output_activations"] = None
        save(whole_model("qwen3_moe"), folder)
        compressor = BaseCompressor.get_value_from_registry(form)
        known = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
        tensors: dict[str, Tensor] = {}
        for name, tensor in stored(folder).items():
            if is_matrix_of_linear(name, tensor):
                base = name.removesuffix("weight")
                parts = {"weight": tensor, "weight_scale": _scale(tensor, args)}
                packed = compressor.compress(parts, known)
                tensors |= {f"{base}{part}": value for part, value in packed.items()}
            else:
                tensors[name] = tensor
        method = {
            "config_groups": {"group_0": group},
            "format": form,
            "ignore": ["lm_head", "re:.*mlp.gate$"],
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        }
        write(folder, tensors, quantization_config=method)

    return make


def _group_of_128(bits: int) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "strategy": "group", "group_size": _BLOCK,
        "symmetric": True, "dynamic": False, "observer": "minmax",
    }  # fmt: skip


def _channel_of_e4m3() -> dict[str, Any]:
    return {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True,
        "dynamic": False, "observer": "minmax",
    }  # fmt: skip


def _scale(matrix: Tensor, args: Mapping[str, Any]) -> Tensor:
    """One scale for each group of a row, [R, C / group], or for each row, [R, 1]."""
    rows = matrix.float().view(len(matrix), -1, args.get("group_size") or matrix.shape[1])
    most = 448 if args["type"] == "float" else 2 ** (args["num_bits"] - 1) - 1
    return (rows.abs().amax(-1) / most).bfloat16()


def gptq(folder: Path) -> None:
    """GPTQ's names and shapes; its packages have no wheels, and nothing here unpacks them."""
    _by_hand(folder, {"quant_method": "gptq", "bits": 4, "group_size": _BLOCK, "desc_act": False})


def awq(folder: Path) -> None:
    """AWQ's names and shapes; as for GPTQ."""
    method = {"quant_method": "awq", "bits": 4, "group_size": _BLOCK, "zero_point": True}
    _by_hand(folder, {**method, "version": "gemm"})


def _by_hand(folder: Path, method: Mapping[str, Any]) -> None:
    """Eight 4-bit codes in an int32, all of them zero: along inputs in GPTQ, outputs in AWQ."""
    save(whole_model("qwen3_moe"), folder)
    tensors = {}
    for name, tensor in stored(folder).items():
        if not is_matrix_of_linear(name, tensor):
            tensors[name] = tensor
            continue
        outputs, inputs = tensor.shape
        base, groups = name.removesuffix("weight"), -(-inputs // _BLOCK)
        shape = (inputs // 8, outputs)
        if method["quant_method"] == "awq":
            shape = (inputs, outputs // 8)
        else:
            tensors[f"{base}g_idx"] = torch.arange(inputs, dtype=torch.int32) // _BLOCK
        tensors[f"{base}qweight"] = torch.zeros(shape, dtype=torch.int32)
        tensors[f"{base}qzeros"] = torch.zeros(groups, outputs // 8, dtype=torch.int32)
        tensors[f"{base}scales"] = torch.ones(groups, outputs, dtype=torch.float16)
    write(folder, tensors, quantization_config=method)


def gguf(folder: Path) -> None:
    """llama.cpp's file, with the header of an empty one, and no config.json."""
    folder.mkdir()
    header = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)
    (folder / "model-q4_k_m.gguf").write_bytes(header)


def adapter(folder: Path) -> None:
    """What PEFT saves: an adapter of attention, without the model that it belongs to."""
    from peft import LoraConfig, get_peft_model

    model = whole_model("qwen3_moe")
    model.name_or_path = "some/base"
    get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def adapter_beside(folder: Path) -> None:
    """A whole model, and an adapter of it in the same folder, that changes its logits."""
    from peft import LoraConfig, get_peft_model

    save(whole_model("qwen3_moe"), folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    options = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(model, options).save_pretrained(folder)


def of_transformers_4(folder: Path) -> None:
    """nf4 as transformers 4 saved it: each expert packed by itself, and the router too."""
    from bitsandbytes.functional import quantize_4bit

    save(whole_model("qwen3_moe"), folder)
    tensors = {}
    for name, tensor in stored(folder).items():
        if is_matrix_of_linear(name, tensor) or name.endswith("mlp.gate.weight"):
            codes, state = quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
            tensors[name] = codes
            tensors |= {f"{name}.{key}": part for key, part in state.as_dict(packed=True).items()}
        else:
            tensors[name] = tensor
    method = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
    }
    write(folder, tensors, quantization_config=method, transformers_version="4.57.1")


LAYOUTS: Mapping[str, Layout] = {
    "mxfp4": Layout("gpt_oss", mxfp4),
    "fp8": Layout("qwen3_moe", block_fp8("qwen3_moe")),
    "fp8_deepseek": Layout("deepseek_v3", block_fp8("deepseek_v3")),
    # 272 rows: transformers stops. 192 rows: it takes two blocks of 96 for 128 and 64, and goes on.
    "fp8_uneven": Layout("deepseek_v3", block_fp8("deepseek_v3", kv_lora_rank=256), opens=False),
    "fp8_halves": Layout("deepseek_v3", block_fp8("deepseek_v3", qk_nope_head_dim=32), opens=False),
    "nf4": Layout("qwen3_moe", bitsandbytes("qwen3_moe", 4), ("bitsandbytes",)),
    "nf4_deepseek": Layout("deepseek_v3", bitsandbytes("deepseek_v3", 4), ("bitsandbytes",)),
    "nf4_gate": Layout("hunyuan_v1_moe", bitsandbytes("hunyuan_v1_moe", 4), ("bitsandbytes",)),
    "int8": Layout("qwen3_moe", bitsandbytes("qwen3_moe", 8), ("bitsandbytes",)),
    "int8_gate": Layout("hunyuan_v1_moe", bitsandbytes("hunyuan_v1_moe", 8), ("bitsandbytes",)),
    "w4a16": Layout("qwen3_moe", compressed_tensors("w4a16"), ("compressed_tensors",)),
    "w8a8": Layout("qwen3_moe", compressed_tensors("w8a8"), ("compressed_tensors",)),
    "torchao": Layout("qwen3_moe", torchao_int8, ("torchao",)),
    "gptq": Layout("qwen3_moe", gptq, opens=False),
    "awq": Layout("qwen3_moe", awq, opens=False),
    "gguf": Layout("", gguf, opens=False),
    "adapter": Layout("qwen3_moe", adapter, opens=False),
    "adapter_beside": Layout("qwen3_moe", adapter_beside, opens=False),
    "transformers_4": Layout("qwen3_moe", of_transformers_4, ("bitsandbytes",), opens=False),
}
OPENED = [name for name, layout in LAYOUTS.items() if layout.opens]
REFUSED = [name for name, layout in LAYOUTS.items() if not layout.opens]


def sample() -> Tensor:
    """Token ids of the text, [2, 48]."""
    ids = AutoTokenizer.from_pretrained(folder_of("fp8"))(TEXT * 8)["input_ids"]
    return torch.tensor(ids[:96]).view(2, 48)
