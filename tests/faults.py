"""Faults of public functions that soak and check must find: each calls the function otherwise."""

import torch


def without(name):
    """As if that option were not given."""

    def call(function, *tensors, **given):
        return function(*tensors, **(given | {name: None}))

    call.__name__ = f"without_{name}"
    return call


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
