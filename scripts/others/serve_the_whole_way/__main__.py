"""From a recipe to four servers: ``make serve-test``, or this folder in an environment like its.

Trains small/cpu-l2r-sips for some steps on a few pages, exports it as a Hugging Face folder, an
ONNX file and a program of torch.export, and asks vLLM (its Transformers backend, and our plug-in)
and ``l2r serve`` (with and without continuous batching) to continue prompts greedily; vLLM also
with a random Mixtral whose routers were swapped, both ways. Their tokens must be those of
transformers' ``generate``; vLLM's log-probabilities and the logits of ONNX runtime and of the
exported program must agree to 1e-4. Prints a Markdown table; exits with 1 where something differs.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from l2r.hf.checkpoints import load_causal_lm

HERE = Path(__file__).parent
PAGES = ("data", "diagnostics", "inspect", "scale", "swap", "vision")  # of our documentation
NEW = 16
SHORT = (  # so little text that it is learned by heart: answers differ, and are far from ties
    "data.vocab_size=512",
    "data.sequence_length=128",
    "optimizer.lr=0.003",
    "optimizer.warmup=20480",
    "evaluation.max_batches=2",
)
TOLERANCE = 1e-4
SHAPES = ((1, 1), (3, 40), (4, 21))  # not those that the exports are traced and checked with
MIXTRAL = {  # heads of 32 for vLLM on a CPU; such large weights that tokens are far from ties
    "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 8, "max_position_embeddings": 256,
    "initializer_range": 0.1,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/others/serve_the_whole_way", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/serve-test"))
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    out: Path = options.out
    run, folder = out / "run", out / "hf"
    pages = [(HERE.parents[2] / "docs" / f"{name}.md").read_text()[:4000] for name in PAGES]
    (out / "text").mkdir(parents=True, exist_ok=True)
    for name, page in zip(PAGES, pages, strict=True):
        (out / "text" / f"{name}.txt").write_text(page)
    changes = (f"data.corpus={out / 'text'}", f"training.steps={options.steps}", *SHORT)
    l2r("train", "small/cpu-l2r-sips", *changes, "--out", run)
    for form in ("hf", "onnx", "torch-export"):
        if not (out / form).exists():
            l2r("export", run, "--format", form, "--out", out / form)

    model, tokenizer = load_causal_lm(folder)
    starts = [page[1000:1040] for page in pages]
    prompts = [tokenizer(text)["input_ids"] for text in starts]
    answers = [continued(model, ids) for ids in prompts]
    wanted = [ids for ids, _ in answers]
    if len({token for ids in wanted for token in ids}) < 2 * len(prompts):
        raise ValueError(f"answers are too much alike to compare servers by; train more: {wanted}")
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in wanted]

    def as_in_vllm(implementation: str) -> str:
        return agreeing(in_vllm(folder, implementation, prompts), answers)

    def swapped_in_vllm(implementation: str) -> str:
        folders = swapped_mixtral(out, tokenizer)
        swapped, _ = load_causal_lm(folders["auto"])
        expected = [continued(swapped, ids) for ids in prompts]
        return agreeing(in_vllm(folders[implementation], implementation, prompts), expected)

    checks: dict[str, Callable[[], str]] = {
        "vLLM, Transformers backend": lambda: as_in_vllm("transformers"),
        "vLLM, plug-in": lambda: as_in_vllm("auto"),
        "vLLM, Transformers backend, a swapped Mixtral": lambda: swapped_in_vllm("transformers"),
        "vLLM, plug-in, a swapped Mixtral": lambda: swapped_in_vllm("auto"),
        "l2r serve, the run": lambda: same(over_http(starts, run), texts),
        "l2r serve, continuous batching": lambda: same(
            over_http(starts, folder, "--continuous-batching", "--num-blocks", 8), texts
        ),
        "torch.export against the model": lambda: close(exported(out), model),
        "ONNX runtime against the model": lambda: close(in_onnx_runtime(out), model),
        "ONNX runtime against torch.export": lambda: close(in_onnx_runtime(out), exported(out)),
    }
    print("| what | found | seconds |\n| --- | --- | --- |", flush=True)
    return max([report(name, check) for name, check in checks.items()])


def report(name: str, check: Callable[[], str]) -> int:
    """A row of the table; 1 where the check failed."""
    start, failed = time.monotonic(), 0
    try:
        found = check()
    except Exception as error:  # the other rows are worth having
        found, failed = f"FAILED: {error}", 1
    print(f"| {name} | {found} | {time.monotonic() - start:.0f} |", flush=True)
    return failed


def l2r(*args: object) -> None:
    subprocess.run(command(*args), check=True)


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "l2r", *map(str, args)]


def swapped_mixtral(out: Path, tokenizer: Any) -> dict[str, Path]:
    """A random Mixtral, swapped by the command for the plug-in, and exported for the backend."""
    stock, swapped, folder = (out / f"mixtral{end}" for end in ("", "-swapped", "-hf"))
    if not folder.exists():
        torch.manual_seed(0)
        config = MixtralConfig(vocab_size=len(tokenizer), eos_token_id=None, **MIXTRAL)
        MixtralForCausalLM(config).save_pretrained(stock)
        tokenizer.save_pretrained(stock)
        l2r("swap", stock, "--out", swapped)
        l2r("export", swapped, "--out", folder)
    return {"auto": swapped, "transformers": folder}


def continued(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens of transformers and their log-probabilities."""
    options = {"max_new_tokens": NEW, "do_sample": False}
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]), **options, return_dict_in_generate=True, output_logits=True
        )
    new = found.sequences[0, len(ids) :]
    scores = torch.cat(found.logits).log_softmax(-1)
    return new.tolist(), scores.gather(1, new[:, None])[:, 0].tolist()


