"""Greedy tokens of vLLM as JSON: ``python greedy_in_vllm.py FOLDER auto|transformers NEW``.

Prompts, lists of token ids, come as JSON on standard input. vLLM starts processes that import the
main module, so this is a file of its own.
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    folder, implementation, new = sys.argv[1:]
    prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
    engine = LLM(
        folder,
        model_impl=implementation,
        trust_remote_code=implementation == "transformers",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
    )
    answers = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=int(new)))
    print("\n" + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
