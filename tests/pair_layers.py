"""Attention layers of Boltz, OpenFold-3 and Protenix: the real ones, and classes that stand in."""

import importlib
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasoftmax.integrations import installing

WIDTH, DIM, HEADS = 12, 8, 3


class _AsOpenFold(nn.Module):
    """The methods and weights that the three packages inherited from OpenFold."""

    def __init__(self, c_q: int, c_k: int, c_v: int, c_hidden: int, no_heads: int) -> None:
        super().__init__()
        self.c_hidden, self.no_heads = c_hidden, no_heads
        inner = c_hidden * no_heads
        self.linear_q = nn.Linear(c_q, inner, bias=False)
        self.linear_k = nn.Linear(c_k, inner, bias=False)
        self.linear_v = nn.Linear(c_v, inner, bias=False)
        self.linear_g = nn.Linear(c_q, inner)
        self.linear_o = nn.Linear(inner, c_q)

    def _prep_qkv(self, q_x: Tensor, kv_x: Tensor, apply_scale: bool = True) -> Any:
        projected = self.linear_q(q_x), self.linear_k(kv_x), self.linear_v(kv_x)
        q, k, v = (p.unflatten(-1, (self.no_heads, -1)).transpose(-2, -3) for p in projected)
        return (q / math.sqrt(self.c_hidden) if apply_scale else q), k, v

    def _wrap_up(self, o: Tensor, q_x: Tensor) -> Tensor:
        return self.linear_o(o.flatten(-2) * self.linear_g(q_x).sigmoid())

    def _einsum(self, q_x: Tensor, kv_x: Tensor, biases: list[Tensor]) -> Tensor:
        q, k, v = self._prep_qkv(q_x, kv_x)
        logits = q @ k.mT
        for bias in biases:
            logits = logits + bias
        return self._wrap_up((logits.softmax(-1) @ v).transpose(-2, -3), q_x)


class _Boltz(_AsOpenFold):
    def forward(self, q_x, kv_x, tri_bias, mask_bias, mask, use_kernels=False):  # type: ignore[no-untyped-def]
        if not use_kernels:
            return self._einsum(q_x, kv_x, [mask_bias, tri_bias])
        from cuequivariance_torch.primitives.triangle import triangle_attention

        q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
        scale = 1 / math.sqrt(self.c_hidden)
        o = triangle_attention(q, k, v, tri_bias, mask=mask.bool(), scale=scale)
        return self._wrap_up(o.transpose(-2, -3), q_x)


class _Protenix(_AsOpenFold):
    def forward(self, q_x, kv_x, biases=None, triangle_attention="torch"):  # type: ignore[no-untyped-def]
        if triangle_attention == "torch":
            return self._einsum(q_x, kv_x, biases or [])
        q, k, v = self._prep_qkv(q_x, kv_x, apply_scale=False)
        if triangle_attention == "deepspeed":
            from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

            tensors = [each.transpose(-2, -3)[None] for each in (q, k, v)]
            o = DS4Sci_EvoformerAttention(*tensors, [each[None] for each in biases])[0]
            return self._wrap_up(o, q_x)
        from cuequivariance_torch.primitives.triangle import triangle_attention as attend

        scale = 1 / math.sqrt(self.c_hidden)
        o = attend(q, k, v, biases[1].float(), mask=(biases[0] == 0).bool(), scale=scale)[0]
        return self._wrap_up(o.transpose(-2, -3), q_x)


class _OpenFold3(_AsOpenFold):
    def forward(self, q_x, kv_x, biases=None, use_high_precision=False):  # type: ignore[no-untyped-def]
        return self._einsum(q_x, kv_x, biases or [])


class _PairBias(nn.Module):
    def __init__(self, c_s: int, c_z: int, num_heads: int) -> None:
        super().__init__()
        self.c_s, self.num_heads, self.head_dim = c_s, num_heads, c_s // num_heads
        self.proj_q = nn.Linear(c_s, c_s)
        self.proj_k = nn.Linear(c_s, c_s, bias=False)
        self.proj_v = nn.Linear(c_s, c_s, bias=False)
        self.proj_g = nn.Linear(c_s, c_s, bias=False)
        self.proj_z = nn.Sequential(nn.Linear(c_z, num_heads, bias=False), _HeadsFirst())
        self.proj_o = nn.Linear(c_s, c_s, bias=False)

    def forward(self, s, z, mask, k_in, multiplicity=1):  # type: ignore[no-untyped-def]
        shape = (len(s), -1, self.num_heads, self.head_dim)
        q = self.proj_q(s).view(shape).float()
        k = self.proj_k(k_in).view(shape).float()
        v = self.proj_v(k_in).view(shape)
        logits = torch.einsum("bihd,bjhd->bhij", q, k) / self.head_dim**0.5
        logits = logits + self.proj_z(z).repeat_interleave(multiplicity, 0).float()
        logits = logits + (1 - mask[:, None, None].float()) * -1e6
        o = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v.float()).to(v.dtype)
        return self.proj_o(self.proj_g(s).sigmoid() * o.flatten(2))