def in_vllm(folder: Path, implementation: str, prompts: list[list[int]]) -> list[Any]:
    """For every prompt the tokens and their log-probabilities."""
    done = subprocess.run(
        [sys.executable, HERE / "greedy_in_vllm.py", folder, implementation, str(NEW)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ},
    )
    name = "Transformers" if implementation == "transformers" else "L2r"
    used = f"Resolved architecture: {name}"
    if done.returncode or used not in done.stdout + done.stderr:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-2000:]}")
    # The engine's processes write to the same output.
    line = next(line for line in done.stdout.splitlines() if line.startswith("[[["))
    answers: list[Any] = json.loads(line)
    return answers


def over_http(prompts: list[str], checkpoint: Path, *options: object) -> list[str]:
    """Every prompt at once, as requests of one server."""
    with server(checkpoint, *options) as ask, ThreadPoolExecutor() as pool:
        requests = [{"prompt": text, "max_tokens": NEW, "temperature": 0} for text in prompts]
        answers = pool.map(lambda body: ask("/v1/completions", body), requests)
        return [answer["choices"][0]["text"] for answer in answers]


@contextmanager
def server(checkpoint: Path, *options: object) -> Iterator[Callable[..., Any]]:
    """``l2r serve`` while the block runs; it must end by itself when it is interrupted."""
    with socket.create_server(("localhost", 0)) as probe:
        port = probe.getsockname()[1]

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url, kind = f"http://localhost:{port}{path}", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, data, kind), timeout=600) as answer:
            return json.load(answer)

    process = subprocess.Popen(
        command("serve", checkpoint, "--port", port, *options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(1200):
            try:
                ask("/health")
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    raise RuntimeError(f"l2r serve ended with {process.returncode}") from None
                time.sleep(0.5)
        yield ask
        process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
    finally:
        process.kill()


def exported(out: Path) -> Any:
    return torch.export.load(out / "torch-export" / "model.pt2").module()


def in_onnx_runtime(out: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    session = onnxruntime.InferenceSession(out / "onnx" / "model.onnx")
    return lambda ids: torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0])


def same(found: Sequence[Any], wanted: Sequence[Any]) -> str:
    if list(found) != list(wanted):
        raise ValueError(f"got {found}, transformers gives {wanted}")
    return f"the same greedy tokens for {len(found)} prompts"


def agreeing(found: Sequence[Any], wanted: Sequence[Any]) -> str:
    """Tokens that are the same, and log-probabilities within the tolerance."""
    line = same([ids for ids, _ in found], [ids for ids, _ in wanted])
    scores = [
        torch.tensor([row for _, row in answers], dtype=torch.float64)
        for answers in (found, wanted)
    ]
    off = float((scores[0] - scores[1]).abs().max())
    if not off <= TOLERANCE:
        raise ValueError(f"{line}, but log-probabilities differ by {off:.1e}")
    return f"{line}, log-probabilities within {off:.1e}"


def close(one: Callable[..., Any], other: Callable[..., Any]) -> str:
    """Largest difference of a logit over all shapes, as a number and a share of the largest."""
    found = []
    for shape in SHAPES:
        ids = torch.randint(3, 500, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            found.append([getattr(logits, "logits", logits) for logits in (one(ids), other(ids))])
    difference = float(torch.cat([(a - b).flatten() for a, b in found]).abs().max())
    largest = float(torch.cat([b.flatten() for _, b in found]).abs().max())
    if not difference <= TOLERANCE:
        raise ValueError(f"logits differ by {difference:.1e}, of {largest:.3g}")
    return f"logits differ by {difference:.1e} at most, of {largest:.3g}"


if __name__ == "__main__":
    sys.exit(main())
