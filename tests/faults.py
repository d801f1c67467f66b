"""Faults of public functions that soak and check must find: each calls the function otherwise."""

import functools

import torch

import megasoftmax


def plant_options(monkeypatch, function, **changed):
    """Lets that function of megasoftmax compute with other options than it is given."""
    original = getattr(megasoftmax, function)

    def faulty(*tensors, **given):
        return original(*tensors, **(given | changed))

    faulty.why_not_fused = functools.partial(megasoftmax.why_not_fused, original)
    monkeypatch.setattr(megasoftmax, function, faulty)


def without(name):
    """As if that option were not given."""

    def call(function, *tensors, **given):
        return function(*tensors, **(given | {name: None}))

    call.__name__ = f"without_{name}"
    return call


def other_scale(function, *tensors, **given):
    scale = given.get("scale")
    if scale is None:  # of attention, or of rows
        scale = tensors[0].shape[-1] ** -0.5 if len(tensors) > 2 else 1.0
    return function(*tensors, **(given | {"scale": 1.01 * scale}))


def lost_query(function, *tensors, **given):
    """The last query contributes nothing to gradients."""
    found = function(*tensors, **given)
    output, *rest = found if isinstance(found, tuple) else (found,)
    if output.dim() == 1:  # one query
        return output.detach() + 0 * tensors[0].sum()
    counts = torch.arange(output.shape[-2]) < output.shape[-2] - 1
    output = torch.where(counts[:, None], output, output.detach())
    return (output, *rest) if rest else output


def selection_bias_returned(function, logits, k, **given):
    p, indices, *lse = function(logits, k, **given)
    if given["selection_bias"] is not None:
        p = p + given["selection_bias"].expand(logits.shape).gather(-1, indices).to(p.dtype)
    return p, indices, *lse


def higher_index_first(function, logits, k, **given):
    """Among equals."""
    for name in ("mask", "bias", "selection_bias"):
        if given.get(name) is not None:
            given[name] = given[name].expand(logits.shape).flip(-1)
    p, indices, *lse = function(logits.flip(-1), k, **given)
    return p, logits.shape[-1] - 1 - indices, *lse


def scales_of_one_row(function, *tensors, **given):
    if isinstance(given["scale"], torch.Tensor):
        given["scale"] = given["scale"].flatten()[:1]
    return function(*tensors, **given)


def other_seed(function, *tensors, **given):
    return function(*tensors, **(given | {"seed": given["seed"] + 1}))


def last_of_the_entries(function, *tensors, **given):
    """The last of the K is drawn, whether it keeps a probability or not."""
    _, p, indices = function(*tensors, **given)
    return indices[..., -1], p, indices


# Function, fault, and the result that soak must name; check finds each of them too.
FAULTS = [
    ("softmax", other_scale, ""),
    ("softmax_topk", without("mask"), ""),
    *(("softmax_topk", without(name), "") for name in ("top_k", "top_p", "min_p", "softcap")),
    ("softmax_topk", without("selection_bias"), "indices"),
    ("softmax_topk", selection_bias_returned, "probabilities"),
    ("softmax_topk", higher_index_first, "indices"),
    ("sample", without("min_p"), "probabilities to draw from"),
    ("sample", other_seed, "drawn indices"),
    ("sample", last_of_the_entries, "drawn indices"),
    ("attention", other_scale, ""),
    ("attention", without("mask"), ""),
]
