"""Greedy tokens of vLLM and their log-probabilities: ``python greedy_in_vllm.py FOLDER IMPL NEW``.

IMPL is auto or transformers, NEW a number of tokens. Prompts, lists of token ids, come as JSON on
standard input and the answers on standard output. vLLM starts processes that import the main
module, so this is a file of its own.
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
    greedy = SamplingParams(temperature=0, max_tokens=int(new), logprobs=0)
    answers = [answer.outputs[0] for answer in engine.generate(prompts, greedy)]
    pairs = [
        [list(a.token_ids), [next(iter(p.values())).logprob for p in a.logprobs]] for a in answers
    ]
    print("\n" + json.dumps(pairs))


if __name__ == "__main__":
    main()
