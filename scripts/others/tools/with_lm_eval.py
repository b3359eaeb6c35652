"""lm_eval: its ``hf`` model opens a folder by itself."""

from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from l2r.engines.serve.options import ServeOptions
from l2r.engines.serve.server import serving
from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import Subject, tokenizer

ROWS: list[Row] = []
PAIRS = [("w5 w6", " w7 w8"), ("w9", " w10 w11 w12"), ("w20 w21 w22", " w3")]


def _scores(scorer: Any) -> list[tuple[float, bool]]:
    requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(PAIRS)]
    scores: list[tuple[float, bool]] = scorer.loglikelihood(requests, disable_tqdm=True)
    return scores


@row(ROWS, "`--model local-completions` of `l2r serve` scores what `--model hf` scores")
def over_http(subject: Subject) -> None:
    """The same three continuations, and the same answers to whether they are greedy."""
    with serving(subject.folder, ServeOptions(port=0, name="served")) as (port, _):
        scorer = LocalCompletionsAPI(
            base_url=f"http://localhost:{port}/v1/completions", model="served",
            tokenizer=str(subject.folder), tokenized_requests=True,
        )  # fmt: skip
        answers = _scores(scorer)
    expected = _scores(_by_hf(subject))
    for (score, greedy), (expected_score, expected_greedy) in zip(answers, expected, strict=True):
        assert abs(score - expected_score) < 1e-4 and greedy == expected_greedy


def _by_hf(subject: Subject) -> Any:
    return HFLM(pretrained=str(subject.folder), device="cpu", dtype="float32", batch_size=1)


@row(ROWS, "`--model hf pretrained=FOLDER` scores what the saved model scores")
def loglikelihood(subject: Subject) -> None:
    """Log-likelihoods of three continuations against the model in memory."""
    scores = [score for score, _ in _scores(_by_hf(subject))]
    words, model = tokenizer(), subject.model()
    for (context, continuation), score in zip(PAIRS, scores, strict=True):
        prefix, rest = words(context).input_ids, words(continuation).input_ids
        ids = torch.tensor([prefix + rest])
        with torch.no_grad():
            tokens = model(ids, use_cache=False).logits.log_softmax(-1)[0, len(prefix) - 1 : -1]
        expected = tokens.gather(1, torch.tensor(rest)[:, None]).sum()
        assert abs(float(expected) - score) < 1e-4
