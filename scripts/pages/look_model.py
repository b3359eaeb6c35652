"""Write examples/look, the tiny model of ``make look``, from the run that trained it.

    l2r train demo/l2r-sips-tuned model.hidden_size=64 model.intermediate_size=16 \
        model.num_experts_per_tok=2 data.vocab_size=1024 training.steps=4000 --out runs/look-run
    PYTHONPATH=. python -m scripts.pages.look_model runs/look-run

Weights become bfloat16, so that the folder stays under 1 MB; its own router stays in float32.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, GenerationConfig

from l2r import load_pretrained

OUT = Path(__file__).parents[2] / "examples" / "look"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40}


def main() -> None:
    """Convert the run's model; the card beside it is written by hand and stays."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    folder = parser.parse_args().run / "model"
    with tempfile.TemporaryDirectory() as made:
        model = load_pretrained(folder).to(torch.bfloat16)
        model.generation_config = GenerationConfig(
            **SAMPLING,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.config.max_position_embeddings = 256  # trained on 128; room for a long sentence
        model.save_pretrained(made)
        AutoTokenizer.from_pretrained(folder).save_pretrained(made)
        OUT.mkdir(parents=True, exist_ok=True)
        for file in Path(made).iterdir():
            if file.name != "README.md":
                shutil.copy(file, OUT / file.name)
    size = sum(file.stat().st_size for file in OUT.iterdir())
    print(f"{OUT}: {size:,} bytes")


if __name__ == "__main__":
    main()
