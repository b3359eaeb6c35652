"""Layouts of quantized folders: what they are called, and what their weights are in memory.

transformers unpacks some while it loads them and computes with others as they are packed; a model
of the first kind is as any other.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.files.reading import read_json
from l2r.hf.models.quantized import quantization_method, quantization_values

ADAPTER = "adapter_config.json"
SHORT = {"bfloat16": "bf16", "float16": "fp16"}
_UNPACKED = (
    "mxfp4",
    "fp8",
    "mxfp8",
)  # while they are loaded, where transformers has no kernels for them
_COMPRESSED = "compressed-tensors"  # unpacked before the first call
_FLOATS = ("F64", "F32", "BF16", "F16")  # dtypes in files that hold no codes
_DTYPES = ("float64", "float32", "bfloat16", "float16")
_EXPERT = re.compile(r"\.experts\.")
_SCALES = re.compile(r"(_scales|_scale_inv|_scale|_shape|_zero_point|activation_scale)$")
_QUANTIZERS = ("bitsandbytes", "torchao", "optimum", "hqq", "gptqmodel", "awq")
# Packages without which transformers opens nothing, by method, as pip names them.
_PACKAGES: Mapping[str, Sequence[str]] = {
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "auto-round": ("auto-round",),
    "bitsandbytes": ("bitsandbytes",),
    _COMPRESSED: (_COMPRESSED,),
    "torchao": ("torchao",),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
    "aqlm": ("aqlm",),
    "eetq": ("eetq",),
    "vptq": ("vptq",),
    "gguf": ("gguf",),
}
_MODULES = {"optimum-quanto": "optimum.quanto"}  # where the module has another name

Header = Mapping[str, tuple[str, Sequence[int]]]  # dtype and shape of tensors in files, by name


@dataclass(frozen=True)
class Layout:
    """Layout in which a folder's weights are quantized.

    method: as in config.json. name: for people. bits: of the codes, in words, or empty. dtype: in
    which the model computes. packed: whether the weights stay codes in memory, or are read in one
    dtype alone. ratio: numbers that one stored number of packed codes holds.
    """

    method: str
    name: str
    bits: str
    dtype: str
    packed: bool
    ratio: int

    @property
    def takes_any_dtype(self) -> bool:
        """Say whether all weights can be read in another dtype than the folder's own."""
        return not self.packed and self.method != _COMPRESSED

    def check_dtype(self, dtype: str) -> None:
        """Raise ValueError for a dtype in which only a part of the weights would be read."""
        if dtype not in ("auto", self.dtype) and not self.takes_any_dtype:
            raise InputError(
                f"dtype must be auto or {self.dtype} for {self.name} weights: another leaves a "
                f"part of the model in {self.dtype}; got {dtype}"
            )

    def check_arithmetic(self, name: str) -> None:
        """Raise ValueError where weights cannot be rounded once more, to ``name``."""
        if not self.takes_any_dtype:
            raise InputError(
                f"against {name} has no meaning for {self.name} weights, which are codes already "
                f"and computed in {short(self.dtype)}; compare with another checkpoint, a file of "
                "routes or an engine"
            )

    def describe(self, header: Header, dtype: str = "auto") -> str:
        """Words such as ``nf4 (bitsandbytes), computed in bf16; experts are not in 4 bit``."""
        experts = [kind for name, (kind, _) in header.items() if _EXPERT.search(name)]
        whole = experts and all(kind in _FLOATS for kind in experts)
        more = f"; experts are not in {self.bits or self.name}" if whole else ""
        return f"{self.name}, computed in {short(self.dtype if dtype == 'auto' else dtype)}{more}"

    def bytes_in_memory(self, name: str, kind: str, shape: Sequence[int], size: int) -> int | None:
        """Bytes that a stored tensor of codes takes, unpacked to ``size`` a number.

        None for a tensor that is read as it is stored.
        """
        if self.packed:
            return None
        if _SCALES.search(name):
            return 0
        if kind in _FLOATS:
            return None
        numbers = math.prod(shape)
        pairs = kind == "U8" and name.endswith(("_blocks", "_packed"))
        if pairs or (kind == "I8" and self.method in _UNPACKED):  # two codes of 4 bits in a byte
            return 2 * numbers * size
        return numbers * size * (self.ratio if kind == "I32" else 1)


