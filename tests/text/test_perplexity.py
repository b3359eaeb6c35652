"""Validation cross-entropy against a loop in float64."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r.text.manifest import TokenizerIdentity
from l2r.text.perplexity import token_losses, validation_loss
from l2r.text.token_writer import write_token_files
from l2r.text.tokens import TokenDataset

VOCAB = 40


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        initializer_range=0.3, pad_token_id=1,
    )  # fmt: skip
    return OlmoeForCausalLM(config)


@pytest.fixture
def dataset(tmp_path):
    generator = torch.Generator().manual_seed(0)

    def documents(count):
        return [torch.randint(2, VOCAB, (11,), generator=generator).tolist() for _ in range(count)]

    identity = TokenizerIdentity("tiny", VOCAB, eos_token_id=0)
    write_token_files(tmp_path, {"web": documents(7), "code": documents(3)}, tokenizer=identity)
    return TokenDataset(tmp_path, 6)


def loop_loss(model, dataset, index):
    """Mean negative log-probability of the next tokens of one instance."""
    ids = dataset[index]["input_ids"]
    with torch.no_grad():
        logits = model.eval()(ids[None]).logits[0].double()
    total = 0.0
    for position in range(len(ids) - 1):
        probabilities = logits[position].exp() / logits[position].exp().sum()
        total -= probabilities[ids[position + 1]].log().item()
    return total / (len(ids) - 1)


@pytest.mark.parametrize("batch_size", [1, 4, 50])
def test_loss_is_the_mean_per_domain(tiny, dataset, batch_size):
    expected = {domain: [] for domain in dataset.domains}
    for index in range(len(dataset)):
        domain = dataset.domains[dataset[index]["domain"]]
        expected[domain].append(loop_loss(tiny, dataset, index))
    tiny.train()
    got = validation_loss(tiny, dataset, batch_size=batch_size)
    assert tiny.training
    means = {domain: sum(v) / len(v) for domain, v in expected.items()}
    assert got.pop("mean") == pytest.approx(sum(means.values()) / 2, rel=1e-5)
    assert got == pytest.approx(means, rel=1e-5)


def test_limited_batches_are_spread_over_the_files(tiny, dataset):
    wanted = {"web": (0, 13), "code": (14, 19)}  # the first and the last row of each
    means = {d: sum(loop_loss(tiny, dataset, i) for i in w) / 2 for d, w in wanted.items()}
    got = validation_loss(tiny, dataset, batch_size=2, max_batches=2)
    assert {domain: got[domain] for domain in means} == pytest.approx(means, rel=1e-5)


def test_every_domain_counts_with_the_same_number_of_rows(tiny, tmp_path):
    """Forty rows of the web against one of code: two of each domain that has them."""
    generator = torch.Generator().manual_seed(1)
    documents = {
        domain: [torch.randint(2, VOCAB, (6 * rows - 1,), generator=generator).tolist()]
        for domain, rows in {"web": 40, "code": 1, "wiki": 2}.items()
    }
    identity = TokenizerIdentity("tiny", VOCAB, eos_token_id=0)
    write_token_files(tmp_path, documents, tokenizer=identity)
    dataset = TokenDataset(tmp_path, 6)
    wanted = {"web": (0, 19, 39), "code": (40,), "wiki": (41, 42)}
    means = {d: sum(loop_loss(tiny, dataset, i) for i in w) / len(w) for d, w in wanted.items()}
    got = validation_loss(tiny, dataset, batch_size=2, max_batches=3)
    assert got.pop("mean") == pytest.approx(sum(means.values()) / 3, rel=1e-5)
    assert got == pytest.approx(means, rel=1e-5)


class LargestLogits(TorchDispatchMode):
    """Most rows of a tensor that has a column for every word; the output matrix is none."""

    def __init__(self, weight):
        super().__init__()
        self.words, self.rows, self.weight = len(weight), 0, weight.numel()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        words = isinstance(out, torch.Tensor) and out.dim() > 1 and out.shape[-1] == self.words
        if words and out.numel() != self.weight:
            self.rows = max(self.rows, out.numel() // self.words)
        return out


@pytest.mark.parametrize("chunk", [None, 4, 5, 100])
def test_losses_in_chunks_are_the_losses_and_logits_are_never_whole(tiny, dataset, chunk):
    rows = dataset.rows([0, 1])["input_ids"]
    results = []
    for given in (None, chunk):
        tiny.zero_grad()
        with LargestLogits(tiny.lm_head.weight) as largest:
            losses = token_losses(tiny, rows, chunk=given)
            losses.mean().backward()
        results.append([losses.detach(), *(p.grad.clone() for p in tiny.parameters())])
    for found, wanted in zip(*results, strict=True):
        # sums of rows.numel() terms, in another order
        limit = rows.numel() * torch.finfo(torch.float32).eps * wanted.abs().max()
        torch.testing.assert_close(found, wanted, rtol=0, atol=float(limit))
    assert largest.rows == (chunk if chunk in (4, 5) else rows.numel())
    assert tiny(input_ids=rows).logits.shape[-1] == VOCAB  # the model is as it was


def test_token_losses_have_one_value_per_next_token(tiny, dataset):
    rows = dataset.rows([0, 1])["input_ids"]
    assert token_losses(tiny.eval(), rows).shape == (2, 5)
