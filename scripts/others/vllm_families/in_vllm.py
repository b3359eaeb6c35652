"""Jobs in one process of vLLM: ``python in_vllm.py JOBS OUT``.

JOBS is JSON: {name: {"folder", "dtype", "impl", "stock", "lora", "routes", "prompts", "forced"}}.
For each OUT/NAME.json is written: greedy tokens after the prompts, and log-probabilities of the
tokens of ``forced`` but the first of each, or {"error": line}; with ``routes`` OUT/NAME.npz too,
the experts of the tokens of ``forced``, and what the gates read, gave and chose of the first of
them. vLLM starts processes that import the main module, so this is a file of its own.
"""

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

NEW = 64


def main() -> None:
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda look: look()  # at a class: no import of vLLM for each
    # Later it would stop at an object of numba's, once that is imported.
    current_platform.register_triton_kernel_overrides()
    current_platform.register_triton_kernel_overrides = lambda: None
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    for name, job in jobs.items():
        if (out / f"{name}.json").exists():
            continue
        try:
            found = run(job, out / f"{name}.npz")
        except Exception as error:  # the other jobs are worth having
            traceback.print_exc()
            found = {"error": reason(error)}
        gc.collect()
        (out / f"{name}.json").write_text(json.dumps(found))


def reason(error: BaseException) -> str:
    """The last line of the first cause that says something."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    said = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return f"{type(error).__name__}: {said.removeprefix('Value error, ').partition(' [type=')[0]}"


def run(job: dict[str, Any], arrays: Path) -> dict[str, Any]:
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    from l2r.engines.vllm.architectures import implied
    from l2r.engines.vllm.recording import EXTENSION, recording

    settings: dict[str, Any] = {}
    if job.get("stock"):  # lacks what the plug-in adds
        settings["hf_overrides"] = implied(AutoConfig.from_pretrained(job["folder"]))
    if job.get("lora"):
        settings |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1}
        adapter = json.loads((Path(job["lora"]) / "adapter_config.json").read_text())
        settings["lora_target_modules"] = sorted(adapter["target_modules"])
        keep_experts_plain()
    if job.get("routes"):
        settings["worker_extension_cls"] = EXTENSION
    engine = LLM(
        job["folder"],
        model_impl=job.get("impl", "auto"),
        trust_remote_code=job.get("impl") == "transformers",
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **settings,
    )
    lora = None
    if job.get("lora"):
        from vllm.lora.request import LoRARequest

        lora = LoRARequest("adapter", 1, job["lora"])
    options: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    greedy = SamplingParams(max_tokens=NEW, **options)
    forcing = SamplingParams(max_tokens=1, prompt_logprobs=0, **options)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    forced = [{"prompt_token_ids": ids} for ids in job["forced"]]
    tokens = engine.generate(prompts, greedy, lora_request=lora, use_tqdm=False)
    with recording(engine) if job.get("routes") else nullcontext() as recorder:
        answers = engine.generate(forced, forcing, lora_request=lora, use_tqdm=False)
        if recorder is not None:
            recorder.add_to(answers)
            experts = [answer.outputs[0].routed_experts for answer in answers]
            seen = gates(engine, lambda: engine.generate(forced[:1], forcing, use_tqdm=False))
            seen |= {f"{n:03}": rows for n, rows in enumerate(experts)}
            np.savez(arrays, **seen)  # type: ignore[arg-type]
    scores = [
        [
            position[token].logprob
            for token, position in zip(ids[1:], each.prompt_logprobs[1:], strict=True)
        ]
        for ids, each in zip(job["forced"], answers, strict=True)
    ]
    architectures = engine.llm_engine.vllm_config.model_config.architectures
    engine.llm_engine.engine_core.shutdown()
    return {
        "architectures": architectures,
        "tokens": [list(answer.outputs[0].token_ids) for answer in tokens],
        "scores": scores,
    }


def keep_experts_plain() -> None:
    """Have a CPU's kernel compute experts although adapters are on.

    vLLM takes Triton's for every MoE model then, which a CPU has not; ours touches no expert.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    usual = method.select_unquantized_moe_backend

    def select(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return usual(moe_config)

    method.select_unquantized_moe_backend = select


def gates(engine: Any, ask: Callable[[], Any]) -> dict[str, np.ndarray]:
    """What each gate of ours reads, the logits, weights and experts that follow, while it asks.

    ``LAYER/hidden`` [T, D], ``LAYER/logits`` [T, N], ``LAYER/weights``, ``LAYER/experts`` [T, K].
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    from l2r.engines.vllm.gates import LogitsGate

    found: dict[str, np.ndarray] = {}

    def watch(model: Any) -> None:
        for path, runner in model.named_modules():
            if not isinstance(runner, MoERunner):
                continue
            block = model.get_submodule(path.rpartition(".")[0])
            layer = re.findall(r"\.(\d+)\.", path)[0]
            gate = next((g for g in block.children() if isinstance(g, LogitsGate)), None)
            if gate is not None:
                gate.register_forward_hook(partial(keep, layer))
                usual = runner.router.select_experts
                runner.router.select_experts = partial(choose, layer, usual)

    def keep(layer: str, gate: Any, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        found.setdefault(f"{layer}/hidden", args[0].float().numpy())
        found.setdefault(f"{layer}/logits", logits.float().numpy())

    def choose(layer: str, usual: Any, *args: Any, **options: Any) -> Any:
        weights, experts = usual(*args, **options)
        found.setdefault(f"{layer}/weights", weights.float().numpy())
        found.setdefault(f"{layer}/experts", experts.numpy())
        return weights, experts

    engine.reset_prefix_cache()
    engine.apply_model(watch)
    ask()
    return found


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    main()
