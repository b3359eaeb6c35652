"""Prompts of a request as token ids that fit into the context, or a refusal."""

from typing import Any

from l2r.engines.serve.errors import RequestError
from l2r.engines.serve.limits import ServeLimits
from l2r.engines.serve.requests import ChatRequest, CompletionRequest
from l2r.errors import InputError, blames_input
from l2r.hf.checkpoints import token_ids

Prompt = tuple[list[int], int]  # token ids, and the most tokens that may follow


class Prompts:
    """Tokenizes for one model; ``ids`` is the number of token ids that it has."""

    def __init__(self, tokenizer: Any, *, ids: int, limits: ServeLimits) -> None:
        self.tokenizer = tokenizer
        self._ids, self._limits = ids, limits
        tokenizer("a")  # fast tokenizers set themselves up at the first call, in one thread

    def read(self, request: CompletionRequest | ChatRequest) -> list[Prompt]:
        """The prompts of a request. Raises RequestError (400) naming the field at fault."""
        if isinstance(request, ChatRequest):
            field, prompts = "messages", [self._chat(request)]
        else:
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

    def _chat(self, request: ChatRequest) -> list[int]:
        if not getattr(self.tokenizer, "chat_template", None):
            message = "the tokenizer of this model has no chat template; use /v1/completions"
            raise RequestError(400, message, param="messages", code="no_chat_template")
        messages = [message.for_template() for message in request.messages]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # of the template, which may refuse what it is given
            if not blames_input(error):
                raise
            message = f"the chat template refuses these messages: {error}"
            raise RequestError(400, message, param="messages") from None
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
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
