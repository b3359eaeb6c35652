"""The routing of a text is what the routers say of each token, and of each expert's tokens."""

import base64

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from l2r import build_router
from l2r.analysis.certificates import rank2_radii
from l2r.analysis.certificates.certify import SHRINK, certify
from l2r.analysis.diagnostics.collect import collect_records
from l2r.analysis.diagnostics.text_routing import CONTEXTS, TextTrace, token_pieces, wilson_low
from l2r.report.own_text import own_text_records
from l2r.report.text_view import page_data
from tests.analysis.diagnostics.models import batches, ours, stock

SINGLE = torch.finfo(torch.float32).eps


def traced(model, given, *, tokens=40, domains=("one", "two"), tokenizer=None):
    trace = TextTrace(model, domains=domains, tokens=tokens)
    collect_records(model, given, domains=domains, reducers=[trace])
    return trace.result(tokenizer)


def test_numbers_of_a_stock_model_are_those_of_its_own_outputs():
    """Logits as transformers returns them; softmax, top-k and the distance by hand."""
    model, given = stock(), batches()
    text = traced(model, given, tokens=40)
    ids = torch.cat([batch["input_ids"] for batch in given])
    assert np.array_equal(ids.unique()[torch.from_numpy(text.tokens.astype(int))], ids)
    # 20 tokens of each domain: two rows, and rows of both domains take turns.
    assert text.shown.tolist() == [0, 2, 1, 3] and text.domain[text.shown].tolist() == [0, 0, 1, 1]
    with torch.no_grad():
        found = model(input_ids=ids, output_router_logits=True).router_logits
    for layer, outputs in enumerate(found):
        logits = outputs.view(*ids.shape, -1)[text.shown].double().flatten(0, 1)
        probs = logits.softmax(-1)
        weights, experts = probs.topk(2)
        ordered = logits.sort(descending=True).values
        rows = model.model.layers[layer].mlp.gate.weight.detach().double()
        apart = torch.linalg.vector_norm(rows[experts[:, 0], None] - rows, dim=-1)
        distance = (ordered[:, :1] - logits) / apart.where(apart > 0, torch.tensor(torch.nan))
        expected = {
            "experts": experts,
            "weights": weights,
            "margin": ordered[:, 0] - ordered[:, 1],
            "entropy": -(probs * probs.log()).sum(-1) / np.log(6),
            "radius": distance.nan_to_num(torch.inf).amin(-1) * SHRINK,
        }
        for name, value in expected.items():
            kept = torch.from_numpy(getattr(text, name)[layer].copy()).flatten(0, 1)
            # Batches of other sizes round the 16 products of a logit in another order; at
            # distances, a gap of logits is divided by a difference of weights.
            atol = 200 * SINGLE * float(logits.abs().max() / apart[apart > 0].min())
            torch.testing.assert_close(kept.double(), value.double(), rtol=1e-4, atol=atol)


def test_radii_of_an_l2r_router_never_exceed_the_full_certificate(monkeypatch):
    monkeypatch.setattr(rank2_radii, "ROUNDS", 12)
    model, given = ours(heads=3), batches(1, rows=2)
    text = traced(model, given, tokens=6)
    seen = {}
    router = model.model.layers[1].mlp.gate
    handle = router.register_forward_hook(lambda module, args, out: seen.update(x=args[0]))
    with torch.no_grad():
        model(input_ids=given[0]["input_ids"])
    handle.remove()
    x = seen["x"].reshape(2, 10, -1)[text.shown, :3].flatten(0, 1)
    full = certify(router, x).top1
    assert (text.radius[1].ravel() > 0).all()
    # Kept in fp32, which rounds up by at most half a unit.
    assert (torch.from_numpy(text.radius[1].ravel()).double() <= full * (1 + SINGLE)).all()


class OneWord(nn.Module):
    """Expert 3 serves token 7 alone; all other tokens go to the others, by their number."""

    def __init__(self):
        super().__init__()
        self.router = build_router("linear", hidden_size=12, num_experts=5, top_k=1)
        home = torch.tensor([3 if n == 7 else (0, 1, 2, 4)[n % 4] for n in range(12)])
        with torch.no_grad():
            self.router.weight.copy_(4 * nn.functional.one_hot(home, 5).T.float())

    def forward(self, input_ids):
        return self.router(nn.functional.one_hot(input_ids, 12).float())