def layout_of(folder: Path) -> Layout | None:
    """Return the layout of a folder by its config.json; None where nothing is quantized."""
    config = read_json(folder / "config.json", strict=False)
    method = quantization_method(config)
    if method is None:
        return None
    values = quantization_values(config)
    name, bits = _named(method, values)
    found = re.search(r"[1-9]\d?", bits)
    number = int(found[0]) if found else 8
    packed = method != _COMPRESSED and (method not in _UNPACKED or _has_kernels())
    return Layout(method, _plain(name), bits, own_dtype(config), packed, max(1, 32 // number))


def own_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype that a config.json says its weights have, bfloat16 where it does not say."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    for part in parts:
        found = part.get("dtype") or part.get("torch_dtype")
        own = found.removeprefix("torch.") if isinstance(found, str) else ""
        if own in _DTYPES:
            return own
    return "bfloat16"


def short(dtype: str) -> str:
    """bf16 for bfloat16, fp16 for float16; others as they are."""
    return SHORT.get(dtype, dtype)


def check_layout(folder: Path, dtype: Any, names: Iterable[str]) -> None:
    """Raise ValueError for weights that transformers cannot open right, here or in ``dtype``.

    Those are of a quantizer that it does not know, or whose package is missing; experts that GPTQ,
    AWQ and the like packed one by one, which it would draw at random; and an adapter beside the
    weights, which it applies where PEFT is installed and leaves out elsewhere. ``names`` are those
    of the tensors in the files.
    """
    if (folder / ADAPTER).is_file():
        raise InputError(
            f"it holds an adapter beside the weights ({ADAPTER}), of which a model may or may not "
            "be meant; merge the two into a copy (peft's merge_and_unload) and take that, or move "
            f"{ADAPTER} elsewhere"
        )
    config = read_json(folder / "config.json", strict=False)
    layout = layout_of(folder)
    if layout is None:
        return
    from transformers import __version__
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    known = {re.sub("_[48]bit$", "", name) for name in AUTO_QUANTIZATION_CONFIG_MAPPING}
    if layout.method not in known:
        values = _plain(", ".join(map(str, quantization_values(config))) or "nothing")
        raise InputError(
            f"the weights are quantized by {layout.name!r}, which transformers {__version__} "
            f"does not know (quantization_config has {values}); take the checkpoint that they were "
            "quantized from"
        )
    experts = [n for n in names if re.search(r"\.experts\.\d+\..+\.qweight$", n)]
    if experts:
        raise InputError(
            f"the experts are packed one by one in {layout.name} ({experts[0]}), and transformers "
            f"{__version__} does not read those; take the checkpoint that they were quantized from"
        )
    packages = _PACKAGES.get(layout.method, ())
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        raise InputError(
            f"{layout.name} weights need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    layout.check_dtype("auto" if dtype is None else str(dtype).removeprefix("torch."))


def _is_installed(package: str) -> bool:
    module = _MODULES.get(package, package.replace("-", "_"))
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def check_blocks(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError for fp8 matrices whose last block is smaller, where they are unpacked.

    transformers divides the rows by the number of scales: it stops, or where the number divides
    them takes blocks of another size and gives other weights.
    """
    layout = layout_of(folder)
    if layout is None or layout.method not in ("fp8", "mxfp8") or layout.packed:
        return
    config = read_json(folder / "config.json", strict=False)
    size = quantization_values(config).get("weight_block_size")
    if not isinstance(size, list) or [type(n) for n in size] != [int, int] or min(size) < 1:
        return
    for name, scales in shapes.items():
        weight = name.removesuffix("_scale_inv")
        if weight == name or len(scales) != 2 or len(shapes.get(weight, ())) != 2:
            continue
        for count, length, block in zip(scales, shapes[weight], size, strict=True):
            if 1 < count == -(-length // block) and length % block:  # others have another form
                rows, columns = shapes[weight]
                raise InputError(
                    f"{weight} is {rows} x {columns}, no whole blocks of {size[0]} x {size[1]}, "
                    "and without a GPU for fp8 transformers unpacks whole blocks alone; take a "
                    "copy of the checkpoint in bf16"
                )


def packing(tensor: Any) -> str:
    """Return what packs a parameter: a package, or a dtype of codes; empty if it is whole."""
    for kind in (type(tensor), type(tensor.data)):
        package = kind.__module__.partition(".")[0]
        if package in _QUANTIZERS:
            return package
    whole = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
    return "" if whole else str(tensor.dtype).removeprefix("torch.")


def check_unpacked(model: Any, name: str) -> None:
    """Raise ValueError for a model with packed weights, which cannot be rounded to ``name``."""
    for path, parameter in model.named_parameters():
        if kind := packing(parameter):
            raise InputError(
                f"{name} arithmetic has no meaning for packed weights; {path} is in {kind}"
            )


def unpack_before_calls(model: Any) -> None:
    """Unpack what compressed-tensors would unpack in the first call of a model.

    It replaces the ``forward`` of every module then, and expects the class's own there.
    """
    for module in [part for part in model.modules() if hasattr(part, "ct_decompress_hook")]:
        compressor = module.hf_quantizer.compressor
        if getattr(module, "hf_device_map", None):
            compressor.decompress_model(module)
            continue
        from compressed_tensors.compressors import decompress_module
        from compressed_tensors.quantization import QuantizationStatus
        from compressed_tensors.quantization.utils import is_module_quantized

        for part in module.modules():
            if is_module_quantized(part):
                decompress_module(part)
        compressor.quantization_config.quantization_status = QuantizationStatus.DECOMPRESSED
        compressor.remove_decompression_hook(module)


def multiply_by_codes(model: Any) -> None:
    """Keep matrices of 4 bits of bitsandbytes as their codes say, on each kind of processor.

    With bfloat16 in AVX-512 its first product in evaluation packs a matrix anew: rows must be whole
    blocks of 32, scales are rounded to bfloat16, and no gradient passes it any more.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def matrix_shape(module: Any, path: str) -> Sequence[int]:
    """[N, D] of a module's linear map whose matrix is at ``path``, packed or not."""
    holder, matrix = _matrix(module, path)
    if packing(matrix) and hasattr(holder, "in_features"):
        return holder.out_features, holder.in_features
    return tuple(matrix.shape)


def whole_matrix(module: Any, path: str) -> Any:
    """Return the matrix [N, D] at ``path``; of a packed one what its own product computes with."""
    import torch

    holder, matrix = _matrix(module, path)
    if not packing(matrix):
        return matrix
    kind = matrix.dtype if packing(matrix) and matrix.is_floating_point() else torch.bfloat16
    eye = torch.eye(holder.in_features, dtype=kind, device=matrix.device)
    with torch.no_grad():
        return (holder(eye) - holder(torch.zeros_like(eye[:1]))).T


def _matrix(module: Any, path: str) -> tuple[Any, Any]:
    *way, name = path.split(".")
    for part in way:
        module = getattr(module, part)
    return module, getattr(module, name)


def check_version(names: Iterable[str]) -> None:
    """Raise ValueError for single experts or routers that transformers 4 packed one by one."""
    packed = packed_by_transformers_4(names)
    if packed:
        raise InputError(
            f"its experts and routers were packed one by one by transformers 4 ({packed[0]} and "
            f"{len(packed) - 1} more), and transformers 5 keeps them whole; take the checkpoint "
            "that it was quantized from, or write a copy with whole weights by transformers 4 "
            "(model.dequantize(), save_pretrained)"
        )


def packed_by_transformers_4(names: Iterable[str]) -> list[str]:
    """Names of single experts and routers that bitsandbytes packed, as transformers 4 held them."""
    states = {name.rpartition(".quant_state.")[0] for name in names} - {""}
    eights = {name.removesuffix(".SCB") for name in names if name.endswith(".SCB")}
    packed = states | {f"{name}.weight" for name in eights}
    return sorted(n for n in packed if re.search(r"\.experts\.\d+\.|\.(gate|router)\.weight$", n))


def _named(method: str, values: Mapping[str, Any]) -> tuple[str, str]:
    """Name of a method for people, and the bits of its codes in words, where they are known."""
    if method == "bitsandbytes":
        if values.get("load_in_8bit") or values.get("_load_in_8bit"):
            return "int8 (bitsandbytes)", "8 bit"
        return f"{values.get('bnb_4bit_quant_type', 'fp4')} (bitsandbytes)", "4 bit"
    if method == _COMPRESSED:
        weights = next(_weights_of_groups(values), {})
        number = weights.get("num_bits")
        number = number if type(number) is int else 8
        kind = "fp" if weights.get("type") == "float" else "int"
        return f"{kind}{number} ({_COMPRESSED})", f"{number} bit"
    if method == "torchao":
        own = _torchao_type(values.get("quant_type"))
        number = re.search(r"\d+", own)
        return f"{own} (torchao)", f"{number[0]} bit" if number else ""
    names = {"mxfp4": "MXFP4", "mxfp8": "MXFP8", "gptq": "GPTQ", "awq": "AWQ"}
    if values.get("weight_block_size"):
        names["fp8"] = "block fp8"
    bits = values.get("bits")
    return names.get(method, method), f"{bits} bit" if type(bits) is int and bits > 0 else ""


def _plain(text: str) -> str:
    """Return a text of a file as a part of one line of a message."""
    return text[:80] if text.isprintable() else repr(text[:80])


def _torchao_type(value: Any) -> str:
    """Name of torchao's kind of weights, of the first of several."""
    while isinstance(value, dict):
        value = value["_type"] if "_type" in value else next(iter(value.values()), None)
    return str(value).rpartition(".")[2].removesuffix("Config")


def _weights_of_groups(values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = values.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            yield weights


def _has_kernels() -> bool:
    """Say whether transformers computes with codes of MXFP4 and fp8: never on a CPU alone."""
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()
