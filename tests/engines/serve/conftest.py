"""One tiny checkpoint behind a server in this process, with and without continuous batching."""

import gc
import http.client
import json
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from l2r.engines.serve import server
from l2r.engines.serve.server import ServeOptions
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from tests.checkpoints import TINY, small_tokenizer

for package in ("starlette", "uvicorn"):
    pytest.importorskip(package, reason="the serve extra is not installed")

__all__ = ["small_tokenizer"]
CONTEXT = 256
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Answer(NamedTuple):
    status: int
    body: object

    @property
    def error(self):
        """The fields of OpenAI's error form; nothing else may be in the body."""
        assert set(self.body) == {"error"}, self
        assert set(self.body["error"]) == {"message", "type", "param", "code"}, self
        return self.body["error"]


class Client:
    """Plain HTTP, so that a test may send what no client library would."""

    def __init__(self, port, worker):
        self.port, self.worker = port, worker

    def ask(self, path, body=None, *, method=None, headers=None):
        """The answer to one request; ``body`` is JSON already where it is bytes."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection = http.client.HTTPConnection("localhost", self.port, timeout=120)
        try:
            method = method or ("GET" if data is None else "POST")
            connection.request(method, path, data, sent | (headers or {}))
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        return Answer(answer.status, json.loads(text) if text[:1] == b"{" else text)

    def complete(self, **fields):
        body = {"model": "served", "prompt": "Question: what", "max_tokens": 3, "temperature": 0}
        return self.ask("/v1/completions", body | fields)

    def chat(self, **fields):
        body = {"model": "served", "messages": [{"role": "user", "content": "yes"}]}
        return self.ask("/v1/chat/completions", body | {"max_tokens": 3, "temperature": 0} | fields)


@pytest.fixture(autouse=True, scope="package")
def _frozen_garbage():
    """transformers collects garbage twice as batching stops; a second with what tests hold."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def folder(tmp_path_factory, small_tokenizer):
    """Our own OLMoE with routers of ours, its tokenizer, and a chat template."""
    folder = tmp_path_factory.mktemp("served")
    torch.manual_seed(0)
    sizes = {**TINY, "vocab_size": len(small_tokenizer), "max_position_embeddings": CONTEXT}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, router=router)).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def space_tokenizer():
    """Of Llama's and Mixtral's type: words with a space before them, the first of a text cut off.

    Characters outside the vocabulary are bytes.
    """
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "\u2581",
        *"abs.\u00e9",
        "of",
        "the",
        "\u2581of",
        "\u2581the",
        "\u2581capital",
        "\u2581a",
    ]
    vocab = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@contextmanager
def serving(folder, **options):
    """A client of a server that runs while the block does; it has the server's worker."""
    if options.get("continuous_batching"):
        options.setdefault("num_blocks", 4)
    options = {"name": "served", **options}
    with server.serving(folder, ServeOptions(port=0, **options)) as (port, worker):
        yield Client(port, worker)


@pytest.fixture(scope="module", params=[False, True], ids=["one_by_one", "batching"])
def client(request, folder):
    with serving(folder, continuous_batching=request.param) as client:
        yield client
