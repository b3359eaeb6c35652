"""``routed_experts`` of answers are the experts that transformers records for the same tokens."""

import base64
import io
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from l2r import record, replay
from l2r.engines.serve.sequence import RoutedTokens
from l2r.hf.checkpoints.pretrained import load_causal_lm
from l2r.hf.routes import Fingerprint, from_vllm
from l2r.hf.routes.layers import fingerprint_of
from tests.checkpoints import TINY
from tests.engines.serve.conftest import serving

openai = pytest.importorskip("openai", reason="the test extra is not installed")
ASKED = {"return_routed_experts": True, "return_token_ids": True}
PROMPTS = [[5, 9, 14, 3, 7], [8, 2], [11, 4, 6, 19, 3, 3, 8, 12, 21]]


def decoded(text):
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def official(client):
    base = f"http://localhost:{client.port}/v1"
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0)


def recorded(model, tokens):
    """Experts of one sequence by itself, without the token that a server never forwards."""
    with record(model) as recorder, torch.no_grad():
        model(torch.tensor([tokens]))
    return recorder.routes().truncated(len(tokens) - 1).extended()


def tokens_of(choice):
    return choice["prompt_token_ids"] + choice["token_ids"]


def check_against_transformers(model, choices):
    """Every choice has the experts that its tokens take in transformers; the routes of all."""
    routes = from_vllm([choice["routed_experts"] for choice in choices], fingerprint_of(model))
    for choice, taken in zip(choices, routes, strict=True):
        expected = recorded(model, tokens_of(choice))
        assert np.array_equal(taken.lengths, expected.lengths)
        agreement = taken.agreement(expected)
        assert (agreement.tokens, agreement.compared) == (1.0, len(tokens_of(choice)) - 1)
    return routes


def check_replayed(model, choices, routes):
    """A left-padded batch of the answers takes the experts that the server gave."""
    sequences = [tokens_of(choice) for choice in choices]
    width = max(map(len, sequences))
    ids = torch.tensor([[0] * (width - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])
    with replay(model, routes), record(model) as recorder, torch.no_grad():
        model(ids, attention_mask=mask)
    assert recorder.routes().agreement(routes).tokens == 1.0


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory, small_tokenizer):
    """300 experts, a layer without a router, and a context of several blocks of the cache."""
    folder = tmp_path_factory.mktemp("long")
    torch.manual_seed(0)
    sizes = {
        **TINY, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 300,
        "moe_intermediate_size": 8, "head_dim": 16, "norm_topk_prob": True,
        "vocab_size": len(small_tokenizer), "max_position_embeddings": 2048,
    }  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


