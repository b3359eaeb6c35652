"""Read a model's weights from a folder, whole: the one place that calls ``from_pretrained``.

transformers draws what is missing at random and says so in a log alone. Here a folder is refused
whose weights are missing, left over, of other shapes or not finite, and one whose config.json
describes a model that its files cannot hold, before memory is taken for it.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from l2r.errors import InputError
from l2r.files.reading import indexed_files, read_json, refuse_other_folders
from l2r.hf.models.layouts import (
    check_blocks,
    check_layout,
    check_version,
    multiply_by_codes,
    packing,
    unpack_before_calls,
)
from l2r.hf.models.opening import CODE, config_with_code

Shapes = Mapping[str, tuple[int, ...]]

_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_WIDTHS = ("hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head")
_COUNTS = (  # 0 in models that have none
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_labels",
)  # fmt: skip
# Counts of lists and modules that transformers makes one by one: far above any model's, and built
# in seconds. Token ids, widths and positions are none of them.
_LAYER = re.compile(r"(^|_)(layers?|depths?|blocks|stages)$|^n(um)?_(\w+_)?layers")
_COUNT = re.compile(rf"{_LAYER.pattern}|(^|_)(labels|experts|heads|codebooks|groups?)$")
_MAX_LAYERS, _MAX_ENTRIES = 2_000, 1_000_000
# Numbers of config.json's model to one in the files. A tied matrix is stored once and may be
# counted twice; quantized files pack up to 16 parameters into an int32.
_TIED, _PACKED = 2, 16
# Below 400 MB more, loading goes on, so that the message names what is missing.
_MAX_MISSING = 10**8
_BUFFERS = 10**9
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")
_SHOWN = 3
UNEVEN = "not those of whole experts"


def read_weights(
    architecture: Any,
    folder: Path,
    *,
    optional: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    **options: Any,
) -> Any:
    """Load the model in ``folder`` by ``architecture``, an Auto class or a class of transformers.

    ``optional`` are parts of names that may be missing, and then are drawn at random, or left over.
    ``options`` go to ``from_pretrained``; ``trust_remote_code`` is for Auto classes. Raises
    ValueError, naming up to three tensors of a kind, for weights that are missing, left over, of
    other shapes or not finite, and for sizes in config.json that the files cannot hold.
    """
    trusted = {"trust_remote_code": trust_remote_code}
    config, shapes = options.get("config") or read_config(folder, **trusted), _stored_shapes(folder)
    if hasattr(architecture, "from_config"):  # an Auto class
        options |= trusted
    own = options.get("quantization_config") is not None  # the caller says how to read the codes
    check_layout(folder, None if own else options.get("dtype"), shapes or ())
    if shapes is not None:
        _check_parameters(architecture, config, shapes, **trusted)
        check_blocks(folder, shapes)
    try:
        model, info = architecture.from_pretrained(
            folder, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except RuntimeError as error:
        if "automatic conversion" not in str(error):
            raise
        refuse({UNEVEN: uneven_experts(shapes or {})})
        raise InputError("the matrices of the experts cannot be put together") from error
    if info["mismatched_keys"]:
        check_version(shapes or {})
    refuse(
        {
            "missing": _needed(info["missing_keys"], optional),
            "not in the model of config.json": _needed(
                _without_mtp(info["unexpected_keys"], model.config), optional
            ),
            "of another shape": [
                f"{name} is {list(stored)} in the files and {list(built)} in the model"
                for name, stored, built in sorted(info["mismatched_keys"])
            ],
            "unreadable": [str(message) for message in info["error_msgs"]],
        }
    )
    unpack_before_calls(model)
    multiply_by_codes(model)
    check_finite(model.state_dict().items())
    return model


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Read the configuration in a folder, after comparing its sizes with the files of weights.

    transformers makes lists and modules by their number: 10**9 layers would take minutes and all
    memory. Raises ValueError for a size that is too small or that the files cannot hold.
    """
    fields = read_json(folder / "config.json", strict=False)
    _check_names(folder, fields)
    _check_fields(fields, _stored_shapes(folder) or {})
    code = fields.get(CODE)
    if code is not None:
        if not trust_remote_code:
            raise InputError("trust_remote_code is off")
        kind = get_class_from_dynamic_module(code["AutoConfig"], folder)
        kind.register_for_auto_class()
        return config_with_code(kind).from_pretrained(folder)
    return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def files_of_weights(folder: Path) -> list[Path]:
    """Files of weights that transformers reads in a folder, safetensors before pickles, or none.

    Raises ValueError for an index without names or that names a file of another folder.
    """
    for one, index in (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME),
        (WEIGHTS_NAME, WEIGHTS_INDEX_NAME),
    ):
        if (folder / one).is_file():
            return [folder / one]
        if (folder / index).is_file():
            return indexed_files(folder / index)
    return []


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError where tensors hold NaN or an infinity, by one pass over each."""
    names = []
    for name, tensor in tensors:
        # FSDP2 and expert parallelism: every rank looks at its own part.
        value = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        # Offloaded tensors are on meta and have no numbers here; codes of a quantizer have none,
        # and torch no arithmetic for them; no number has no extremes.
        if value.is_meta or packing(value) or not value.numel():
            continue
        if not torch.stack(torch.aminmax(value)).isfinite().all():
            names.append(name)
    refuse({"not finite": names})


def _stored_shapes(folder: Path) -> Shapes | None:
    """Shapes of all tensors in the safetensors files of a folder; None where it has no such file.

    Pickled weights give no shapes without being read. Raises ValueError for files without tensors
    and damaged ones.
    """
    files = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stream:
                names = stream.keys()
                shapes |= {name: tuple(stream.get_slice(name).get_shape()) for name in names}
        except SafetensorError as error:
            raise InputError(f"{file} cannot be read: {error}") from error
    if files and not shapes:
        raise InputError(f"{files[0].name} holds no tensors")
    return shapes or None


def _check_names(folder: Path, fields: Mapping[str, Any]) -> None:
    """Refuse weights of other folders, which transformers reads where an index names them."""
    for index in folder.glob("*.index*.json"):
        indexed_files(index)
    named = fields.get("transformers_weights")
    if named is not None:
        refuse_other_folders(str(named), "transformers_weights")


def _check_fields(fields: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse sizes in config.json that the files cannot hold, or that no model has."""
    numbers, tensors = _numbers(shapes), len(shapes)
    stored = {
        **dict.fromkeys(_LAYERS, (1, tensors, "tensors")),
        **dict.fromkeys(_WIDTHS, (1, numbers, "numbers")),
        **dict.fromkeys(_COUNTS, (0, numbers, "numbers")),
    }
    for part in (fields, *(part for part in fields.values() if isinstance(part, dict))):
        for field, (low, high, unit) in stored.items():
            value = part.get(field)
            if not isinstance(value, int) or not shapes:
                continue
            if value < low:
                raise InputError(f"{field} must be >= {low}; got {value}")
            if value > high:
                raise InputError(f"{field} must be <= {high:,}, the {unit} stored; got {value}")
    _check_counts("", fields)


