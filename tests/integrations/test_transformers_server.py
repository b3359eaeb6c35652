"""Checkpoints behind transformers' server answer over HTTP what ``generate`` answers."""

import gc
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

from l2r import L2RConfig, swap_routers
from l2r.checkpoints.export import export_remote_code
from l2r.checkpoints.loading import load_causal_lm
from l2r.integrations import transformers_server
from l2r.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from tests.evaluation.conftest import TINY, checkpoint, small_tokenizer

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package, reason="the serve extra is not installed")

__all__ = ["checkpoint", "small_tokenizer"]
PROMPT, NEW = "Question: what is", 12


@pytest.fixture
def port():
    """One that is free now."""
    with socket.create_server(("localhost", 0)) as probe:
        return probe.getsockname()[1]


def saved(kind, folder, tokenizer, stock):
    """Our own OLMoE, the same exported, or a stock one with routers swapped in one layer."""
    sizes = {**TINY, "vocab_size": len(tokenizer), "max_position_embeddings": 256}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    if kind == "swapped":
        model, _ = load_causal_lm(stock)
        swap_routers(model, L2RConfig(rank=2, heads=4), layers=[1]).save_pretrained(folder)
    else:
        model = L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, router=router)).eval()
        write = export_remote_code if kind == "exported" else type(model).save_pretrained
        write(model, folder)
    tokenizer.save_pretrained(folder)
    return folder


def ask(port, path, **body):
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(
        f"http://localhost:{port}{path}", data, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def when_ready(port):
    for _ in range(6000):  # minutes, for a process that has to import first on a busy machine
        try:
            return ask(port, "/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.05)
    raise TimeoutError("the server did not answer")


def asked(port):
    """A greedy completion, once the server answers; the models it lists; another is refused."""
    assert when_ready(port) == {"status": "ok"}
    assert [model["id"] for model in ask(port, "/v1/models")["data"]] == ["served"]
    body = {"model": "served", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        ask(port, "/v1/completions", **{**body, "model": "another"})
    refused.value.close()
    return ask(port, "/v1/completions", **body)["choices"][0]["text"]


def generated(folder):
    model, tokenizer = load_causal_lm(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["exported", "swapped"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_greedy_completion_over_http_is_that_of_generate(
    kind, port, checkpoint, small_tokenizer, tmp_path
):
    folder = saved(kind, tmp_path / "served", small_tokenizer, checkpoint)
    server = transformers_server.serve(folder, port=port, non_blocking=True)
    try:
        answer = asked(port)
    finally:
        server.kill_server()
        gc.collect()  # transformers leaves the event loop of its thread open
    assert answer == generated(folder) and len(answer) > NEW // 2


def test_the_command_batches_continuously_and_ends_when_interrupted(
    port, checkpoint, small_tokenizer, tmp_path
):
    """In a process of its own, a few seconds: transformers' thread outlives an interrupt."""
    folder = saved("own", tmp_path / "served", small_tokenizer, checkpoint)
    options = ("--port", str(port), "--continuous-batching")  # in a cache of our size
    command = [sys.executable, "-m", "l2r", "serve", str(folder), *options]
    with (tmp_path / "err").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            answer = asked(port)
            process.send_signal(signal.SIGINT)
            process.wait(timeout=300)
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        err = log.read()
    assert answer == generated(folder) and len(answer) > NEW // 2
    assert process.returncode == 130 and "Traceback" not in err, err


def test_what_cannot_be_served_is_refused_in_one_line(l2r, checkpoint, port, tmp_path, monkeypatch):
    assert "num_blocks is for continuous" in l2r("serve", checkpoint, "--num-blocks", 4).refusal()
    assert "checkpoint must be a folder" in l2r("serve", tmp_path / "none").refusal()
    with socket.create_server(("localhost", port)):
        assert "Address already in use" in l2r("serve", checkpoint, "--port", port).refusal()
    wrong = ("--dtype", "float33", "--port", port)
    assert "Unsupported dtype: 'float33'" in l2r("serve", checkpoint, *wrong).refusal()
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "checkpoint must hold a tokenizer" in l2r("serve", checkpoint).refusal()
    monkeypatch.setattr(transformers_server.transformers, "__version__", "5.30.0")
    line = l2r("serve", checkpoint).refusal()
    assert "transformers must be >=5.19,<5.24, the range tried; got 5.30.0" in line
