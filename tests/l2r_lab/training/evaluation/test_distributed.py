"""Two processes share the work and both get the single-process result."""

import torch.distributed as dist

from l2r.hf.checkpoints import load_causal_lm
from l2r_lab.training.evaluation.downstream import evaluate_tasks
from tests.processes import on_two_ranks


def evaluate(checkpoint, calls):
    model, tokenizer = load_causal_lm(checkpoint)
    return evaluate_tasks(
        model,
        tokenizer,
        "piqa,sciq",
        limit=5,
        batch_size=3,
        max_length=1024,
        on_progress=lambda *values: calls.append(values),
    )


def on_a_rank(rank, checkpoint):
    assert dist.get_rank() == rank
    calls = []
    return evaluate(checkpoint, calls), calls


def test_two_ranks_give_the_result_of_one(checkpoint, tmp_path):
    alone = evaluate(checkpoint, [])
    for results, calls in on_two_ranks(on_a_rank, tmp_path, checkpoint):
        assert results == alone
        # piqa: 10 requests in 4 batches, 2 steps; sciq: 20 in 7, 4 steps, the last one shared.
        assert [done for _, done, _ in calls] == [6, 10, 6, 12, 18, 20]
