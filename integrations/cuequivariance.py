"""cuEquivariance's `triangle_attention`, computed by megasoftmax.

    from megasoftmax.integrations import cuequivariance

    installed = cuequivariance.install()    # until installed.uninstall()
    print(installed)                        # every module that has the function now

Boltz, Protenix and OpenFold-3 call `triangle_attention` of `cuequivariance_torch`. After `install`
they call the function here; neither their code nor cuEquivariance's is changed. `install` also
works where cuEquivariance is not installed.

What differs from cuEquivariance 0.13:

* Any device and type that `megasoftmax.attention` takes, a CPU and float64 included. It runs fused
  where that function does, for any number of tokens.
* A query without a valid key has output 0, gradients 0, and 0 as log-sum-exp and largest logit. So
  has cuEquivariance for `kv_lengths` of 0. For a `mask` that is False everywhere it adds -1e9 to
  every logit, which makes the mean of the values.
* The bias keeps its type, and its gradient has that type. cuEquivariance casts it to float32, or
  on Blackwell to the type of the queries.
* Mask and bias may have any shape of 5 dimensions that broadcasts to [B, N, H, Q, K].
* Under torch.use_deterministic_algorithms(True) all gradients are deterministic.

Interface: https://docs.nvidia.com/cuda/cuequivariance. The operation is Algorithm 14 of AlphaFold 3
(Abramson et al., https://doi.org/10.1038/s41586-024-07487-w) without its projections.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import checks
from megasoftmax.autocast import as_autocast
from megasoftmax.integrations import installing

_NAMES = {"query": "q", "key": "k", "value": "v", "visible[1]": "kv_lengths"}
_LOGITS = 2**24  # that exist at a time while the largest of each row is looked for


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Attention of N rows of tokens that share a bias of pairs.

    Below, B is the batch, N its rows, H heads, Q queries, K keys and D the head dimension. For a
    batch of 1, each tensor may lack its first dimension. The output has it in any case, as
    cuEquivariance's has.

    Args:
        q: [B, N, H, Q, D], of the types of `megasoftmax.attention`, any strides.
        k, v: [B, N, H, K, D], of the same dtype.
        bias: floating, [B, 1, H, Q, K], added to the scaled products. Gets a gradient, which is
            summed over the rows in float32.
        mask: [B, N, 1, 1, K], True = valid; not necessarily bool.
        scale: factor of the products; by default D ** -0.5.
        return_aux: also return the log-sum-exp and the largest logit of each row.
        kv_lengths: int32 or int64 [B, N, 1, 1, 1], in place of a mask: a row has its first
            kv_lengths keys. Numbers above K count as K.

    Returns:
        The output [B, N, H, Q, D], in the dtype of q; in memory it lies as [B, N, Q, H, D]. With
        return_aux a tuple of it, the log-sum-exp, which has a gradient, and the largest logit,
        which has none: both [B, N, H, Q], float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.
        NotImplementedError: as `megasoftmax.attention`.
    """
    checks.check_flag("return_aux", return_aux)
    if mask is not None and kv_lengths is not None:
        raise ValueError("kv_lengths: expected None beside a mask, got both")
    batch = len(q) if isinstance(q, Tensor) and q.dim() == 5 else 1
    tensors = {"q": q, "k": k, "v": v, "bias": bias}
    q, k, v, bias = (_with_batch(name, tensor, batch) for name, tensor in tensors.items())
    q, k, v = as_autocast(q, k, v)
    excluded = visible = None
    if mask is not None:
        excluded = ~_with_batch("mask", mask, batch).bool()
    elif kv_lengths is not None:
        visible = None, _with_batch("kv_lengths", kv_lengths, batch).squeeze(-1)
    options: dict[str, Any] = {"bias": bias, "mask": excluded, "scale": scale, "visible": visible}
    options["return_lse"] = return_aux
    found = checks.called(_NAMES, megasoftmax.attention, q, k, v, **options)
    if not return_aux:
        return found
    output, lse = found
    if visible is not None:
        keys = torch.arange(k.shape[-2], device=k.device)
        excluded = keys >= visible[1][..., None]
    with torch.autocast(q.device.type, enabled=False):
        largest = _largest_logits(q, k, bias, excluded, scale).to(lse.dtype)
    has_no_key = lse == -torch.inf
    return output, lse.masked_fill(has_no_key, 0), largest.masked_fill(has_no_key, 0)


