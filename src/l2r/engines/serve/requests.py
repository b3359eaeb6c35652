"""Fields of a request, honoured as OpenAI documents them, ignored, or refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.responses import JSONResponse

from l2r.engines.serve.sequence import Sampling
from l2r.errors import InputError

_TYPES = {
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}


class RequestError(Exception):
    """A request that is refused: status, the field at fault if it is one, and a code."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        """Return the whole answer to the request."""
        return JSONResponse(self.body(), self.status, headers)


# What client libraries send for the billing and caches of others.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")

_Token = Annotated[int, Field(ge=0)]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        """Clients write their types out with a null for every field that is not set."""
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Fields):
    """``include_usage``: one more chunk at the end, with the numbers of tokens."""

    include_usage: bool = False


class _Request(_Fields):
    model: str | None = None
    temperature: float = Field(1, ge=0, le=2)
    top_p: float = Field(1, gt=0, le=1)
    n: int = Field(1, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[_Stop] = Field([], max_length=4)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_prompt_start: int = Field(0, ge=0)
    frequency_penalty: float = Field(0, ge=0, le=0)
    presence_penalty: float = Field(0, ge=0, le=0)

    @model_validator(mode="before")
    @classmethod
    def _ignore(cls, data: Any) -> Any:
        return (
            {k: v for k, v in data.items() if k not in IGNORED} if isinstance(data, dict) else data
        )

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options must come with stream=true")
        return self

    @model_validator(mode="after")
    def _check_prompt_start(self) -> Self:
        if self.routed_experts_prompt_start and not self.return_routed_experts:
            raise InputError(
                "routed_experts_prompt_start must come with return_routed_experts=true"
            )
        return self

    @property
    def with_usage(self) -> bool:
        """Say whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def tokens(self) -> int | None:
        """Most tokens of an answer; None for what the context leaves."""
        raise NotImplementedError  # the two kinds of requests below name it differently

    @property
    def alternatives(self) -> int | None:
        """Likely tokens reported with each chosen one; None for no log-probabilities."""
        raise NotImplementedError  # the two kinds of requests below name it differently

    @property
    def echoes(self) -> bool:
        """Say whether an answer begins with its prompt."""
        return False

    def sampling(self, max_tokens: int, choice: int) -> Sampling:
        """Return the sampling settings of answer ``choice``; each answer has another seed."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=None if self.seed is None else (self.seed + choice) % 2**63,
            stop=tuple(self.stop),
            alternatives=self.alternatives,
            echo=self.echoes,
        )


class CompletionRequest(_Request):
    """The body of /v1/completions: one prompt or many, each text or token ids."""

    prompt: str | list[_Token] | list[str] | list[list[_Token]] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool = False
    best_of: int = Field(1, ge=1, le=1)

    @property
    def tokens(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(_Fields):
    """A part of a message; of OpenAI's kinds this server has text."""

    type: Literal["text"]
    text: str


class Message(_Fields):
    """Turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """Return the two fields that chat templates read, with the parts of the text joined."""
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatRequest(_Request):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise InputError("top_logprobs must come with logprobs=true")
        return self

    @property
    def tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Return the request in ``body``. Raises RequestError (400) naming the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [str(part) for part in first["loc"]]
        value = repr(first.get("input"))[:60] if place else ""
        message = ".".join(place) + f": {first['msg']}; got {value}" if place else first["msg"]
        raise RequestError(400, message, param=place[0] if place else None) from None
