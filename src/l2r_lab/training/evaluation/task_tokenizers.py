"""Lets ai2-olmo-eval read text with any Hugging Face tokenizer."""

from collections.abc import Sequence
from typing import Any

from olmo_eval import HFTokenizer, Tokenizer

from l2r.errors import InputError
from l2r.hf.checkpoints import token_ids, tokenizer_errors

_OLMOE_VOCABULARY = range(50280, 50305)  # 50,280 entries; OLMoE's embedding is padded to 50,304


class TaskTokenizer(Tokenizer):
    """The library's tokenizer interface over the checkpoint's own tokenizer.

    A beginning-of-text token is used only where the tokenizer adds one by itself. Padding, which
    a causal model never looks at, falls back to end-of-text and then to 0.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        bos = tokenizer.bos_token_id
        starts_with_bos = bos is not None and token_ids(tokenizer, "a")[:1] == [bos]
        self._bos = bos if starts_with_bos else None

    @property
    def vocab_size(self) -> int:
        """Entries, added tokens included."""
        return len(self._tokenizer)

    @property
    def pad_token_id(self) -> int:
        """Id that fills short rows."""
        pad = self._tokenizer.pad_token_id
        return self.eos_token_id if pad is None else pad

    @property
    def eos_token_id(self) -> int:
        """Id of end-of-text."""
        eos = self._tokenizer.eos_token_id
        return 0 if eos is None else eos

    @property
    def bos_token_id(self) -> int | None:
        """Id that begins every context, or None."""
        return self._bos

    def encode_batch(
        self, inputs: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids per text; ``add_special_tokens`` adds end-of-text."""
        ids: list[list[int]] = token_ids(self._tokenizer, list(inputs), add_special_tokens=False)
        return [[*row, self.eos_token_id] for row in ids] if add_special_tokens else ids

    def decode_batch(
        self, batch_token_ids: Sequence[Sequence[int]], skip_special_tokens: bool = True
    ) -> list[str]:
        """Texts of token ids."""
        options = {"skip_special_tokens": skip_special_tokens}
        with tokenizer_errors():
            return [self._tokenizer.decode(ids, **options) for ids in batch_token_ids]


def task_tokenizer(tokenizer: Any, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer to evaluate a model with.

    tokenizer: a Hugging Face tokenizer, one of the library's, or None, which a model with OLMoE's
        vocabulary reads as OLMoE's own tokenizer.
    vocab_size: of the model.

    Raises ValueError when there is none, or when it has ids that the model lacks.
    """
    if tokenizer is None:
        if vocab_size not in _OLMOE_VOCABULARY:
            raise InputError(
                f"the checkpoint has no tokenizer, and its vocabulary of {vocab_size} is not "
                f"OLMoE's; save its tokenizer in its folder or give one"
            )
        return HFTokenizer(
            "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json", pad_token_id=1, eos_token_id=50279
        )
    reader = tokenizer if isinstance(tokenizer, Tokenizer) else TaskTokenizer(tokenizer)
    if reader.vocab_size > vocab_size:
        raise InputError(
            f"tokenizer must have at most the model's {vocab_size} entries; got {reader.vocab_size}"
        )
    return reader