def _with_batch(name: str, tensor: Any, batch: int) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
    # With another batch, 4 dimensions [B, H, Q, K] could broadcast along the rows.
    if tensor.dim() != 5 and (tensor.dim() != 4 or batch != 1):
        found = f"{tuple(tensor.shape)} for a batch of {batch}"
        raise ValueError(f"{name}: expected 5 dimensions, or 4 for a batch of 1, got {found}")
    return tensor if tensor.dim() == 5 else tensor[None]


@torch.no_grad()
def _largest_logits(
    q: Tensor, k: Tensor, bias: Tensor, excluded: Tensor | None, scale: float | None
) -> Tensor:
    """The largest logit of each query [B, N, H, Q], some rows after the other."""
    batch, rows, heads, queries, dim = q.shape
    shape = (batch, rows, heads, queries, k.shape[-2])
    compute = torch.promote_types(q.dtype, torch.float32)
    bias = bias.to(compute).expand(*shape)
    excluded = torch.zeros((), dtype=torch.bool, device=q.device) if excluded is None else excluded
    excluded = excluded.expand(*shape)
    found = []
    at_once = max(1, _LOGITS // max(shape[0] * shape[2] * shape[3] * shape[4], 1))
    for begin in range(0, rows, at_once):
        part = slice(begin, begin + at_once)
        logits = q[:, part].to(compute) @ k[:, part].to(compute).mT
        logits = logits * (dim**-0.5 if scale is None else scale) + bias[:, part]
        logits = logits.masked_fill(excluded[:, part], -torch.inf)
        found.append(torch.nn.functional.pad(logits, (0, 1), value=-torch.inf).amax(-1))
    return torch.cat(found, 1) if found else q.new_empty(shape[:4], dtype=compute)


def _without_multiplication(*args: Any, **kwargs: Any) -> NoReturn:
    raise ImportError(
        "triangle_multiplicative_update: expected cuequivariance_torch, which is not installed; "
        "megasoftmax has triangle_attention alone in its place"
    )


# OpenFold-3 imports both names when it finds cuequivariance_torch; by the threshold it leaves
# sequences up to so many tokens to its own code.
_STAND_INS: dict[str, dict[str, Any]] = {
    "cuequivariance_torch": {"triangle_multiplicative_update": _without_multiplication},
    "cuequivariance_torch.primitives": {},
    "cuequivariance_torch.primitives.triangle": {
        "triangle_multiplicative_update": _without_multiplication
    },
    "cuequivariance_ops_torch": {},
    "cuequivariance_ops_torch.triangle_attention": {"CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0},
}
_MODULES = [name for name in _STAND_INS if name != "cuequivariance_torch.primitives"]


def install() -> installing.Installed:
    """Let everybody who calls cuEquivariance's `triangle_attention` call the one above.

    Those take it from `cuequivariance_torch`, its `primitives.triangle` or
    `cuequivariance_ops_torch`, now or later, or have already imported it by that name. What was
    installed before stays and belongs to whoever installed it.

    A package that is not installed gets modules of its names with this function. Their
    `triangle_multiplicative_update` raises an ImportError that says so. A package that is
    installed and cannot be imported, as `cuequivariance_ops_torch` beside a torch without CUDA,
    stays as it is.

    Returns:
        What uninstalls it, by `uninstall()` or at the end of a `with` block. Its `report` says what
        each place runs.
    """
    return installing.install("triangle_attention", triangle_attention, _MODULES, _STAND_INS)
