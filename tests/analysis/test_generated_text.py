"""``--generate`` in every family that writes: the tokens are those of transformers' own model."""

import string

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import l2r
from l2r.analysis.own_text import route_text
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import LOOPED, each_rule, from_folder, tiny_config, tiny_model

TEXT = "Routes"
LETTERS = string.ascii_letters + string.digits + ".,"  # as many as the models have tokens
WRITING = [
    name
    for name in FAMILIES
    if name not in LOOPED
    and type(tiny_config(name)) not in AutoModelForTokenClassification._model_mapping
]


def add_tokenizer(folder):
    """Give every token of the small models a letter of its own."""
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def written(folder, generate):
    routing = route_text(folder, TEXT, generate=generate)
    return [LETTERS.index(piece) for piece in routing.pieces[routing.tokens].ravel()], routing


def alone(model, folder, generate):
    ids = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")["input_ids"]
    ones = torch.ones_like(ids)
    with torch.no_grad():
        return model.generate(ids, attention_mask=ones, max_new_tokens=generate)[0].tolist()


@pytest.mark.parametrize("name", each_rule(WRITING))
def test_a_stock_bf16_folder_continues_as_generate_alone(name, tmp_path):
    model = tiny_model(FAMILIES[name]).bfloat16()
    model.save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    tokens, routing = written(tmp_path, 6)
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert tokens == alone(model, tmp_path, 6)
    assert routing.experts.shape[2] == len(tokens) > len(TEXT)


@pytest.mark.parametrize("name", each_rule(WRITING))
def test_a_swapped_folder_continues_as_generate_alone(name, tmp_path):
    model = from_folder(name, tmp_path / "stock", torch.float32)
    torch.manual_seed(0)
    l2r.swap_routers(model)
    model.save_pretrained(tmp_path / "swapped")
    add_tokenizer(tmp_path / "swapped")
    tokens, _ = written(tmp_path / "swapped", 6)
    assert tokens == alone(model.eval(), tmp_path / "swapped", 6)


def test_a_loop_of_layers_is_refused_because_a_token_has_several_routes(tmp_path):
    from_folder(LOOPED[0], tmp_path)
    add_tokenizer(tmp_path)
    with pytest.raises(l2r.errors.InputError, match=r"called twice.*--text-tokens 0"):
        route_text(tmp_path, TEXT, generate=6)
