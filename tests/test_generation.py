"""The sampler of transformers' generate: its distribution is that of the stock chain."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import megasoftmax
from megasoftmax.integrations.generation import Sampler

CHAINS = {
    "temperature": {"temperature": 0.7, "top_k": 40},
    "top_k": {"top_k": 5},
    "top_p": {"top_k": None, "top_p": 0.8},
    "top_k and top_p": {"top_k": 9, "top_p": 0.83},
    "min_p": {"top_k": None, "min_p": 0.07},
    "no top_k": {"top_k": 0, "min_p": 0.07},
    "all": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
}


def stock(scores, *, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """The probabilities of generate with do_sample=True."""
    chain = [TemperatureLogitsWarper(temperature)]
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        chain.append(TopPLogitsWarper(top_p))
    if min_p is not None:
        chain.append(MinPLogitsWarper(min_p))
    for warper in chain:
        scores = warper(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("options", CHAINS.values(), ids=CHAINS)
def test_distribution_is_that_of_the_stock_chain(options, device, monkeypatch):
    scores = 3 * torch.randn(50, 200, device=device)
    found = []
    sample = megasoftmax.sample

    def recording(*args, **given):
        drawn, *distribution = sample(*args, **given, return_probabilities=True)
        found.append(distribution)
        return drawn

    monkeypatch.setattr(megasoftmax, "sample", recording)
    chosen = Sampler(**options, seed=3)(None, scores)
    ((p, tokens),) = found
    dense = torch.zeros_like(scores).scatter(-1, tokens, p)
    expected = stock(scores, **options)
    torch.testing.assert_close(dense, expected, rtol=1e-4, atol=1e-6)
    assert ((chosen == 0).sum(-1) == 1).all()
    assert (expected[chosen == 0] > 0).all()


@pytest.mark.parametrize("seed", [None, 5])
def test_generate(seed, device):
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0))
    model = model.to(device).eval()
    ids = torch.randint(61, (2, 5), device=device)

    def generate():
        torch.manual_seed(1)
        sampler = Sampler(top_k=20, top_p=0.9, seed=seed)
        options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
        return model.generate(ids, logits_processor=[sampler], **options)

    first, second = generate(), generate()
    assert first.shape == (2, 17)
    assert torch.equal(first, second)
    assert not torch.equal(first[0, 5:], first[1, 5:])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": 0}, ValueError, "temperature: expected a number above 0, got 0"),
        ({"temperature": "1"}, TypeError, "temperature: expected a number above 0, got str"),
        ({"temperature": None}, TypeError, "temperature: expected a number above 0, got NoneType"),
        ({"top_k": -1}, ValueError, "top_k: expected an integer from 0 on, got -1"),
        ({"top_k": "5"}, TypeError, "top_k: expected an integer from 0 on, got str"),
    ],
)
def test_errors(given, error, message):
    with pytest.raises(error, match=f"^{message}"):
        Sampler(**given)


def test_errors_of_steps():
    with pytest.raises(ValueError, match=r"^top_p: expected a number from 0 to 1, got 2"):
        Sampler(top_p=2)(None, torch.zeros(1, 9))
