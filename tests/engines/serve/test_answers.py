"""Answers over HTTP are those of ``generate``, in the form that OpenAI's own client reads."""

import json

import pytest
import torch

from l2r import L2RConfig, swap_routers
from l2r.engines.serve.answers import ChatAnswer, CompletionAnswer
from l2r.engines.serve.sequence import Choice, Sampler, Sampling, StreamedToken
from l2r.hf.checkpoints.export import export_remote_code
from l2r.hf.checkpoints.pretrained import load_causal_lm
from tests.checkpoints import checkpoint
from tests.engines.serve.conftest import CONTEXT, serving

__all__ = ["checkpoint"]
PROMPT, NEW = "Question: what is", 12
TURNS = [{"role": "system", "content": "no"}, {"role": "user", "content": "what"}]


def generated(folder, prompt=PROMPT, new=NEW):
    """The text and the token ids of a greedy continuation, by transformers' ``generate``."""
    model, tokenizer = load_causal_lm(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    tokens = tokens[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True), tokens.tolist()


def text_of(answer):
    assert answer.status == 200, answer
    (choice,) = answer.body["choices"]
    return choice["text"]


@pytest.fixture
def openai_client(client):
    openai = pytest.importorskip("openai", reason="the test extra is not installed")
    with openai.OpenAI(
        base_url=f"http://localhost:{client.port}/v1", api_key="none", max_retries=0
    ) as openai_client:
        yield openai_client


def test_a_greedy_completion_is_that_of_generate(client, folder):
    expected, _ = generated(folder)
    answer = client.complete(prompt=PROMPT, max_tokens=NEW)
    assert text_of(answer) == expected and len(expected) > NEW // 2
    assert answer.body["usage"]["completion_tokens"] <= NEW


@pytest.mark.parametrize("kind", ["exported", "swapped"])
def test_exported_and_swapped_checkpoints_are_served(kind, checkpoint, folder, tmp_path):
    served = tmp_path / "served"
    model, tokenizer = load_causal_lm(folder if kind == "exported" else checkpoint)
    if kind == "exported":
        export_remote_code(model, served)
    else:
        swap_routers(model, L2RConfig(rank=2, heads=4), layers=[1]).save_pretrained(served)
    tokenizer.save_pretrained(served)
    with serving(served) as client:
        assert text_of(client.complete(prompt=PROMPT, max_tokens=NEW)) == generated(served)[0]


def test_prompts_may_be_lists_and_token_ids(client, folder):
    _, tokenizer = load_causal_lm(folder)
    prompts = [PROMPT, "Answer: yes"]
    alone = [text_of(client.complete(prompt=prompt)) for prompt in prompts]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    assert text_of(client.complete(prompt=ids[0])) == alone[0]
    for together in (prompts, ids):
        choices = client.complete(prompt=together).body["choices"]
        assert [choice["text"] for choice in choices] == alone
        assert [choice["index"] for choice in choices] == [0, 1]


def test_a_prompt_may_fill_the_context_up_to_one_token(client):
    assert client.complete(prompt=[5] * (CONTEXT - 1), max_tokens=1).status == 200
    refused = client.complete(prompt=[5] * (CONTEXT - 1), max_tokens=2)
    assert refused.status == 400 and refused.error["param"] == "max_tokens"


def test_a_seed_repeats_and_n_gives_different_answers(client):
    drawn = {"temperature": 1.5, "top_p": 0.9, "seed": 3, "max_tokens": NEW, "n": 3}
    first, second = (client.complete(**drawn).body["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in second] and len(set(texts)) == 3
    assert text_of(client.complete(**drawn | {"n": 1})) == texts[0]


def test_a_small_top_p_is_greedy(client):
    greedy = text_of(client.complete(max_tokens=NEW))
    assert client.complete(max_tokens=NEW, temperature=2, top_p=1e-300).status == 200
    drawn = client.complete(max_tokens=NEW, temperature=2, top_p=1e-9)
    assert text_of(drawn) == greedy
    assert text_of(client.complete(max_tokens=NEW, temperature=1e-300)) == greedy


def test_an_echo_begins_with_the_prompt_and_its_scores(client, folder):
    model, tokenizer = load_causal_lm(folder)
    asked = {"prompt": PROMPT, "max_tokens": 2, "logprobs": 2, "echo": True}
    answer = client.complete(**asked)
    if not client.worker.echoes:
        assert answer.status == 400 and answer.error["param"] == "echo"
        return
    prompt = tokenizer(PROMPT)["input_ids"]
    after = client.complete(prompt=PROMPT, max_tokens=2, logprobs=2)
    assert text_of(answer) == PROMPT + text_of(after)
    assert answer.body["usage"] == after.body["usage"]
    listed = answer.body["choices"][0]["logprobs"]
    assert listed["token_logprobs"][0] is None and listed["top_logprobs"][0] is None
    with torch.no_grad():
        scores = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    given = torch.tensor(listed["token_logprobs"][1 : len(prompt)])
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    largest = [max(top.values()) for top in listed["top_logprobs"][1 : len(prompt)]]
    torch.testing.assert_close(torch.tensor(largest), scores.max(-1).values, atol=1e-4, rtol=1e-4)
    tail = after.body["choices"][0]["logprobs"]["token_logprobs"]
    assert listed["token_logprobs"][len(prompt) :] == pytest.approx(tail, abs=1e-5)
    assert text_of(client.complete(**asked | {"logprobs": None})) == text_of(answer)
    chunks = client.ask(
        "/v1/completions", {**asked, "model": "served", "temperature": 0, "stream": True}
    )
    parts = [json.loads(line[6:]) for line in chunks.body.decode().splitlines() if line[6:7] == "{"]
    assert "".join(part["choices"][0]["text"] for part in parts) == text_of(answer)


def test_text_ends_before_a_stop_string(client):
    whole = text_of(client.complete(max_tokens=NEW))
    stop = whole[2:4]
    answer = client.complete(max_tokens=NEW, stop=["never there", stop])
    assert text_of(answer) == whole[: whole.index(stop)]
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    assert answer.body["usage"]["completion_tokens"] < NEW
    assert client.complete(max_tokens=2).body["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_where_a_token_begins_whatever_a_stop_string_holds_back(client, stream):
    asked = {"max_tokens": NEW, "logprobs": 1, "stream": stream}
    whole = client.complete(max_tokens=NEW)
    held = [f"{letter}never there" for letter in sorted(set(text_of(whole)))[:4]]

    def offsets(**more):
        body = client.complete(**asked, **more).body
        lines = body.decode().splitlines() if stream else []
        parts = [json.loads(line[6:]) for line in lines if line[6:7] == "{"] or [body]
        listed = [part["choices"][0]["logprobs"] for part in parts]
        return [offset for part in listed for offset in part["text_offset"]]

    assert offsets(stop=held) == offsets() and offsets()[-1] > 0


def test_logprobs_are_those_of_the_model(client, folder):
    model, tokenizer = load_causal_lm(folder)
    prompt, (_, tokens) = tokenizer(PROMPT)["input_ids"], generated(folder)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)
    # A temperature changes what is drawn, not what is reported; top_p makes it greedy.
    drawn = {"temperature": 2, "top_p": 1e-9, "logprobs": 2}
    answer = client.complete(prompt=PROMPT, max_tokens=NEW, **drawn)
    listed = answer.body["choices"][0]["logprobs"]
    chosen = torch.tensor(listed["token_logprobs"])
    torch.testing.assert_close(chosen, expected.max(-1).values, atol=1e-4, rtol=1e-4)
    assert listed["tokens"] == [tokenizer.decode([token]) for token in tokens]
    pairs = zip(*(part.tolist() for part in expected.topk(2)), strict=True)
    for likeliest, (values, ids) in zip(listed["top_logprobs"], pairs, strict=True):
        first, second = (tokenizer.decode([token]) for token in ids)
        # Two tokens of one text have the value of the likelier.
        assert likeliest == pytest.approx({second: values[1], first: values[0]}, abs=1e-4)
    assert listed["text_offset"][0] == 0 and len(listed["text_offset"]) == len(tokens)


def test_log_probabilities_are_numbers_of_json():
    """OpenAI's -9999.0 stands for one that is too small for JSON."""
    logits = torch.tensor([3e38, -3e38])
    choice = Sampler(Sampling(max_tokens=1, temperature=0, alternatives=2))(logits)
    assert choice.likeliest == ((0, 0.0), (1, -9999.0))


def test_fields_of_others_are_ignored(client):
    plain = text_of(client.complete())
    sent = {"user": "someone", "metadata": {"run": "1"}, "store": False, "service_tier": "auto"}
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "echo": False}
    assert text_of(client.complete(**sent, **neutral, stop=None, n=None, seed=None)) == plain
    assert text_of(client.complete(model=None)) == plain


def test_the_official_client_completes_and_streams(openai_client, folder):
    import openai

    assert [model.id for model in openai_client.models.list()] == ["served"]
    asked = {"model": "served", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    whole = openai_client.completions.create(**asked, n=2, logprobs=1)
    texts = [choice.text for choice in whole.choices]
    assert texts == [generated(folder)[0]] * 2
    chunks = list(
        openai_client.completions.create(
            **asked, n=2, logprobs=1, stream=True, stream_options={"include_usage": True}
        )
    )
    for index, choice in enumerate(whole.choices):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        assert [part.logprobs.token_logprobs[0] for part in parts] == pytest.approx(
            choice.logprobs.token_logprobs, abs=1e-4
        )
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices
    prompt_tokens = len(load_causal_lm(folder)[1](PROMPT)["input_ids"])
    new_tokens = sum(len(choice.logprobs.tokens) for choice in whole.choices)
    assert whole.usage.prompt_tokens == prompt_tokens
    assert whole.usage.completion_tokens == new_tokens
    assert whole.usage.total_tokens == prompt_tokens + new_tokens
    with pytest.raises(openai.BadRequestError, match="temperature"):
        openai_client.completions.create(**asked | {"temperature": -1})
    with pytest.raises(openai.NotFoundError, match="another"):
        openai_client.completions.create(**asked | {"model": "another"})


def test_the_official_client_chats_and_streams(openai_client, folder):
    expected, tokens = generated(folder, "system: no\nuser: what\n")
    asked = {"model": "served", "messages": TURNS, "temperature": 0}
    whole = openai_client.chat.completions.create(
        **asked, max_completion_tokens=NEW, logprobs=True, top_logprobs=2
    )
    (choice,) = whole.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected)
    assert [len(token.top_logprobs) for token in choice.logprobs.content] == [2] * len(tokens)
    chunks = list(openai_client.chat.completions.create(**asked, max_tokens=NEW, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected
    parts = [{**TURNS[1], "content": [{"type": "text", "text": t} for t in ("wh", "at")]}]
    again = openai_client.chat.completions.create(
        **asked | {"messages": TURNS[:1] + parts}, max_tokens=NEW
    )
    assert again.choices[0].message.content == expected


def test_a_message_of_the_official_client_may_be_sent_back(openai_client):
    """Its dictionary has a null for every field that this server does not send."""
    asked = {"model": "served", "temperature": 0, "max_tokens": 2}
    message = openai_client.chat.completions.create(**asked, messages=TURNS).choices[0].message
    turns = [*TURNS, message.model_dump(), TURNS[1]]
    assert None in message.model_dump().values()
    assert openai_client.chat.completions.create(**asked, messages=turns).choices[0].message


def test_bytes_are_given_for_whole_characters(small_tokenizer):
    """A token of half a character has bytes that its text does not show."""
    chat = ChatAnswer("served", small_tokenizer, logprobs=True)
    tokens = small_tokenizer("a\u00e9")["input_ids"]
    steps = [StreamedToken(Choice(token, -1.0), "", "length") for token in tokens]
    content = chat.whole([steps], 1)["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[97], None, None]


def test_a_text_of_many_tokens_has_the_likeliest_value(small_tokenizer):
    """A completion lists values by text, and bytes of characters all have the same."""
    first, second = small_tokenizer("\u00e9")["input_ids"]
    (letter,) = small_tokenizer("b")["input_ids"]
    form = CompletionAnswer("served", small_tokenizer, logprobs=True)
    likeliest = ((first, -1.0), (second, -2.0))
    for choice, expected in [
        (Choice(first, -1.0, likeliest), {"\ufffd": -1.0}),
        (Choice(second, -2.0, likeliest), {"\ufffd": -1.0}),
        (Choice(letter, -3.0, likeliest), {"\ufffd": -1.0, "b": -3.0}),  # the chosen one too
        (Choice(letter, -3.0), {"b": -3.0}),
    ]:
        whole = form.whole([[StreamedToken(choice, "", "length")]], 1)
        assert whole["choices"][0]["logprobs"]["top_logprobs"] == [expected]


def test_an_end_token_is_no_text(folder, tmp_path):
    """Although the tokenizer has it as an ordinary one."""
    text, tokens = generated(folder)
    model, tokenizer = load_causal_lm(folder)
    place = next(n for n in range(1, NEW) if tokens[n] not in tokens[:n])
    model.generation_config.eos_token_id = tokens[place]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path) as client:
        answer = client.complete(prompt=PROMPT, max_tokens=NEW)
    assert text_of(answer) == tokenizer.decode(tokens[:place])
    assert text.startswith(text_of(answer))
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    assert answer.body["usage"]["completion_tokens"] == place + 1


def test_a_chat_without_a_template_is_refused(folder, tmp_path):
    model, tokenizer = load_causal_lm(folder)
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path) as client:
        answer = client.chat()
        assert answer.status == 400 and "no chat template" in answer.error["message"]
        assert client.complete().status == 200


def test_a_template_that_refuses_is_a_bad_request(folder, tmp_path):
    model, tokenizer = load_causal_lm(folder)
    model.save_pretrained(tmp_path)
    tokenizer.chat_template = "{{ raise_exception('one turn, please') }}"
    tokenizer.save_pretrained(tmp_path)
    with serving(tmp_path) as client:
        answer = client.chat()
        assert answer.status == 400 and "one turn, please" in answer.error["message"]