def _check_counts(name: str, value: Any) -> None:
    """Refuse counts and lists, at any depth, that take long to build, whatever is stored."""
    if isinstance(value, dict):
        for key, part in value.items():
            _check_counts(key, part)
    elif isinstance(value, list):
        if len(value) > _MAX_ENTRIES:
            raise InputError(f"{name} must have <= {_MAX_ENTRIES:,} entries; got {len(value)}")
        for part in value:
            _check_counts(name, part)
    elif isinstance(value, int) and _COUNT.search(name):
        limit = _MAX_LAYERS if _LAYER.search(name) else _MAX_ENTRIES
        if value > limit:
            raise InputError(f"{name} must be <= {limit:,}; got {value}")


def on_meta(architecture: Any, config: Any, *, trust_remote_code: bool = False) -> Any:
    """Return the model of a configuration, built without memory for its weights."""
    with torch.device("meta"):
        if hasattr(architecture, "from_config"):  # an Auto class
            options = {"trust_remote_code": trust_remote_code}
            return architecture.from_config(copy.deepcopy(config), **options)
        return architecture._from_config(copy.deepcopy(config))


def _check_parameters(
    architecture: Any, config: Any, shapes: Shapes, *, trust_remote_code: bool
) -> None:
    """Refuse a config.json whose model, built without memory, is larger than the files."""
    model = on_meta(architecture, config, trust_remote_code=trust_remote_code)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    packed = getattr(config, "quantization_config", None) is not None
    if parameters > _MAX_MISSING + _numbers(shapes) * _TIED * (_PACKED if packed else 1):
        raise InputError(
            f"config.json describes {parameters:,} parameters, and the files hold "
            f"{_numbers(shapes):,} numbers"
        )
    buffers = sum(buffer.numel() for buffer in model.buffers())
    if buffers > _BUFFERS + parameters:  # masks and positions, which no file has
        raise InputError(f"config.json describes buffers of {buffers:,} numbers")


def _numbers(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _needed(names: Iterable[str], optional: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if not any(part in name for part in optional))


def _without_mtp(names: Iterable[str], config: Any) -> list[str]:
    """Names outside of the blocks after the last layer that predict further tokens (MTP).

    transformers leaves them aside at the depth of the published checkpoints alone. A layer that
    config.json does not count is none of them: they have a projection of two hidden states.
    """
    text = config.get_text_config()
    layers, blocks = (getattr(text, n, None) for n in ("num_hidden_layers", "num_mtp_layers"))
    blocks = getattr(text, "num_nextn_predict_layers", None) if blocks is None else blocks
    every = list(names)
    for number in range(layers or 0, (layers or 0) + (blocks or 0)):
        block = [name for name in every if f".layers.{number}." in f".{name}"]
        if any(name.endswith(".eh_proj.weight") for name in block):
            every = [name for name in every if name not in block]
    return every


def uneven_experts(shapes: Shapes) -> list[str]:
    """Matrices of single experts that others of their layer have, or have in another shape."""
    stacks: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    numbers: dict[str, set[str]] = {}
    for name, shape in shapes.items():
        if match := _EXPERT.fullmatch(name):
            layer, number, matrix = match.groups()
            stacks.setdefault((layer, matrix), {})[number] = shape
            numbers.setdefault(layer, set()).add(number)
    uneven = []
    for (layer, matrix), stack in stacks.items():
        usual = Counter(stack.values()).most_common(1)[0][0]
        uneven += [f"{layer}{n}{matrix}" for n in numbers[layer] if stack.get(n) != usual]
    return sorted(uneven)


def named(names: Sequence[str]) -> str:
    """Return the first three of some names, and how many more there are."""
    others = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{others}"


def refuse(problems: Mapping[str, list[str]]) -> None:
    """Raise ValueError on one line where there is a problem, with the names of three tensors."""
    parts = []
    for problem, names in problems.items():
        if names:
            parts.append(f"{problem} ({named(names)})")
    if parts:
        raise InputError(f"weights are {'; '.join(parts)}")
