"""A training step of models with more and more experts of equal total width, in parts.

    python -m scripts.machines.many_experts [--tree OTHER/src] [--router l2r_sips]

16, 64, 256, 1,024 and 4,096 experts of 8,192 / experts width, a sixteenth of them chosen: total
width 8,192, chosen width 512. Two layers of d 128, 512 tokens. One thread, processor time in ms,
the least of three. ``--tree`` takes the package from the src of another checkout.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

WORK = """
import sys, time, torch
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.models.experts_backend import register_experts
from l2r.routers import L2RConfig, RouterConfig, capture

kind, counts = sys.argv[1], [int(n) for n in sys.argv[2].split(",")]
torch.set_num_threads(1)
for count in counts:
    torch.manual_seed(0)
    chosen = count // 16
    if kind == "l2r_sips":
        router = L2RConfig.for_experts(num_experts=count, hidden_size=128, top_k=chosen)
    else:
        router = RouterConfig.from_dict({"kind": kind})
    model = L2rOlmoeForCausalLM(L2rOlmoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=8192 // count,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, num_experts=count,
        num_experts_per_tok=chosen,
        pad_token_id=None, router=router))
    model.set_experts_implementation(register_experts())
    ids = torch.randint(512, (4, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    parts = {}
    def timed(name, call):
        start = time.process_time()
        made = call()
        took = 1e3 * (time.process_time() - start)
        parts[name] = min(parts.get(name, took), took)
        return made
    def forward():
        with capture(model) as seen:
            task = model(input_ids=ids, labels=ids).loss
        z, i = seen.logits(), seen.indices()
        return task + 0.01 * load_balancing_loss(z, i) + 0.001 * router_z_loss(z)
    gate, mlp = model.model.layers[0].mlp.gate, model.model.layers[0].mlp
    x = torch.randn(512, 128)
    for _ in range(3):
        loss = timed("forward", forward)
        timed("backward", loss.backward)
        timed("AdamW", optimizer.step)
        optimizer.zero_grad()
        with torch.no_grad():
            _, w, i = timed("one router, forward", lambda: gate(x))
            timed("experts of one layer, forward", lambda: mlp.experts(x, i, w))
    print(count, *(f"{name}={ms:.1f}" for name, ms in parts.items()), sep=";", flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parents[2] / "src"
    parser.add_argument("--tree", type=Path, action="append", help="src of a checkout")
    parser.add_argument("--router", default="l2r_sips")
    parser.add_argument("--experts", default="16,64,256,1024,4096")
    given = parser.parse_args()
    for tree in given.tree or [here]:
        environment = {**os.environ, "PYTHONPATH": os.fspath(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", WORK, given.router, given.experts]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        rows = [line.split(";") for line in done.stdout.splitlines()]
        names = [cell.split("=")[0] for cell in rows[0][1:]]
        print(f"{tree}\n\n| experts | step | {' | '.join(names)} |")
        print("|---" * (len(names) + 2) + "|")
        for count, *cells in rows:
            times = [float(cell.split("=")[1]) for cell in cells]
            step = sum(times[:3])
            print(f"| {int(count):,} | {step:.0f} | {' | '.join(f'{t:.1f}' for t in times)} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