class _HeadsFirst(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.movedim(-1, 1)


class _Triangle(nn.Module):
    """Around an attention of a package, as its TriangleAttention."""

    def __init__(self, mha: type[nn.Module], starting: bool) -> None:
        super().__init__()
        self.starting = starting
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, HEADS, bias=False)
        self.mha = mha(WIDTH, WIDTH, WIDTH, DIM, HEADS)

    def forward(self, x: Tensor, mask: Tensor, **flags: Any) -> Tensor:
        if not self.starting:
            x, mask = x.transpose(-2, -3), mask.mT
        x = self.layer_norm(x)
        mask = mask[..., :, None, None, :]
        mask_bias = 1e9 * (mask - 1)
        bias = self.linear(x).movedim(-1, -3).unsqueeze(-4)
        if isinstance(self.mha, _Boltz):
            x = self.mha(x, x, bias, mask_bias, mask, **flags)
        else:
            x = self.mha(x, x, biases=[mask_bias, bias], **flags)
        return x if self.starting else x.transpose(-2, -3)


def _named(stand_in: type[nn.Module], name: str) -> type[nn.Module]:
    """A class with the name of that of a package, by which it is known."""
    module, _, last = name.rpartition(".")
    return type(last, (stand_in,), {"__module__": module, "__qualname__": last})


CLASSES = {
    "boltz": ("boltz.model.layers.triangular_attention.primitives.Attention", _Boltz),
    "openfold3": ("openfold3.core.model.primitives.attention.Attention", _OpenFold3),
    "protenix": ("protenix.model.triangular.layers.Attention", _Protenix),
}
PAIR_BIAS = "boltz.model.layers.attentionv2.AttentionPairBias"
_REAL = {
    "boltz": "boltz.model.layers.triangular_attention.attention",
    "openfold3": "openfold3.core.model.layers.triangular_attention",
    "protenix": "protenix.model.triangular.triangular",
}

# In which a test runs: on the classes of this file, always, and on those of the packages.
KINDS = ["stand-in", "real"]


def triangle(package: str, kind: str, starting: bool = True) -> nn.Module:
    """A layer of triangle attention with random weights; skips where the package is missing."""
    if kind == "stand-in":
        name, stand_in = CLASSES[package]
        return randomised(_Triangle(_named(stand_in, name), starting))
    return randomised(real(_REAL[package]).TriangleAttention(WIDTH, DIM, HEADS, starting=starting))


def pair_bias(kind: str) -> nn.Module:
    if kind == "stand-in":
        return randomised(_named(_PairBias, PAIR_BIAS)(HEADS * DIM, WIDTH, HEADS))
    module = real("boltz.model.layers.attentionv2")
    return randomised(module.AttentionPairBias(HEADS * DIM, WIDTH, HEADS))


def real(module: str) -> Any:
    """A module of an installed package, else a reason to skip."""
    package = module.partition(".")[0]
    pytest.importorskip(package, reason=f"{package} is not installed", exc_type=ImportError)
    return importlib.import_module(module)


def randomised(layer: nn.Module) -> nn.Module:
    """The packages begin with zeros in the last projection, which would hide all else."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=generator))
    return layer


def results(layer: nn.Module, call: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output, and the gradients of a weighted sum for inputs and weights."""
    inputs = tuple(each.clone().requires_grad_() for each in inputs)
    output = call(*inputs)
    generator = torch.Generator().manual_seed(9)
    loss = (output * torch.randn(output.shape, generator=generator)).sum()
    weights = [w for w in layer.parameters() if w.requires_grad]
    gradients = torch.autograd.grad(loss, [*inputs, *weights], materialize_grads=True)
    return [output.detach(), *gradients]


def assert_same(found: list[Tensor], wanted: list[Tensor], tolerance: float = 2e-5) -> None:
    """Relative to the largest element; a gradient that is 0 in exact arithmetic, to all of them."""
    of_all = max(each.abs().max().item() for each in wanted)
    for actual, each in zip(found, wanted, strict=True):
        largest = max(each.abs().max().item(), 0.1 * of_all)
        torch.testing.assert_close(actual, each, rtol=tolerance, atol=tolerance * largest)


# Packages whose functions are replaced, and modules that call them


def without_packages(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """They are not installed, and no module of them is imported."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in packages:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(installing, "_is_installed", lambda name: name not in packages)


def caller(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An imported module of that source."""
    module = ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module
