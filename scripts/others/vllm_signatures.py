"""What our plug-in takes from vLLM, in another version: ``vllm_signatures.py FOLDER``.

For versions that have no CPU build: FOLDER is an unpacked wheel (``pip download --no-deps
vllm==0.33.0``; ``python -m zipfile -e WHEEL FOLDER``). Reads its source, imports nothing. Prints
a line for each name with what is missing; exits with 1 where something is.
"""

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MOE = "model_executor/layers/fused_moe"
_SELECTION = (
    "renormalize", "use_grouped_topk", "num_expert_group", "topk_group", "custom_routing_function",
    "scoring_func", "e_score_correction_bias", "routed_scaling_factor", "top_k",
)  # fmt: skip
# By file below vllm/: names it defines or imports, and of functions the parameters.
TAKEN: Mapping[str, Mapping[str, Sequence[str]]] = {
    f"{_MOE}/layer.py": {
        "FusedMoEFactory": (
            *_SELECTION, "num_experts", "prefix", "gate", "shared_expert_gate",
            "router_logits_dtype", "apply_routed_scale_to_output",
        ),
        "MoERunner": (),
    },
    f"{_MOE}/__init__.py": {"FusedMoEFactory": ()},
    f"{_MOE}/router/router_factory.py": {
        "create_fused_moe_router": (*_SELECTION, "global_num_experts")
    },
    f"{_MOE}/router/fused_moe_router.py": {
        "FusedMoERouter.select_experts": ("hidden_states", "router_logits")
    },
    f"{_MOE}/router/base_router.py": {"BaseRouter.set_capture_fn": ("capture_fn",)},
    f"{_MOE}/runner/moe_runner.py": {"MoERunner.__init__": ("layer_name", "router", "gate")},
    "model_executor/layers/linear.py": {"LinearBase": ()},
    "model_executor/models/config.py": {"MODELS_CONFIG_MAP": ()},
    "model_executor/models/registry.py": {
        "_ModelRegistry.register_model": ("model_arch", "model_cls"),
        "_LazyRegisteredModel.load_model_cls": (),
        "_LazyRegisteredModel.module_name": (),
    },
    "transformers_utils/config.py": {
        "_CONFIG_FORMAT_TO_CONFIG_PARSER": (),
        "HFConfigParser.parse": ("model", "trust_remote_code", "revision", "code_revision"),
    },
    "platforms/interface.py": {"Platform.is_rocm": (), "Platform.device_type": ()},
    "plugins/__init__.py": {"load_general_plugins": ()},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/others/vllm_signatures.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="that holds the folder vllm")
    folder: Path = parser.parse_args().folder
    failed = 0
    for file, names in TAKEN.items():
        found = defined(ast.parse((folder / "vllm" / file).read_text(encoding="utf-8")))
        for name, wanted in names.items():
            missing = [p for p in wanted if p not in found.get(name, ())]
            state = (
                "is not there"
                if name not in found
                else f"lacks {missing}"
                if missing
                else "as taken"
            )
            failed |= state != "as taken"
            print(f"{file}: {name} {state}")
    return int(failed)


def defined(tree: ast.Module) -> dict[str, list[str]]:
    """Names at the top of a file and in its classes, with the parameters of functions."""
    found: dict[str, list[str]] = {}
    for node in tree.body:
        found |= _names(node, "")
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                found |= _names(part, f"{node.name}.")
    return found


def _names(node: ast.stmt, prefix: str) -> dict[str, list[str]]:
    match node:
        case ast.FunctionDef(name=name, args=given):
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            return {prefix + name: [each.arg for each in every]}
        case ast.ClassDef(name=name):
            return {prefix + name: []}
        case ast.ImportFrom(names=names):
            return {prefix + (each.asname or each.name): [] for each in names}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {prefix + name: []}
        case ast.Assign(targets=[ast.Name(id=name)]):
            return {prefix + name: []}
    return {}


if __name__ == "__main__":
    sys.exit(main())
