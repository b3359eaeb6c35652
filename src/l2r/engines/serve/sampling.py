"""Choose one token from logits by the settings of a request."""

from dataclasses import dataclass

import torch
from torch import Tensor

from l2r.errors import InputError

_GREEDY_BELOW = 1e-5  # a temperature by which float32 logits cannot be divided

_LEAST = -9999.0  # OpenAI's for what is less, of which JSON may have no number


@dataclass(frozen=True)
class Sampling:
    """The fields of a request that its tokens depend on.

    ``alternatives`` is the number of likely tokens reported with each chosen one, None for no
    log-probabilities at all. ``echo``: the answer begins with its prompt.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    alternatives: int | None = None
    echo: bool = False


@dataclass(frozen=True)
class Choice:
    """A token, its log-probability before temperature and top_p, and the likeliest tokens."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses tokens; the same seed and logits give the same tokens in any company."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> Choice:
        """Choose from ``logits`` [V]. Raises ValueError where they are not finite."""
        logits = logits.float().cpu()
        if not bool(logits.isfinite().all()):
            raise InputError("the model gave logits that are not finite")
        return self.score(logits, self._token(logits))

    def score(self, logits: Tensor, token: int) -> Choice:
        """Given token, with the numbers that the request asks for; ``logits`` [V] on the CPU."""
        if self._sampling.alternatives is None:
            return Choice(token)
        logprobs = logits.log_softmax(-1).clamp(min=_LEAST)
        values, tokens = logprobs.topk(min(self._sampling.alternatives, len(logprobs)))
        likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
        return Choice(token, float(logprobs[token]), likeliest)

    def _token(self, logits: Tensor) -> int:
        if self._sampling.temperature < _GREEDY_BELOW:
            return int(logits.argmax())
        probabilities = ((logits - logits.max()) / self._sampling.temperature).softmax(-1)
        if self._sampling.top_p < 1:
            ordered, order = probabilities.sort(descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            ordered[1:][before[1:] >= self._sampling.top_p] = 0  # the first stays
            probabilities = torch.zeros_like(ordered).scatter(-1, order, ordered)
        return int(torch.multinomial(probabilities, 1, generator=self._random))
