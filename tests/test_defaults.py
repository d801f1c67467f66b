"""Results follow the tensors of a call: torch's default device and default dtype change nothing."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from inputs import coin, normal
from torch import Tensor
from torch.utils import _device
from torch.utils._pytree import tree_leaves

import megasoftmax
import megasoftmax.integrations
from megasoftmax import FusedAttention, TileMask, attention, biases, ranges, softmax
from megasoftmax.functions.softmax import softmax_backward
from megasoftmax.integrations import flash_attn

BATCH, HEADS, QUERIES, KEYS, DIM, PACKED = 2, 4, 20, 24, 8, 30
PACKAGE = Path(megasoftmax.__file__).parent
INTEGERS = {"arange", "randint"}  # which make int64 whatever the default dtype is


def softmax_calls(device, dtype):
    """Name -> a function and its arguments."""
    scores = normal(BATCH, HEADS, QUERIES, KEYS, device=device, dtype=dtype)
    mask = coin(BATCH, 1, QUERIES, KEYS, device=device)
    bias = normal(HEADS, QUERIES, KEYS, device=device, dtype=dtype, seed=1)
    sink = normal(HEADS, device=device, seed=2)
    lengths = torch.tensor([5, KEYS], device=device)
    megatron = megasoftmax.FusedScaleMaskSoftmax(
        *(False, False, "causal", True, None, True, 0.5), window_size=(7, 0)
    )

    def hide(scores, mask):
        return scores.masked_fill(mask, -1e4)

    unfused = megasoftmax.FusedScaleMaskSoftmax(*(False, False, "causal", False, hide, True, 0.5))

    def with_everything(scores, bias, sink):
        visible = ranges.lengths(lengths)
        options = {"scale": 0.3, "causal": True, "window": (9, 0), "visible": visible}
        return softmax(
            scores, **options, mask=mask, bias=bias, sink=sink, dropout=0.2, return_lse=True
        )

    return {
        "softmax": (softmax, scores),
        "scale": (lambda s: softmax(s, scale=0.3, dtype=torch.float32, return_lse=True), scores),
        "mask": (lambda s: softmax(s, mask=mask), scores),
        "bias": (lambda s, b: softmax(s, bias=b), scores, bias),
        "causal": (lambda s: softmax(s, causal=True), scores),
        "window": (lambda s: softmax(s, window=(3, 1)), scores),
        "visible": (lambda s: softmax(s, visible=ranges.lengths(lengths)), scores),
        "sink": (lambda s, sink: softmax(s, sink=sink), scores, sink),
        "number as sink": (lambda s: softmax(s, sink=0.5), scores),
        "dropout": (lambda s: softmax(s, dropout=0.3), scores),
        "columns": (lambda s: softmax(s, dim=1), scores),
        "everything": (with_everything, scores, bias, sink),
        "softmax_backward": (
            lambda s: softmax_backward(s.detach(), s.detach(), scale=0.3, causal=True),
            scores,
        ),
        "softmax_topk": (lambda s: megasoftmax.softmax_topk(s, 3, return_lse=True), scores),
        "softmax_topk, mask": (
            lambda s, b: megasoftmax.softmax_topk(s, 3, mask=mask, bias=b, renormalize=True),
            *(scores, bias),
        ),
        "SoftmaxOne": (megasoftmax.SoftmaxOne(), scores),
        "SoftmaxOne, offset": (
            lambda s, sink: megasoftmax.SoftmaxOne(-1, sink)(s),
            *(scores, sink),
        ),
        "FusedScaleMaskSoftmax": (lambda s: megatron(s, mask), scores),
        "FusedScaleMaskSoftmax, offset": (lambda s, sink: megatron(s, None, sink), *(scores, sink)),
        "FusedScaleMaskSoftmax, unfused": (lambda s: unfused(s, None), scores),
        "ScaledMaskedSoftmax": (
            lambda s: megasoftmax.ScaledMaskedSoftmax.apply(s, mask, 0.5),
            scores,
        ),
        "ScaledUpperTriangMaskedSoftmax": (
            lambda s: megasoftmax.ScaledUpperTriangMaskedSoftmax.apply(s, 0.5),
            scores[0],
        ),
    }


def attention_calls(device, dtype):
    three = tuple(
        normal(BATCH, heads, length, DIM, device=device, dtype=dtype, seed=seed)
        for seed, (heads, length) in enumerate(((HEADS, QUERIES), (2, KEYS), (2, KEYS)))
    )
    rows = [each.transpose(1, 2) for each in three]
    packed = [each.transpose(1, 2).flatten(0, 1)[:PACKED] for each in three]
    mask = coin(BATCH, 1, QUERIES, KEYS, device=device)
    bias = normal(HEADS, QUERIES, KEYS, device=device, dtype=dtype, seed=3)
    table = normal(HEADS, QUERIES + KEYS - 1, device=device, dtype=dtype, seed=4)
    buckets = normal(8, HEADS, device=device, dtype=dtype, seed=5)
    sink, slopes = normal(HEADS, device=device, seed=6), biases.alibi_slopes(HEADS, device)
    offsets = torch.tensor([0, 11, PACKED], device=device)
    lengths = torch.tensor([5, KEYS], device=device)
    module = FusedAttention(HEADS, causal=True, relative_buckets=8, sink=True, dropout=0.1)
    module = module.to(device)

    def t5(query, key, value, buckets):
        bias = biases.t5_bias(buckets, QUERIES, KEYS, bidirectional=True)
        return attention(query, key, value, bias=bias, return_lse=True)

    def alibi(query, key, value, slopes):
        return attention(query, key, value, bias=biases.alibi_bias(slopes, QUERIES, KEYS))

    def merged(query, key, value):
        halves = zip(key.chunk(2, 2), value.chunk(2, 2), strict=True)
        parts = [attention(query, *half, return_lse=True) for half in halves]
        return megasoftmax.merge_attention(*zip(*parts, strict=True))

    return {
        "attention": (attention, *three),
        "as many queries": (lambda q, k, v: attention(q, q, q, causal=True), *three),
        "one query": (lambda q, k, v: attention(q[:, :, :1], k, v), *three),
        "mask": (lambda *t: attention(*t, mask=mask), *three),
        "TileMask": (lambda *t: attention(*t, mask=TileMask(mask)), *three),
        "TileMask of blocks": (
            lambda *t: attention(*t, mask=TileMask.from_blocks(mask[:, :, :1, :1], 64)),
            *three,
        ),
        "causal": (lambda *t: attention(*t, causal=True), *three),
        "window": (lambda *t: attention(*t, window=(3, 1)), *three),
        "visible": (lambda *t: attention(*t, visible=ranges.lengths(lengths)), *three),
        "bias": (lambda q, k, v, b: attention(q, k, v, bias=b), *three, bias),
        "bias of no gradient": (lambda *t: attention(*t, bias=bias.detach()), *three),
        "RelativeBias": (
            lambda q, k, v, t: attention(q, k, v, bias=megasoftmax.RelativeBias(t)),
            *(*three, table),
        ),
        "t5_bias": (t5, *three, buckets),
        "alibi_bias": (alibi, *three, slopes),
        "sink": (lambda q, k, v, s: attention(q, k, v, sink=s), *three, sink),
        "number as sink": (lambda *t: attention(*t, sink=0.5, causal=True), *three),
        "dropout": (lambda *t: attention(*t, dropout=0.3), *three),
        "attention_varlen": (
            lambda q, k, v, s: megasoftmax.attention_varlen(
                *(q, k, v, offsets), causal=True, window=(4, 0), sink=s, return_lse=True
            ),
            *(*packed, sink),
        ),
        "merge_attention": (merged, *three),
        "scaled_dot_product_attention": (
            lambda *t: megasoftmax.scaled_dot_product_attention(*t, ~mask, enable_gqa=True),
            *three,
        ),
        "FusedAttention": (module, *three),
        "flash_attn_func": (
            lambda *t: flash_attn.flash_attn_func(*t, causal=True, alibi_slopes=slopes),
            *rows,
        ),
        "flash_attn_func, softcap": (
            lambda *t: flash_attn.flash_attn_func(*t, 0.1, softcap=2.0, window_size=(5, 0)),
            *rows,
        ),
        "flash_attn_varlen_func": (
            lambda *t: flash_attn.flash_attn_varlen_func(
                *(*t, offsets, offsets, 19, 19), alibi_slopes=slopes, return_attn_probs=True
            ),
            *packed,
        ),
    }


def range_calls(device, dtype):
    offsets, keep = torch.tensor([0, 2, 5], device=device), coin(2, 6, device=device)
    return {
        "packed": (ranges.packed, offsets, 6),
        "documents": (ranges.documents, offsets),
        "of_documents": (lambda o: ranges.of_documents(o, o, 6, True, (2, 0)), offsets),
        "segments": (ranges.segments, keep.long()),
        "lengths": (ranges.lengths, offsets),
        "padding": (ranges.padding, keep.sort(-1).values),
        "prefix": (ranges.prefix, offsets, 9),
        "chunks": (lambda device: ranges.chunks(2, 5, device=device), device),
        "alibi_slopes": (lambda device: biases.alibi_slopes(6, device=device), device),
    }


def model_calls(device, dtype):
    """Tiny models by name; the last two are patched."""
    pytest.importorskip("transformers")
    models = pytest.importorskip("models")
    megasoftmax.register()
    found = {}
    for name in ("gpt2", "llama", "mistral", "t5", "mixtral", "bloom"):
        model = models.MODELS[name]().to(device, dtype)
        if name in ("mixtral", "bloom"):
            megasoftmax.patch_model(model)
        else:
            model.set_attn_implementation("megasoftmax")
        batch = models.build_batch("left", device, name)
        found[name] = (_ModelCall(model, batch),)
    return found


class _ModelCall(torch.nn.Module):
    def __init__(self, model, batch):
        super().__init__()
        self.model, self.batch = model, batch

    def forward(self):
        found = self.model(**self.batch, use_cache=False)  # a sliding cache needs the default
        return found.logits, found.loss


GROUPS = {
    "softmax": softmax_calls,
    "attention": attention_calls,
    "ranges": range_calls,
    "models": model_calls,
}


def results(function, *arguments):
    """All results, and all gradients of their squares."""
    torch.manual_seed(3)
    found = [each for each in tree_leaves(function(*arguments)) if each is not None]
    learnt = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    if isinstance(function, torch.nn.Module):
        learnt += function.parameters()
    squares = [each.square().sum() for each in found if each.requires_grad]
    gradients = torch.autograd.grad(squares, learnt, allow_unused=True) if squares else ()
    return [*found, *(each for each in gradients if each is not None)]


def differentiable(argument):
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().requires_grad_()
    return argument


@contextmanager
def default(given):
    """A default device or a default dtype."""
    if isinstance(given, str):
        with torch.device(given):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(given)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = ["meta", pytest.param("cuda", marks=pytest.mark.gpu), torch.float64]
on_defaults = pytest.mark.parametrize("given", DEFAULTS, ids=str)


@on_defaults
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_results_follow_the_tensors(group, dtype, given, device):
    for name, (function, *arguments) in GROUPS[group](device, dtype).items():
        arguments = [differentiable(each) for each in arguments]
        expected = results(function, *arguments)
        with default(given):
            actual = results(function, *arguments)
        exact = {"rtol": 0, "atol": 0} if device == "cpu" else {}
        torch.testing.assert_close(
            actual, expected, **exact, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )


@on_defaults
def test_parameters_follow_the_defaults_unless_told(given):
    """As those of torch.nn.Linear."""

    def kinds(module):
        return {(each.device.type, each.dtype) for each in module.parameters()}

    with default(given):
        linear, own = torch.nn.Linear(1, 1), FusedAttention(2, relative_buckets=8, sink=True)
        told = {"device": "cpu", "dtype": torch.bfloat16}
        other = FusedAttention(2, relative_buckets=8, sink=True, **told)
        slopes, chunks = biases.alibi_slopes(2), ranges.chunks(2, 4)
    assert kinds(own) == kinds(linear)
    assert kinds(other) == {("cpu", torch.bfloat16)}
    assert (slopes.device.type, slopes.dtype) == (linear.weight.device.type, torch.float32)
    assert (chunks[0].device.type, chunks[0].dtype) == (linear.weight.device.type, torch.int32)


def test_calls_that_make_tensors_name_device_and_dtype():
    """Uninitialised memory may hold what is right by chance."""
    factories = {each.__name__ for each in _device._device_constructors()}
    factories |= {"as_tensor", "scalar_tensor"}
    found = []
    folders = PACKAGE, Path(megasoftmax.integrations.__file__).parent
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, node.func.value
            if name in factories and isinstance(owner, ast.Name) and owner.id == "torch":
                named = {each.arg for each in node.keywords}
                if not named >= ({"device"} if name in INTEGERS else {"device", "dtype"}):
                    found.append(f"{path.name}:{node.lineno}: torch.{name}")
    assert not found
