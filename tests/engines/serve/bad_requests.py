"""Requests that must be refused: for the tests, and for scripts/others/serve_soak."""

import json

NO_ROUTES = [
    ("POST", "/load_model"), ("POST", "/reset"), ("POST", "/v1/responses"),
    ("POST", "/v1/systemone"),
    ("POST", "/v1/audio/transcriptions"), ("GET", "/docs"), ("GET", "/redoc"),
    ("GET", "/openapi.json"), ("POST", "/v1/models"), ("GET", "/v1/completions"),
    ("OPTIONS", "/v1/models"), ("DELETE", "/v1/models"), ("GET", "/"),
]  # fmt: skip
HUGE = 10**400
NUMBERS = [float("nan"), float("inf"), "x", [], {}, True, -1, HUGE, 1e308]
BAD = {
    "model": ["another", "../served", "", 5, [], {}, "\ud800", "x" * 10_000],
    "max_tokens": [0, -1, -5, "x", "3", 1e30, 1.5, *NUMBERS, 10_000_000],
    "temperature": [*NUMBERS, 2.1],
    "top_p": [*NUMBERS, 0, 1.1],
    "n": [0, *NUMBERS, 3000, 1.5],
    "seed": [1e30, 2**63, -(2**63) - 1, 1.5, "x", [], {}, True, HUGE, float("nan")],
    "stop": [5, {}, True, "", [""], [5], ["a"] * 5, "x" * 10_000, "\ud800", [None]],
    "stream": ["x", 5, [], {}],
    "stream_options": [{}, {"include_usage": True}, 5],  # without stream
    "return_routed_experts": ["x", 5, [], {}],
    "return_token_ids": ["x", 5],
    "routed_experts_prompt_start": [*NUMBERS, 1.5, 1],  # without return_routed_experts
    "generation_config": [{"num_beams": 1500}, '{"num_beams": 1500}'],
    "num_beams": [1500],
    "tools": [[]],
    "function_call": ["auto"],
}
OF_COMPLETIONS = {
    "prompt": [
        "", None, 5, {}, True, [], [""], [[]], [-1], [10**9], [HUGE], [1.5], [True], [None],
        ["a", 1], [[1], "a"], [[[1]]], "\ud800", "word " * 200_000, [1] * 200_000,
    ],
    "logprobs": [-1, 6, 1.5, "x", True, HUGE],
    "echo": [5, "x"],
    "best_of": [2, "x"],
    "suffix": ["end"],
    "messages": [[{"role": "user", "content": "yes"}]],
}  # fmt: skip
MESSAGE = {"role": "user", "content": "yes"}
OF_CHATS = {
    "messages": [
        None, 5, "yes", {}, [], [5], [None], [{}], [{"role": "user"}], [{"content": "yes"}],
        [{**MESSAGE, "role": "king"}], [{**MESSAGE, "role": 5}], [{**MESSAGE, "content": 5}],
        [{**MESSAGE, "content": None}], [{**MESSAGE, "content": "\ud800"}],
        [{**MESSAGE, "content": [{"type": "image_url", "image_url": {"url": "file:///etc"}}]}],
        [{**MESSAGE, "content": "word " * 200_000}], [MESSAGE] * 10_000,
    ],
    "logprobs": [5, "x"],
    "top_logprobs": [-1, 21, 2],  # without logprobs
    "max_completion_tokens": [0, -1, "x"],
    "chat_template_kwargs": [{"x": 1}],
    "response_format": [{"type": "json_object"}],
    "prompt": ["yes"],
}  # fmt: skip
COMPLETIONS, CHATS = {**BAD, **OF_COMPLETIONS}, {**BAD, **OF_CHATS}
BODIES = [
    b"", b"{", b"null", b"5", b"[]", b'"x"', b"{}", b"[" * 100_000, b'{"a":' * 50_000 + b"1",
    b"\xff\xfe", b'{"model": "served", "prompt": "\xed\xa0\x80"}',
    b'{"model": "served", "prompt": "\\ud800"}',
    b'{"model": "served", "prompt": "a", "max_tokens": ' + b"9" * 100_000 + b"}",
]  # fmt: skip
HOSTS = ["evil.example", "evil.example:80", "localhost.evil.example", "", "[", "a:b"]
ORIGINS = ["null", "http://evil.example", "http://localhost:1", "http://localhost.evil.example", ""]
CONTENT_TYPES = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]


def pairs(fields):
    """Every field with each of its bad values."""
    return [(field, value) for field, values in fields.items() for value in values]


def requests(name):
    """Every bad request to the model ``name``: method, path, body, headers."""
    json_body = {"Content-Type": "application/json"}
    found = [(method, path, b"{}", json_body) for method, path in NO_ROUTES]
    good = {"model": name, "max_tokens": 1}
    routes = {
        "/v1/completions": (good | {"prompt": "a"}, COMPLETIONS),
        "/v1/chat/completions": (good | {"messages": [MESSAGE]}, CHATS),
    }
    for path, (body, fields) in routes.items():
        for field, value in pairs(fields):
            found.append(("POST", path, json.dumps(body | {field: value}).encode(), json_body))
        found += [("POST", path, raw, json_body) for raw in BODIES]
        whole = json.dumps(body).encode()
        found += [("POST", path, whole, json_body | {"Host": host}) for host in HOSTS]
        found += [("POST", path, whole, json_body | {"Origin": origin}) for origin in ORIGINS]
        found += [("POST", path, whole, {"Content-Type": kind}) for kind in CONTENT_TYPES]
        found.append(("POST", path, b" " * 2**22, json_body))
    return found
