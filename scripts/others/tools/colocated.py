"""A stand-in for vLLM inside TRL's process, which no CPU build of vLLM can be.

It has the methods that TRL 1.16 calls, samples with transformers in bf16, and answers as vLLM does
with ``enable_return_routed_experts``: tokens, their log-probabilities and routes.
"""

import base64
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from l2r import record
from l2r.hf.routes import to_vllm


class Engine:
    """In place of ``vllm.LLM``."""

    def __init__(self, model: str, *, max_model_len: int | None = None, **others: Any) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        runner = SimpleNamespace(model=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=max_model_len or 64)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)
        self.loaded = 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take weights of the trainer, one at a time, by their names."""
        for name, tensor in tensors:
            self.model.get_parameter(name).copy_(tensor)
            self.loaded += 1

    def reset_prefix_cache(self) -> None:
        """Nothing is kept from one call to the next."""

    def generate(self, prompts: list[Any], sampling_params: Any, **others: Any) -> list[Any]:
        """An answer for each prompt."""
        answers = []
        for prompt in prompts:
            ids = torch.tensor([prompt["prompt_token_ids"]])
            with record(self.model) as recorder, torch.no_grad():
                output = self.model.generate(
                    ids, max_new_tokens=sampling_params.max_tokens, do_sample=True, top_k=0,
                    temperature=sampling_params.temperature, pad_token_id=0, output_logits=True,
                    return_dict_in_generate=True,
                )  # fmt: skip
            tokens = output.sequences[0, ids.shape[1] :].tolist()
            scores = [(x.float() / sampling_params.temperature)[0] for x in output.logits]
            logprobs = [
                {token: SimpleNamespace(logprob=score.log_softmax(-1)[token].item(), rank=1)}
                for token, score in zip(tokens, scores, strict=True)
            ]
            text = to_vllm(recorder.routes().extended())[0]
            experts = np.load(io.BytesIO(base64.b64decode(text)))
            answer = SimpleNamespace(token_ids=tokens, logprobs=logprobs, routed_experts=experts)
            answers.append(SimpleNamespace(outputs=[answer], **prompt))
        return answers


@contextmanager
def in_place_of_vllm() -> Iterator[None]:
    """Let a trainer made inside the block have ``Engine`` for its vLLM."""
    with (
        mock.patch.object(vllm_generation, "is_vllm_available", lambda: True),
        mock.patch.object(vllm_generation, "LLM", Engine, create=True),
        mock.patch.object(vllm_generation, "SamplingParams", SimpleNamespace, create=True),
    ):
        yield
