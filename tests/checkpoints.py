"""A tiny random OLMoE with OLMoE's vocabulary, and one with a small BPE of its own."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from l2r.text.tokenizer import packaged_olmoe_tokenizer

TINY = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.5,  # far from uniform, so that answers differ clearly
}


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    return OlmoeForCausalLM(
        OlmoeConfig(**TINY, vocab_size=50280, max_position_embeddings=4096)
    ).eval()


@pytest.fixture(scope="session")
def olmoe_tokenizer():
    return PreTrainedTokenizerFast(
        tokenizer_file=str(packaged_olmoe_tokenizer()),
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
    )


@pytest.fixture(scope="session")
def small_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|padding|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Question: what is the answer? Answer: yes or no"] * 50, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|padding|>"
    )


@pytest.fixture
def checkpoint(tmp_path, small_tokenizer):
    """A folder with weights and a tokenizer of its own."""
    torch.manual_seed(1)
    config = OlmoeConfig(**TINY, vocab_size=len(small_tokenizer), max_position_embeddings=256)
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "model")
    small_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"