def test_an_expert_that_serves_one_word_is_found_with_its_word():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 12, (6, 30), generator=generator)
    given = [
        {"input_ids": part, "domain": torch.zeros(2, dtype=torch.long)} for part in ids.split(2)
    ]
    text = traced(OneWord(), given, domains=("one",), tokens=60)
    seven = int(np.flatnonzero(text.pieces == " 7")[0])
    occurrences = int((ids == 7).sum())
    assert occurrences > CONTEXTS
    assert text.vocabulary[0, 3].tolist() == [seven] + [-1] * 11
    assert text.vocabulary_counts[0, 3].tolist() == [occurrences] + [0] * 11
    contexts = text.contexts[0, 3]
    assert len(set(contexts)) == CONTEXTS and (ids.flatten()[contexts] == 7).all()
    weight = np.exp(4) / (np.exp(4) + 4)
    np.testing.assert_allclose(text.context_weights[0, 3], weight, rtol=8 * SINGLE)
    # Tokens 0, 4 and 8 belong to expert 0, whole; the commonest is the surest.
    own = [n for n in range(12) if n % 4 == 0]
    shares = sorted(((ids == n).sum().item(), f" {n}") for n in own)[::-1]
    assert sorted(text.pieces[text.vocabulary[0, 0][:3]]) == sorted(f" {n}" for n in own)
    assert text.vocabulary_counts[0, 0][:3].tolist() == [count for count, _ in shares]


def test_batches_of_another_size_tell_the_same():
    given = batches(3)
    alone = [
        {name: value[n : n + 1] for name, value in batch.items()}
        for batch in given
        for n in range(4)
    ]
    one, many = traced(stock(), given), traced(stock(), alone)
    for name in ("experts", "tokens", "shown", "vocabulary", "vocabulary_counts"):
        assert np.array_equal(getattr(one, name), getattr(many, name)), name
    # Rows that start alike tie, so which of them is a context may differ; probabilities round.
    np.testing.assert_allclose(one.context_weights, many.context_weights, atol=200 * SINGLE)


def test_a_router_without_a_certificate_says_why():
    text = traced(ours(kind="mixture"), batches(1))
    assert np.isnan(text.radius).all() and all(text.remarks)


def test_too_few_tokens_are_refused_in_one_line():
    with pytest.raises(
        ValueError, match="text must be at least a token per domain, 2, or 0; got 1"
    ):
        TextTrace(stock(), domains=("a", "b"), tokens=1)


def test_shares_of_few_tokens_count_less():
    """Wilson's interval: 1 of 1 reaches down to 1 / (1 + z^2)."""
    low = wilson_low(torch.tensor([1, 9, 0]), torch.tensor([1, 10, 5]))
    assert low[0].item() == pytest.approx(1 / (1 + 1.96**2))
    assert low[1] > low[0] and low[2].item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
def test_pieces_join_to_the_text(kind):
    """Also where a tokenizer drops the space at the start of what it decodes."""
    text = "one two, three\nfour  five."
    tokenizer = Tokenizer(models.BPE())
    if kind == "byte level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"])
    tokenizer.train_from_iterator([text, "a b c"] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    ids = fast(text, add_special_tokens=False)["input_ids"]
    assert "".join(token_pieces(fast, ids)).removeprefix(" ") == text
    assert token_pieces(fast, [fast.eos_token_id]) == ["<end>"]
    assert token_pieces(None, [3]) == [" 3"]


def test_layers_of_a_smaller_k_have_minus_one_behind_their_experts():
    """HunYuan's moe_topk is a list; the page and the records leave those places out."""
    model, given = stock(), batches()
    model.model.layers[1].mlp.gate.top_k = 1
    text = traced(model, given)
    assert text.experts.shape[-1] == 2 and (text.experts[0] >= 0).all()
    assert (text.experts[1, ..., 1] == -1).all() and (text.weights[1, ..., 1] == 0).all()
    assert {len(token["experts"][1]) for token in own_text_records(text)} == {1}
    assert {len(token["weights"][0]) for token in own_text_records(text)} == {2}
    (checkpoint,) = page_data({"one": text})["checkpoints"]
    assert [layer["chosen"] for layer in checkpoint["layers"]] == [2, 1]
    sizes = [len(base64.b64decode(layer["experts"])) for layer in checkpoint["layers"]]
    assert sizes == [2 * sizes[1], text.margin[1].size]
