"""Sample in vLLM and keep which experts it took: ``python in_vllm.py FOLDER DTYPE HOW OUT``.

HOW is one (a sequence at a time, nothing cached), many (sequences in batches, prompts cut into
pieces, prefixes cached) or flag (many, with vLLM's own --enable-return-routed-experts, on a GPU).
Prompts, lists of token ids, come as JSON on standard input; OUT is a .npz file. vLLM starts
processes that import the main module, so this is a file of its own.
"""

import json
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np

NEW = 40
HOW: dict[str, dict[str, Any]] = {
    "one": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "many": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_prefix_caching": True},
}


def main() -> None:
    from vllm import LLM, SamplingParams

    from l2r.engines.vllm.recording import EXTENSION, recording

    folder, dtype, how, out = sys.argv[1:]
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    ours = {"worker_extension_cls": EXTENSION, "enforce_eager": True}
    engine = LLM(
        folder,
        dtype=dtype,
        max_model_len=128,
        max_logprobs=-1,
        enable_chunked_prefill=True,
        block_size=32,
        **HOW.get(how, HOW["many"]),
        **({"enable_return_routed_experts": True} if how == "flag" else ours),
    )
    # Greedy: vLLM 0.32 cannot rewind a seed's generator on a CPU where a prompt is cut.
    drawn = SamplingParams(
        temperature=0, max_tokens=NEW, logprobs=-1, ignore_eos=True, flat_logprobs=True
    )
    with nullcontext() if how == "flag" else recording(engine) as recorder:
        outputs = engine.generate(prompts, drawn)
        if recorder is not None:
            recorder.add_to(outputs)
    answers = [output.outputs[0] for output in outputs]
    np.savez(
        out,
        tokens=np.array([list(answer.token_ids) for answer in answers]),
        logprobs=np.array([by_token(answer.logprobs) for answer in answers]),
        cached=np.array([output.num_cached_tokens or 0 for output in outputs]),
        **{f"experts_{n}": answer.routed_experts for n, answer in enumerate(answers)},
    )


def by_token(flat: Any) -> np.ndarray:
    """Log-probabilities [steps, vocabulary]; vLLM sorts them and repeats the token that it took."""
    size = max(flat.token_ids) + 1
    table = np.full((len(flat.start_indices), size), -np.inf, np.float32)
    for step, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        table[step, flat.token_ids[start:end]] = flat.logprobs[start:end]
    return table


if __name__ == "__main__":
    main()