def test_the_official_client_reads_what_transformers_records_and_replays(client, folder):
    model, _ = load_causal_lm(folder)
    drawn = {"temperature": 1.5, "seed": 4, "max_tokens": 6, "n": 2}
    with official(client) as asking:
        answer = asking.completions.create(
            model="served", prompt=PROMPTS, **drawn, extra_body=ASKED
        )
    choices = [choice.model_extra for choice in answer.choices]
    assert [choice["prompt_token_ids"] for choice in choices] == [p for p in PROMPTS for _ in "12"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == len(choices)
    arrays = [decoded(choice["routed_experts"]) for choice in choices]
    assert [a.shape for a in arrays] == [(len(tokens_of(c)) - 1, 2, 2) for c in choices]
    assert {a.dtype for a in arrays} == {np.dtype(np.uint8)}
    check_replayed(model, choices, check_against_transformers(model, choices))


def test_a_stream_has_them_in_the_last_chunk_of_a_choice(client):
    asked = {"model": "served", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 4, "n": 2}
    with official(client) as asking:
        whole = asking.completions.create(**asked, extra_body=ASKED)
        chunks = list(asking.completions.create(**asked, stream=True, extra_body=ASKED))
    for choice in whole.choices:
        parts = [
            part.model_extra
            for chunk in chunks
            for part in chunk.choices
            if part.index == choice.index
        ]
        assert [token for part in parts for token in part["token_ids"]] == choice.token_ids
        assert [part.get("prompt_token_ids") for part in parts] == [PROMPTS[0], None, None, None]
        assert parts[-1]["routed_experts"] == choice.routed_experts
        assert not any("routed_experts" in part for part in parts[:-1])


def test_a_chat_has_them(client, folder):
    model, _ = load_causal_lm(folder)
    turns = [{"role": "user", "content": "what"}]
    asked = {"model": "served", "messages": turns, "temperature": 0, "max_tokens": 4}
    with official(client) as asking:
        whole = asking.chat.completions.create(**asked, extra_body=ASKED)
        chunks = list(asking.chat.completions.create(**asked, stream=True, extra_body=ASKED))
    prompt = whole.model_extra["prompt_token_ids"]
    check_against_transformers(model, [whole.choices[0].model_extra | {"prompt_token_ids": prompt}])
    assert chunks[0].model_extra["prompt_token_ids"] == prompt
    last = chunks[-1].choices[0].model_extra
    assert last["routed_experts"] == whole.choices[0].routed_experts


def test_a_prefix_is_left_out(client):
    whole = client.complete(prompt=PROMPTS[2], **ASKED).body["choices"][0]
    for start in (0, 4, len(PROMPTS[2])):
        asked = {**ASKED, "routed_experts_prompt_start": start}
        (choice,) = client.complete(prompt=PROMPTS[2], **asked).body["choices"]
        rest = decoded(choice["routed_experts"])
        assert np.array_equal(rest, decoded(whole["routed_experts"])[start:])
    one = client.complete(prompt=[5, 6], max_tokens=1, **ASKED, routed_experts_prompt_start=2)
    assert decoded(one.body["choices"][0]["routed_experts"]).shape == (0, 2, 2)
    asked = {**ASKED, "routed_experts_prompt_start": 3}
    refused = client.complete(prompt=PROMPTS, **asked)
    assert refused.status == 400 and refused.error["param"] == "routed_experts_prompt_start"


def test_an_answer_has_nothing_that_was_not_asked_for(client, folder):
    asked = {"prompt": PROMPTS[0], "max_tokens": 6}
    choice = client.complete(**asked).body["choices"][0]
    assert set(choice) == {"index", "finish_reason", "text", "logprobs"}
    assert set(client.complete(**asked, return_token_ids=True).body["choices"][0]) == {
        *choice, "token_ids", "prompt_token_ids"
    }  # fmt: skip
    more = client.complete(**asked, **ASKED, logprobs=1).body["choices"][0]
    assert more["text"] == choice["text"]


def test_an_echo_leaves_them_as_they_are(client):
    if not client.worker.echoes:
        return
    plain = client.complete(**ASKED).body["choices"][0]
    echoed = client.complete(**ASKED, echo=True, logprobs=1).body["choices"][0]
    for name in ("token_ids", "prompt_token_ids", "routed_experts"):
        assert echoed[name] == plain[name]


@pytest.mark.slow("long prompts")
@pytest.mark.parametrize("batching", [False, True])
def test_layers_without_a_router_many_experts_and_long_prompts(long_folder, batching):
    """Prompts beyond what one step takes are cut, and begin as others did that are cached."""
    model, _ = load_causal_lm(long_folder)
    prompt = np.random.default_rng(0).integers(3, 50, 700).tolist()
    prompts = [prompt, [*prompt[:600], 7, 9], prompt[300:]]
    options = {"continuous_batching": True, "num_blocks": 16} if batching else {}
    with serving(long_folder, **options) as client:
        plain = client.complete(prompt=prompts)
        assert plain.status == 200, plain
        answer = client.complete(prompt=prompts, **ASKED)
        with ThreadPoolExecutor(4) as pool:
            others = pool.map(lambda n: client.complete(prompt=prompts[n]), [0, 1, 2])
            again = pool.submit(client.complete, prompt=prompts, **ASKED).result()
            assert [other.status for other in others] == [200] * 3
    assert answer.status == 200, answer
    choices = answer.body["choices"]
    assert [c["text"] for c in choices] == [c["text"] for c in plain.body["choices"]]
    check_against_transformers(model, choices)
    first = decoded(choices[0]["routed_experts"])
    assert first.dtype == np.uint16 and first.shape == (702, 3, 2) and first.max() > 255
    assert not first[:, 1].any()
    check_against_transformers(model, again.body["choices"])


def test_a_model_without_routers_refuses_them(tmp_path, small_tokenizer):
    sizes = {name: value for name, value in TINY.items() if "experts" not in name}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(small_tokenizer))).save_pretrained(
        tmp_path
    )
    small_tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path) as client:
        assert client.complete().status == 200
        refused = client.complete(return_routed_experts=True)
    assert refused.status == 400 and refused.error["param"] == "return_routed_experts"
    assert "'llama' has no router" in refused.error["message"]


def test_routers_are_watched_only_while_it_is_asked_for(client, folder):
    routers = [layer.mlp.gate for layer in client.worker._model.model.layers]
    watched = []
    handle = client.worker._model.model.layers[0].register_forward_pre_hook(
        lambda *_: watched.append(["forward" in vars(router) for router in routers])
    )
    for asked in ({}, ASKED, {}):
        watched.clear()
        assert client.complete(**asked).status == 200
        assert watched == [[bool(asked)] * 2] * 3
    handle.remove()


def test_a_token_that_nothing_recorded_is_an_error_and_no_expert():
    routed = RoutedTokens(Fingerprint(num_experts=4, top_k=2, layers=(0,), hidden_layers=1), 1)
    routed.put(2, torch.zeros(2, 1, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="experts of token 1 were not recorded"):
        routed.text(5)
    routed.put(1, torch.ones(1, 1, 2, dtype=torch.uint8))
    assert decoded(routed.text(5))[:, 0, 0].tolist() == [1, 0, 0]
