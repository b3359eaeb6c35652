"""Prompts of a request as token ids that fit into the context, or a refusal."""

from typing import Any

from l2r.engines.serve.chat_template import ChatTemplate
from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.limits import ServeLimits
from l2r.engines.serve.requests import ChatRequest, CompletionRequest
from l2r.errors import InputError
from l2r.hf.checkpoints import token_ids

Prompt = tuple[list[int], int]  # token ids, and the most tokens that may follow


class Prompts:
    """Tokenizes for one model; ``ids`` is the number of token ids that it has."""

    def __init__(self, tokenizer: Any, *, ids: int, limits: ServeLimits) -> None:
        self.tokenizer = tokenizer
        self._ids, self._limits = ids, limits
        self.chats = ChatTemplate(tokenizer, limits)
        tokenizer("a")  # fast tokenizers set themselves up at the first call, in one thread

    def render(self, request: ChatRequest) -> str:
        """The text of a chat. Raises RequestError: 400 naming the field, 503 for too much time."""
        if not self.chats.exists:
            message = "the tokenizer of this model has no chat template; use /v1/completions"
            raise RequestError(400, message, param="messages", code="no_chat_template")
        messages = [message.for_template() for message in request.messages]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        return self.chats.render(messages)

    def read(self, request: CompletionRequest | ChatRequest, chat: str | None) -> list[Prompt]:
        """The prompts of a request; ``chat`` is the text of one. Raises RequestError (400)."""
        if chat is not None:
            field = "messages"
            prompts = [self.tokenizer(chat, add_special_tokens=False)["input_ids"]]
        else:
            assert isinstance(request, CompletionRequest)
            field, prompts = "prompt", self._completion(request)
        if len(prompts) * request.n > self._limits.choices:
            raise RequestError(
                400,
                f"prompts times n must be at most {self._limits.choices}; got {len(prompts)} "
                f"prompts, n={request.n}",
                param="n" if request.n > 1 else field,
            )
        for prompt in prompts:
            self._check_ids(prompt, field)
        return [(prompt, self._room(prompt, request, field)) for prompt in prompts]

    def _completion(self, request: CompletionRequest) -> list[list[int]]:
        prompts = request.prompts
        self._check_length(sum(len(p) for p in prompts if isinstance(p, str)), "prompt")
        return [self._ids_of(p) if isinstance(p, str) else p for p in prompts]

    def _ids_of(self, text: str) -> list[int]:
        if not text:
            raise RequestError(400, "prompt must not be empty", param="prompt")
        try:
            ids: list[int] = token_ids(self.tokenizer, text)
        except InputError as error:
            raise RequestError(400, str(error), param="prompt") from None
        return ids

    def _check_length(self, characters: int, field: str) -> None:
        most = self._limits.characters
        if characters > most:
            message = f"{field} must have at most {most} characters; got {characters}"
            raise RequestError(400, message, param=field, code="context_length_exceeded")

    def _check_ids(self, prompt: list[int], field: str) -> None:
        """Also of text: a tokenizer may have tokens that the model has no embedding for."""
        unknown = next((token for token in prompt if token >= self._ids), None)
        if unknown is not None:
            message = f"{field} must have token ids below {self._ids}; got {str(unknown)[:30]}"
            raise RequestError(400, message, param=field)

    def _room(self, prompt: list[int], request: CompletionRequest | ChatRequest, field: str) -> int:
        context = self._limits.context
        if not 1 <= len(prompt) < context:
            message = f"{field} must have 1 to {context - 1} tokens; got {len(prompt)}"
            raise RequestError(400, message, param=field, code="context_length_exceeded")
        start = request.routed_experts_prompt_start
        if start > len(prompt):
            message = (
                f"routed_experts_prompt_start must be at most {len(prompt)}, the tokens of the "
                f"prompt; got {str(start)[:30]}"
            )
            raise RequestError(400, message, param="routed_experts_prompt_start")
        room = context - len(prompt)
        if request.tokens is not None and request.tokens > room:
            raise RequestError(
                400,
                f"max_tokens must be at most {room}, the context of {context} without "
                f"{len(prompt)} of the prompt; got {str(request.tokens)[:30]}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return request.tokens or room
