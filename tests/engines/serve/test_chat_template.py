"""Chat templates are programs: ones that loop or swell cost a chat its answer, and nobody else."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from l2r.engines.serve.options import ServeLimits
from l2r.engines.serve.prompts import ChatTemplate
from l2r.engines.serve.requests import RequestError
from tests.engines.serve.conftest import CONTEXT, TEMPLATE, serving

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ (messages|length + 9) ** (10 ** 9) }}"  # one call of C: no signal ends it
LIMITS = ServeLimits(context=CONTEXT, template_timeout=0.3)
ONE = [{"role": "user", "content": "yes"}]


@pytest.fixture
def of(folder, request):
    """A renderer of a template, closed after the test."""

    def made(template, limits=LIMITS):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        chats = ChatTemplate(tokenizer, limits)
        request.addfinalizer(chats.close)
        return chats

    return made


CHATS = [
    ONE,
    [{"role": "system", "content": "\u00e9\u2028\n\U0001f600 {{ 1 }}"}, *ONE],
    [{"role": "user", "content": ""}],
]


@pytest.mark.parametrize("messages", CHATS, ids=["one", "two", "empty"])
def test_a_text_is_that_of_transformers(messages, of):
    template = TEMPLATE + "{{ eos_token }}{% if add_generation_prompt %}assistant: {% endif %}"
    chats = of(template, replace(LIMITS, template_timeout=60))
    expected = chats._tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert chats.render(messages) == expected and expected.endswith("assistant: ")


@pytest.mark.parametrize("template", [LOOP, POWER], ids=["loop", "power"])
def test_a_template_without_an_end_is_ended_and_the_next_chat_is_rendered(template, of):
    chats = of(f"{{% if messages[0].content == 'go' %}}{template}{{% endif %}}well")
    with pytest.raises(RequestError, match=r"did not end within 0\.3 seconds") as error:
        chats.render([{"role": "user", "content": "go"}])
    assert error.value.status == 503 and "did not end" in chats.trouble
    chats._limits = ServeLimits(template_timeout=60)
    assert chats.render(ONE) == "well" and chats.trouble is None


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10 ** 10 }}", "more than 1024 MiB"),
        ("{{ 'a' * 10 ** 7 }}", f"at most {LIMITS.characters} characters"),
        ("{{ raise_exception('one turn, please') }}", "one turn, please"),
        ("{% if %}", "Expected an expression"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
    ids=["memory", "length", "refusal", "syntax", "sandbox"],
)
def test_a_template_that_fails_is_a_bad_request(template, reason, of):
    chats = of(template, replace(LIMITS, template_timeout=60))
    for _ in range(2):
        with pytest.raises(RequestError, match=reason) as error:
            chats.render(ONE)
        assert error.value.status == 400
    assert chats.trouble is None


def test_a_process_that_was_killed_is_replaced(of):
    chats = of(TEMPLATE, replace(LIMITS, template_timeout=60))
    text = chats.render(ONE)
    chats._renderer._process.kill()
    with pytest.raises(RequestError, match="ended its process"):
        chats.render(ONE)
    assert chats.render(ONE) == text


def test_a_tokenizer_with_code_of_its_own_renders_by_it(of, monkeypatch):
    chats = of(TEMPLATE)
    own = lambda self, messages, **options: f"own {len(messages)} {options}"  # noqa: E731
    monkeypatch.setattr(type(chats._tokenizer), "apply_chat_template", own, raising=False)
    assert chats.render(ONE) == "own 1 {'tokenize': False, 'add_generation_prompt': True}"


def test_completions_go_on_beside_a_template_that_loops(folder, tmp_path):
    """And /health says that chats have no answers, until one has."""
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink()
    template = f"{{% if messages[0].content == 'go' %}}{LOOP}{{% endif %}}yes"
    (tmp_path / "chat_template.jinja").write_text(template)
    limits = ServeLimits(template_timeout=3)
    with serving(tmp_path, limits=limits) as client, ThreadPoolExecutor(1) as pool:
        assert client.chat().status == 200
        begun = time.monotonic()
        looping = pool.submit(client.chat, messages=[{"role": "user", "content": "go"}])
        answers = [client.complete() for _ in range(3)]
        assert all(answer.status == 200 for answer in answers)
        assert not looping.done() or time.monotonic() - begun > 3
        assert looping.result().status == 503
        health = client.ask("/health")
        assert health.status == 503 and "chat template" in health.error["message"]
        assert client.chat().status == 200
        assert client.ask("/health").status == 200
