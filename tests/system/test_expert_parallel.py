"""FSDP2 and expert parallel through transformers: two gloo processes give what one gives."""

import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers.distributed import DistributedConfig

from l2r import load_pretrained
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.routers import capture
from l2r.text.corpus import CorpusOptions, build_corpus
from l2r.text.perplexity import token_losses
from l2r.text.tokens import TokenDataset
from tests.processes import Running, on_ranks

pytestmark = pytest.mark.skipif(
    "ep_implementation" not in inspect.signature(DistributedConfig).parameters,
    reason="this transformers has no all-to-all for experts, which came with 5.23",
)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "others" / "train_ep.py"
LENGTH, STEPS, BATCH = 32, 2, 4

# Appended to the script, in the same two processes: what they compute and hold.
GRADIENTS = """
model = l2r.load_pretrained(start, distributed_config=layout).train()
rows = data.rows(data.batch(0, batch, 0, rank=rank, world_size=world))["input_ids"]
with capture(model) as captured:
    loss = token_losses(model, rows).mean()
z, i = captured.logits(), captured.indices()
(loss + 0.01 * load_balancing_loss(z, i) + 0.001 * router_z_loss(z)).backward()
experts = dict(model.named_parameters())["model.layers.0.mlp.experts.down_proj"].to_local()
found = {n: p.grad.full_tensor() for n, p in model.named_parameters()}
held = torch.tensor([len(experts)])
dist.all_reduce(held)
if rank == 0:
    torch.save({"gradients": found, "local": len(experts), "held": int(held)}, f"{out}.pt")
"""
END = "dist.barrier()\ndist.destroy_process_group()\n"


@pytest.fixture(scope="module")
def start(text_folder, tmp_path_factory):
    """A tiny saved model, its token files and a folder to work in."""
    root = tmp_path_factory.mktemp("ep")
    options = CorpusOptions(folder=str(text_folder), vocab_size=300, characters_per_domain=30000)
    tokens = build_corpus(options, cache=root).train
    config = L2rOlmoeConfig(
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        vocab_size=300,
        max_position_embeddings=LENGTH,
        eos_token_id=0,
        router={"kind": "l2r_sips", "rank": 2, "heads": 4},
    )
    torch.manual_seed(0)
    L2rOlmoeForCausalLM(config).save_pretrained(root / "start")
    return root, tokens


def run_script(path, *arguments):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")


@pytest.fixture(scope="module")
def ran(start, tmp_path_factory):
    """Standard output of the script on two ranks, and the folder it wrote to."""
    root, tokens = start
    text = SCRIPT.read_text()
    assert text.endswith(END)
    script, out, output = root / SCRIPT.name, root / "out", root / "output"
    script.write_text(text.removesuffix(END) + GRADIENTS + END)
    arguments = [root / "start", tokens, out, LENGTH, STEPS, BATCH]
    on_ranks(2, output, Running, run_script, str(script), *map(str, arguments))
    return (output / "0" / "out.txt").read_text(), out


def objective(model, rows):
    """Task and router losses of one rank's rows."""
    with capture(model) as captured:
        loss = token_losses(model, rows).mean()
    logits, indices = captured.logits(), captured.indices()
    return loss + 0.01 * load_balancing_loss(logits, indices) + 0.001 * router_z_loss(logits)


def halves(data, step):
    return [
        data.rows(data.batch(step, BATCH, 0, rank=rank, world_size=2))["input_ids"]
        for rank in range(2)
    ]


@pytest.mark.slow("two processes")
def test_gradients_equal_those_of_one_process(start, ran):
    root, tokens = start
    found = torch.load(f"{ran[1]}.pt")
    assert found["local"] == 4 and found["held"] == 8  # each rank holds half of the experts
    model = load_pretrained(root / "start").train()
    for rows in halves(TokenDataset(tokens, LENGTH), 0):
        (objective(model, rows) / 2).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert found["gradients"].keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(found["gradients"][name], gradient, atol=1e-8, rtol=1e-4)


@pytest.mark.slow("two processes")
def test_the_script_of_the_docs_trains_as_one_process_does(start, ran):
    root, tokens = start
    model = load_pretrained(root / "start").train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=4e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    data, losses = TokenDataset(tokens, LENGTH), []
    for step in range(STEPS):
        parts = [objective(model, rows) / 2 for rows in halves(data, step)]
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    printed = [float(value) for value in re.findall(r"loss (\S+)", ran[0])]
    assert printed == pytest.approx(losses, abs=2e-6)
    trained = load_pretrained(ran[1]).state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, atol=1e-5, rtol=0)
