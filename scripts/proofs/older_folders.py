"""Make the folders of an older version that tests/system/test_older_folders.py opens.

    git worktree add TREE COMMIT
    python scripts/proofs/older_folders.py TREE tests/fixtures/COMMIT.tar.xz

The older version's own commands and functions write the folders, in the environment of today:
three swapped families, a run of each kind of router and of a ViT, an unfinished run, an adapter
of PEFT, routes, a diagnosis; and what that version computes from them (expected.npz).
Models are as small as they can be, since the archive is committed.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

SMALL = shlex.split("""
data.vocab_size=300 data.characters_per_domain=30000 data.sequence_length=32
model.hidden_size=16 model.num_hidden_layers=1 model.num_attention_heads=2
model.intermediate_size=4 model.num_experts=16 model.num_experts_per_tok=2 training.steps=4
training.global_batch=8 training.micro_batch=8 training.log_every=1 optimizer.warmup=512
evaluation.every=2 evaluation.batch_size=4 evaluation.max_batches=2 checkpoint.every=2
checkpoint.keep=1
""")
VISION = shlex.split("""
model.hidden_size=16 model.num_hidden_layers=2 model.num_attention_heads=2
model.intermediate_size=16 model.moe_layers=[1] training.steps=4 training.log_every=1
training.global_batch=16 training.micro_batch=16 evaluation.every=2 optimizer.warmup=16
evaluation.batch_size=16 evaluation.max_batches=2 checkpoint.every=2 checkpoint.keep=1
""")
DIAGNOSE = shlex.split("""
--data text --instances 2 --length 16 --sample 16 --certify 0 --gain 0 --text-tokens 32
--out diagnosis
""")
FAMILIES = {
    "mixtral": {"intermediate_size": 8, "num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 8, "num_experts": 4, "head_dim": 8},
    "deepseek_v3": {
        "moe_intermediate_size": 8,
        "intermediate_size": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def main() -> None:
    """Run this file in the older tree, and pack what it made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path, help="checkout of the older version")
    parser.add_argument("out", type=Path, help="archive to write, .tar.xz")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "words").mkdir()
        here = os.environ | {"PYTHONPATH": str(args.tree.resolve() / "src"), "L2R_CACHE": folder}
        here |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        code = [sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['make']()"]
        subprocess.run(code, cwd=root / "words", env=here, check=True)
        with tarfile.open(args.out, "w:xz") as archive:
            for path in sorted((root / "words").iterdir()):
                archive.add(path, path.name, filter=_anonymous)
    print(f"{args.out}: {args.out.stat().st_size / 2**20:.2f} MiB")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def make() -> None:
    """Write all folders into the current one, with the version that Python finds."""
    import numpy as np
    import torch

    import l2r

    torch.manual_seed(0)
    _write_text(Path("text"))
    found: dict[str, Any] = {}
    ids = torch.arange(24).view(1, 24) * 7 % 64
    for family, sizes in FAMILIES.items():
        model = _swapped(family, sizes)
        model.save_pretrained(f"swapped/{family}")
        _compute(f"swapped/{family}", model, ids, found)
    with torch.no_grad(), l2r.record(model) as recorder:  # of the last family
        model(ids)
    recorder.routes().save("routes.npz")
    _compute("adapter", _adapter(), ids, found)

    runs = ["data.corpus=text", *SMALL]
    for kind in l2r.router_names():
        _l2r("train", "demo/linear", *runs, f"router.kind={kind}", "--out", f"runs/{kind}")
        _compute(f"runs/{kind}", l2r.load_pretrained(f"runs/{kind}"), ids, found)
    _l2r("train", "demo/l2r-sips", *runs, "training.steps=400", "--out", "unfinished", stop=3)
    _l2r("train", "demo-vision/l2r-sips", *VISION, "--out", "vision")
    pixels = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
    _compute("vision", l2r.load_pretrained("vision"), pixels, found)
    _l2r("diagnose", "runs/linear", "runs/l2r_sips", *DIAGNOSE)
    _tidy()
    np.savez_compressed("expected.npz", **found)


def _compute(name: str, model: Any, inputs: Any, found: dict[str, Any]) -> None:
    """What a model says of ``inputs``, and the logits of its routers, by name."""
    import torch

    import l2r

    with torch.no_grad(), l2r.capture(model.eval()) as seen:
        found[name] = model(inputs).logits.flatten(0, -2)[-4:].numpy()
    for number, logits in enumerate(seen.logits()):
        found[f"{name}:{number}"] = logits[-4:].numpy()


def _tidy() -> None:
    """Remove what need not be opened, and the places of this machine."""
    for path in [*Path().glob("*/tensorboard"), *Path().glob("runs/*/tensorboard")]:
        shutil.rmtree(path)
    for path in [*Path("runs").glob("*/checkpoints"), Path("vision/checkpoints")]:
        shutil.rmtree(path, ignore_errors=True)  # the unfinished run keeps its own
    for page in Path("diagnosis").glob("*.html"):
        page.unlink()
    for file in Path().rglob("environment.json"):
        values = json.loads(file.read_text())
        values["command"] = "l2r " + values["command"].partition("__main__.py ")[2]
        values["instructions"] = {}
        file.write_text(json.dumps(values, indent=2))


def _write_text(root: Path) -> None:
    words = {"animals": ["cat", "dog", "bird", "fish"], "numbers": ["one", "two", "three", "four"]}
    for domain, choices in words.items():
        (root / domain).mkdir(parents=True)
        for number in range(6):
            text = " ".join(choices[(i * (number + 1) + i // 3) % 4] for i in range(900))
            (root / domain / f"{number}.txt").write_text(text)


def _swapped(family: str, sizes: dict[str, int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    import l2r

    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SIZES | sizes)).eval()
    model = l2r.swap_routers(model, l2r.L2RConfig(rank=2, heads=3))
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(4.0 if value.dim() > 1 else 1.0)  # so that a fault in a layer shows
    return model


def _adapter() -> Any:
    """LoRA on the attention of the swapped Mixtral, whose routers are trained whole."""
    import torch
    from peft import LoraConfig, get_peft_model

    import l2r

    model = l2r.load_pretrained("swapped/mixtral")
    options = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["gate"])
    adapted = get_peft_model(model, options)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                value.add_(torch.randn_like(value), alpha=0.1)
    adapted.save_pretrained("adapter")
    return adapted


def _l2r(*words: str, stop: int = 0) -> None:
    """Run a command of the older version; ``stop`` ends it once so many steps are logged."""
    command = [sys.executable, "-m", "l2r", *map(str, words)]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    metrics = Path("unfinished/metrics.jsonl")
    while stop and running.poll() is None:
        if metrics.is_file() and metrics.read_text().count('"train"') > stop:
            running.terminate()
            break
    if running.wait() and not stop:
        raise SystemExit(f"l2r {' '.join(words)} ended with {running.returncode}")


if __name__ == "__main__":
    main()
