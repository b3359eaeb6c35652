"""``l2r serve`` as a process, and what it refuses before it listens."""

import signal
import socket
import subprocess
import sys
import threading

import pytest

from tests.checkpoints import checkpoint, small_tokenizer
from tests.engines.serve.conftest import CONTEXT, Client
from tests.engines.serve.test_load import until

__all__ = ["checkpoint", "small_tokenizer"]


def free_port():
    with socket.create_server(("localhost", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.slow("a fresh process")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_answers_and_ends_when_interrupted(folder, tmp_path, number):
    """In a process of its own, a few seconds: a request in flight does not keep it."""
    client = Client(free_port(), None)
    options = ("--port", str(client.port), "--name", "served", "--max-requests", "1")
    command = [sys.executable, "-m", "l2r", "serve", str(folder), *options]

    def health():
        try:
            return client.ask("/health").status
        except ConnectionError:
            assert process.poll() is None, process.returncode

    with (tmp_path / "err").open("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        try:
            until(lambda: health() == 200)
            assert client.complete().status == 200
            answers = []
            long = {"max_tokens": CONTEXT - 20, "n": 32, "stop": "never there"}
            asking = threading.Thread(target=lambda: answers.append(client.complete(**long)))
            asking.start()
            until(lambda: health() == 503)  # one request is the most at a time
            process.send_signal(number)
            process.wait(timeout=300)
            asking.join()
        finally:
            process.kill()
            process.wait()
        log.seek(0)
        err = log.read()
    assert process.returncode == 128 + number and "Traceback" not in err, err
    assert [answer.status for answer in answers] == [503]


def test_a_checkpoint_that_cannot_be_served_is_refused_in_one_line(l2r, checkpoint, tmp_path):
    port = free_port()
    assert "--num-blocks is for continuous" in l2r("serve", checkpoint, "--num-blocks", 4).refusal()
    assert "checkpoint must be a folder" in l2r("serve", tmp_path / "none").refusal()
    with socket.create_server(("localhost", port)):
        assert "Address already in use" in l2r("serve", checkpoint, "--port", port).refusal()
    unknown = l2r("serve", checkpoint, "--host", "no.such.host.invalid", "--port", port)
    assert "host must be an address of this machine; got 'no.such" in unknown.refusal()
    wrong = ("--dtype", "float33", "--port", port)
    assert "float64; got 'float33'" in l2r("serve", checkpoint, *wrong).refusal()
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "the checkpoint has no tokenizer" in l2r("serve", checkpoint).refusal()
