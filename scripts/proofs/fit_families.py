"""Perplexity of stock models before the swap, after it and after the fit, by family.

    python -m scripts.proofs.fit_families --families olmoe,qwen3_moe --steps 400 --work FOLDER

Trains a small stock model of each family on the embedded text, saves it with its tokenizer, and
runs `l2r swap CHECKPOINT rank=8 heads=4 gamma=4 --fit --json`. Neither the training nor
the fit reads the text that the perplexity is measured on.
"""

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tests.hf.families import tiny_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from l2r.hf.swap.families import FAMILIES
from l2r.report.tables import Table
from l2r.training.data.corpus import CorpusOptions, build_corpus
from l2r.training.data.sample_text import sample_batches

ROUTER = ("rank=8", "heads=4", "gamma=4")
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default="olmoe,qwen3_moe")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    rows = []
    for name in given.families.split(","):
        folder = given.work / name
        if not (folder / "config.json").is_file():
            train_stock(name, folder, given.steps)
        words = ("swap", folder, *ROUTER, "--fit", "--out", given.work / f"{name}-l2r")
        command = [sys.executable, "-m", "l2r", *map(str, words), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        rows.append((name, *stages(done.stdout)))
        sys.stderr.write(f"{rows[-1]}\n")
    columns = ("family", "before", "after the swap", "after the fit")
    print(Table("Perplexity on unseen text", columns, tuple(rows), digits=2).to_markdown())


def train_stock(name: str, folder: Path, steps: int) -> None:
    """Train a small stock model of a family and save it with the corpus's tokenizer."""
    corpus = build_corpus(CorpusOptions())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(corpus.tokenizer)
    batches, _ = sample_batches(tokenizer, tokens=steps * 8 * 256, held_out_tokens=2048)
    config: Any = tiny_model(FAMILIES[name]).config
    sizes = {key: value for key, value in SIZES.items() if hasattr(config, key)}
    config.update({**sizes, "vocab_size": len(tokenizer), "router_aux_loss_coef": 0.01})
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, None
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for step in range(steps):
        rate = min(1, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = 2e-3 * rate
        ids = batches[step % len(batches)]
        loss = model(input_ids=ids, labels=ids, output_router_logits=True, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 49:
            sys.stderr.write(f"{name}: step {step + 1}, loss {loss.item():.3f}\n")
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def stages(printed: str) -> tuple[float, float, float]:
    """Perplexity before, after the swap and after the fit, as the command prints it."""
    values = json.loads(printed)["perplexity"]
    return values["original"], values["swapped"], values["fitted"]


if __name__ == "__main__":
    main()
