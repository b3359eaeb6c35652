"""Two processes share the work and both get the single-process result."""

import json
import os
import socket
import subprocess
import sys

from l2r.evaluation.downstream import evaluate_tasks

SCRIPT = """
import json, sys
import torch.distributed as dist
from l2r.evaluation.downstream import evaluate_tasks
from l2r.checkpoints import load_causal_lm

model, tokenizer = load_causal_lm(sys.argv[1])
dist.init_process_group("gloo")
calls = []
results = evaluate_tasks(
    model, tokenizer, "piqa,sciq", limit=5, batch_size=3, max_length=1024,
    on_progress=lambda *values: calls.append(values),
)
with open(f"{sys.argv[2]}/{dist.get_rank()}.json", "w") as stream:
    json.dump({"results": {k: v.to_dict() for k, v in results.items()}, "calls": calls}, stream)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_give_the_result_of_one(checkpoint, tmp_path):
    from l2r.checkpoints import load_causal_lm

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, checkpoint, tmp_path],
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    model, tokenizer = load_causal_lm(checkpoint)
    alone = evaluate_tasks(model, tokenizer, "piqa,sciq", limit=5, batch_size=3, max_length=1024)
    for rank in range(2):
        written = json.loads((tmp_path / f"{rank}.json").read_text())
        assert written["results"] == {name: result.to_dict() for name, result in alone.items()}
        # piqa: 10 requests in 4 batches, 2 steps; sciq: 20 in 7, 4 steps, the last one shared.
        assert [done for _, done, _ in written["calls"]] == [6, 10, 6, 12, 18, 20]
