"""Train OLMoE with its experts split over ranks, by transformers: an example to copy.

    torchrun --nproc-per-node 8 scripts/others/train_ep.py START TOKENS OUT LENGTH STEPS BATCH

START is a saved model, TOKENS a folder of token files (l2r data prepare), OUT the new checkpoint;
LENGTH tokens a row, BATCH rows a step over all ranks. Losses, clipping and AdamW's settings are
those of the paper's recipe, without its schedule. Needs transformers 5.23. A test runs it on two
ranks (tests/system/test_expert_parallel.py).
"""

import sys

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

import l2r
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers import capture
from l2r.text import TokenDataset, token_losses

start, tokens, out = sys.argv[1:4]
length, steps, batch = map(int, sys.argv[4:])
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
layout = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="all_to_all")
model = l2r.load_pretrained(start, dtype=torch.float32, distributed_config=layout).train()
# Experts and the rest are on different meshes, so AdamW goes through them one by one.
optimizer = torch.optim.AdamW(
    model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
)
data = TokenDataset(tokens, length)
for step in range(steps):
    chosen = data.batch(step, batch, 0, rank=rank, world_size=world)
    rows = data.rows(chosen)["input_ids"].to(model.device)
    with capture(model) as captured:
        loss = token_losses(model, rows).mean()
    logits, indices = captured.logits(), captured.indices()
    loss = loss + 0.01 * load_balancing_loss(logits, indices) + 0.001 * router_z_loss(logits)
    loss.backward()  # type: ignore[no-untyped-call]
    norms = [parameter.grad.norm().full_tensor() for parameter in model.parameters()]
    scale = (1.0 / (torch.stack(norms).norm() + 1e-6)).clamp(max=1.0)
    for parameter in model.parameters():
        parameter.grad.mul_(scale)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss.detach())
    if rank == 0:
        print(f"step {step} loss {loss.item() / world:.6f}", flush=True)
model.save_pretrained(out)
dist.barrier()
dist.destroy_process_group()
