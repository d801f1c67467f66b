"""Why a call cannot run fused: named constraints, each a function that returns a Reason or None."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from megasoftmax.build import library
from megasoftmax.build.extension import MIN_CAPABILITY
from megasoftmax.limits import kernel_limits
from megasoftmax.options import AttentionOptions, Ranges, SoftmaxOptions, TopkOptions
from megasoftmax.reference.dropout import STEPS
from megasoftmax.reference.topk import SCALES as SCALES
from megasoftmax.tracing import PLAIN, is_traced

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLOATING = (*DTYPES, torch.float64)

MAX_ADDED = 2**26  # entries of a float mask that SDPA is given; the reference makes it in blocks
MAX_HEADS = 2**31 - 1  # of all batches: kernels of attention count in 31 bits


@dataclass(frozen=True)
class Reason:
    """A constraint of the fused kernels that a call does not meet."""

    constraint: str
    actual: str
    limit: str

    def __str__(self) -> str:
        return f"{self.constraint}: expected {self.limit}, got {self.actual}"


class Reasons(tuple[Reason, ...]):
    """Why a call does not run fused, and what computes it.

    Compares as the tuple of its reasons, which is empty where the call runs fused.

    Attributes:
        against_sdpa: why torch's scaled_dot_product_attention does not compute a call that does not
            run fused; empty where it does. Off a CPU it names the device alone.
        copies: the tensors of attention that are copied first, because their leading dimensions do
            not merge into one batch as a view. They are no reason against anything.
        runs: "fused", or "SDPA" for torch's scaled_dot_product_attention, or "reference" for plain
            torch.
    """

    against_sdpa: tuple[Reason, ...]
    copies: tuple[Reason, ...]

    def __new__(
        cls,
        against_fused: tuple[Reason, ...],
        against_sdpa: tuple[Reason, ...],
        copies: tuple[Reason, ...] = (),
    ) -> "Reasons":
        self = super().__new__(cls, against_fused)
        self.against_sdpa = against_sdpa
        self.copies = copies
        return self

    @property
    def runs(self) -> Literal["fused", "SDPA", "reference"]:
        if len(self) == 0:
            return "fused"
        return "reference" if self.against_sdpa else "SDPA"


def is_plain_on_cpu(tensor: Tensor) -> bool:
    """Whether a tensor on a CPU has values here and now: no tracer, transform or subclass."""
    return type(tensor) in PLAIN and tensor.is_cpu and not is_traced() and _forward_mode() is None


def is_plain_scores(scores: Tensor) -> bool:
    """Whether `softmax` of these alone is valid, and computed by torch's own softmax.

    True implies what `SoftmaxOptions.check` finds out in more steps. False implies nothing.
    """
    return (
        is_plain_on_cpu(scores)
        and scores.dtype in _FLOATING
        and scores.layout is torch.strided
        and not scores.is_nested
        and scores.dim() > 0
    )


def is_plain_self_attention(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attention` of these alone is valid, and computed by torch's own attention.

    True implies what `AttentionOptions.check` and `reasons_against_sdpa` find out in more steps.
    False implies nothing.
    """
    try:
        return (
            is_plain_on_cpu(query)
            and type(key) in PLAIN
            and type(value) in PLAIN
            and (shape := query.shape) == key.shape == value.shape
            and len(shape) == 4
            and 0 not in shape
            and (dtype := query.dtype) in _FLOATING
            and dtype is key.dtype is value.dtype
            and query.layout is key.layout is value.layout is torch.strided
            and key.is_cpu
            and value.is_cpu
            and not torch._C._is_any_autocast_enabled()
        )
    except RuntimeError:  # a nested tensor has no shape
        return False


def reasons_against_fused_softmax(scores: Tensor, options: SoftmaxOptions) -> tuple[Reason, ...]:
    """All the reasons why these arguments, which must be valid, cannot run fused; empty: they can.

    Loads the compiled part, and builds it where it can be built, when the scores are on a GPU.
    """
    bias = options.bias
    is_limited = options.causal or options.window is not None
    found = (
        *_of_any_call(scores, options),
        *(
            _leading_dimensions(scores, options.mask, bias, visible=options.visible)
            if scores.dim() > 4 and scores.numel()
            else ()
        ),
        _rows(scores),
        _columns(scores, is_limited),
        *([] if bias is None else _bias_gradient(bias, scores)),
        _compiled_forward_mode(),
    )
    return _given(found)


def reasons_against_fused_columns(scores: Tensor, options: SoftmaxOptions) -> tuple[Reason, ...]:
    """The same for scores alone, normalised over a dimension that others follow."""
    return _given((*_of_any_call(scores, options), _compiled_forward_mode()))


def reasons_against_fused_topk(logits: Tensor, k: int, options: TopkOptions) -> tuple[Reason, ...]:
    """The same for the K largest probabilities of each row."""
    found = (
        *_of_any_call(logits, options.with_one_scale(), "logits"),
        _count("k", k, kernel_limits().topk["kMaxK"]),
        _row_scale(options),
        *_choice(logits, k, options),
        *(
            _leading_dimensions(logits, options.mask, options.bias, "logits")
            if logits.dim() > 4 and logits.numel()
            else ()
        ),
        _rows(logits),
        _columns(logits, False),
        _forward_mode(),
    )
    return _given(found)


def reasons_against_fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, options: AttentionOptions
) -> tuple[Reason, ...]:
    """The same for attention, with that scale."""
    dropout = options.dropout
    found = (
        *_of_any_tensor(query, _first_with_attention()),
        _dtype("dtype", query.dtype),
        *_head_dims(query, value, dropout),
        _attention_scale(scale),
        _softcap(options.softcap, scale, _attention_limit("kMaxScale")),
        _attention_dropout(dropout),
        _count("batches x heads", math.prod(query.shape[:-2]), MAX_HEADS),
        _count(
            "queries + keys", query.shape[-2] + key.shape[-2], _attention_limit("kMaxPositions")
        ),
        _forward_mode(),
    )
    return _given(found)


def takes_tf32(dtype: torch.dtype) -> bool:
    """Whether attention rounds the factors of its products to TF32, by torch's setting of matmul.

    Only float32 does, where `torch.backends.cuda.matmul` allows it. The backward pass takes what
    the forward pass took.
    """
    return dtype == torch.float32 and _matmul_takes_tf32()


def _matmul_takes_tf32() -> bool:
    # allow_tf32 raises where this is set.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# torch.compile compiles again where the setting has changed.
_matmul_takes_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def reasons_against_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    added: list[tuple[int, int]],
    options: AttentionOptions,
) -> tuple[Reason, ...]:
    """Why torch's scaled_dot_product_attention does not compute what `attention` would on a CPU.

    Args:
        query, key, value: as in `attention`.
        bias: likewise; of a RelativeBias its table.
        added: (batch, heads) of all that joins the scores, as a bias, or as -inf where a mask, a
            range or a window excludes, so that SDPA gets a tensor of queries x keys. The batch is
            that of all leading dimensions.
        options: the others of the call.
    """
    if torch.compiler.is_compiling():  # which traces no names of numbers
        return (Reason("transforms", "torch.compile or torch.export", "none"),)
    found = (
        _sdpa_tensors(query, key, value, bias),
        _sdpa_transforms(),
        _sdpa_scale(options.scale),
        *[Reason(*each) for each in options.beyond_sdpa()],
        *_sdpa_sizes(query, key, value),
        *(_sdpa_added(query, key, added) if added else ()),
    )
    return _given(found)


def runs_fused_traced(
    device: torch.device, dtype: torch.dtype, result: torch.dtype | None = None
) -> bool:
    """Whether softmax runs fused when compiled, of scores and with results of these types.

    False under autocast, in torch.export and under transforms, where others decide. Of forward mode
    callers ask in what is traced, so that torch.compile compiles again where it begins.
    """
    return (
        _has_kernels(device)
        and _dtype("dtype", dtype) is None
        and (result is None or _result_dtype(result, dtype) is None)
        and not torch._C._is_any_autocast_enabled()
        and not torch.compiler.is_exporting()
        and not torch._C._are_functorch_transforms_active()
    )


def head_dim_traced(device: torch.device, dtype: torch.dtype) -> int:
    """The largest head dimension of attention that runs fused there, likewise; 0: none."""
    if dtype == torch.float32 or not runs_fused_traced(device, dtype):
        return 0
    return _head_dim_of_kernels(device)


# torch.compile calls them while tracing and keeps the answers, as those of library.load.
runs_fused_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]
head_dim_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _has_kernels(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and library.load().available
        and _too_old_capability(device.index, MIN_CAPABILITY) is None
    )


def _head_dim_of_kernels(device: torch.device) -> int:
    if _too_old_capability(device.index, _first_with_attention()) is not None:
        return 0
    return _attention_limit("kMaxHeadDim")


def _given(found: tuple[Reason | None, ...]) -> tuple[Reason, ...]:
    return tuple([reason for reason in found if reason is not None])  # faster than a generator


def _of_any_tensor(
    tensor: Tensor, least: tuple[int, int] = MIN_CAPABILITY
) -> tuple[Reason | None, ...]:
    return _device(tensor), _compiled_part(tensor), _compute_capability(tensor, least)


def _of_any_call(
    scores: Tensor, options: SoftmaxOptions | TopkOptions, name: str = "scores"
) -> tuple[Reason | None, ...]:
    dtype, scale = options.dtype, cast(float, options.scale)
    return (
        *_of_any_tensor(scores),
        _dtype(f"dtype of {name}", scores.dtype),
        None if dtype is None else _result_dtype(dtype, scores.dtype),
        _scale(scale),
        _softcap(options.softcap, scale, SCALES[1]),
    )


def _device(scores: Tensor) -> Reason | None:
    return None if scores.is_cuda else Reason("device", str(scores.device), "a CUDA device")


def _compiled_part(scores: Tensor) -> Reason | None:
    status = library.load() if scores.is_cuda else library.status()
    return None if status.available else Reason("compiled part", f"none: {status.reason}", "one")


def has_attention(tensor: Tensor) -> bool:
    """Whether the GPU of a tensor has kernels of attention."""
    return _compute_capability(tensor, _first_with_attention()) is None


def _first_with_attention() -> tuple[int, int]:
    return _attention_limit("kLeastMajor"), 0


def _compute_capability(tensor: Tensor, least: tuple[int, int]) -> Reason | None:
    too_old = _too_old_capability(tensor.device.index, least) if tensor.is_cuda else None
    if too_old is None:
        return None
    return Reason("compute capability", too_old, f"at least {_dotted(least)}")


_capabilities: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}


def _capabilities_of(index: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The compute capability of a GPU, and that of the kernels that serve it."""
    if index not in _capabilities:
        of_gpu = torch.cuda.get_device_capability(index)
        _capabilities[index] = of_gpu, library.capability(index) or of_gpu
    return _capabilities[index]


def _too_old_capability(index: int, least: tuple[int, int]) -> str | None:
    """The compute capability of a GPU whose kernels are for an earlier one than `least`."""
    of_gpu, of_kernels = _capabilities_of(index)
    if of_kernels >= least:
        return None
    if of_kernels == of_gpu:
        return _dotted(of_gpu)
    return f"{_dotted(of_gpu)} with kernels for {_dotted(of_kernels)}"


_too_old_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as library.load


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _dtype(name: str, dtype: torch.dtype) -> Reason | None:
    return None if dtype in DTYPES else Reason(name, str(dtype), "float16, bfloat16 or float32")


def _result_dtype(dtype: torch.dtype, of_scores: torch.dtype) -> Reason | None:
    """Kernels do not turn one 16-bit type into the other."""
    is_other_half = dtype != of_scores and torch.float32 not in (dtype, of_scores)
    if is_other_half and dtype in DTYPES and of_scores in DTYPES:
        return Reason("dtype", str(dtype), f"{of_scores}, as of the scores, or float32")
    return _dtype("dtype", dtype)


def _scale(scale: float) -> Reason | None:
    """Kernels compare raw scores and apply the scale to their differences."""
    tiniest, largest = SCALES
    if tiniest <= abs(scale) <= largest:
        return None
    return Reason("scale", str(scale), "a normal float32, not 0, below 2.3e38")


def _attention_scale(scale: float) -> Reason | None:
    most = _attention_limit("kMaxScale")
    if SCALES[0] <= scale <= most:
        return None
    return Reason("scale", str(scale), f"a normal float32 from 0 to {most}")


def _softcap(softcap: float | None, scale: float, most: float) -> Reason | None:
    """Kernels multiply scores by 4 * scale / softcap, and tanh of them by the softcap."""
    if not softcap:
        return None
    if SCALES[0] <= softcap <= most and SCALES[0] <= abs(scale) / softcap <= SCALES[1] / 4:
        return None
    limit = f"a normal float32, up to {most:.5g}, and so 4 * scale / softcap"
    return Reason("softcap", f"{softcap} with scale {scale}", limit)


def _attention_dropout(dropout: float) -> Reason | None:
    most = _attention_limit("kMaxDropped") / STEPS
    return None if dropout <= most else Reason("dropout", str(dropout), f"at most {most}")


def _attention_limit(name: str) -> int:
    return kernel_limits().attention[name]


def _head_dims(query: Tensor, value: Tensor, dropout: float) -> tuple[Reason | None, ...]:
    """Tiles of float32 take twice the shared memory."""
    sizes = query.shape[-1], value.shape[-1]
    names = "head dimension of query and key", "head dimension of value"
    if query.dtype == torch.float32:
        most = _attention_limit("kMaxFloatHeadDim")
        return tuple(
            _count(f"{name} in float32", size, most)
            for name, size in zip(names, sizes, strict=True)
        )
    most = _attention_limit("kMaxHeadDim")
    if sizes[0] <= most and sizes[1] <= most:
        return ()
    wide = _attention_limit("kMaxWideHeadDim"), _attention_limit("kMaxWideValueDim")
    without = _no_wide_heads(query, dropout)
    return tuple(
        _count(name, size, largest)
        or (
            Reason(name, str(size), f"at most {most} {without}")
            if without and size > most
            else None
        )
        for name, size, largest in zip(names, sizes, wide, strict=True)
    )


def _no_wide_heads(query: Tensor, dropout: float) -> str | None:
    """Where head dimensions beyond kMaxHeadDim have no kernel: it is one for inference.

    What is harder to change comes first.
    """
    if query.is_cuda and not _has_wide_heads(query.device.index):
        served = " and ".join(f"{major}.x" for major in _wide_majors())
        return f"but on compute capability {served}"
    if dropout:
        return "with dropout"
    if torch.is_grad_enabled():
        return "while gradients are enabled (see torch.no_grad)"
    return None


def _has_wide_heads(index: int) -> bool:
    return _capabilities_of(index)[1][0] in _wide_majors()


def _wide_majors() -> range:
    return range(_attention_limit("kFirstWideMajor"), _attention_limit("kLastWideMajor") + 1)


_has_wide_heads._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as library.load


def _count(name: str, count: int, most: int) -> Reason | None:
    return None if count <= most else Reason(name, str(count), f"at most {most}")


def _forward_mode() -> Reason | None:
    """Plain torch has such derivatives by itself; beside kernels only softmax has one."""
    if forward_ad._current_level < 0:
        return None
    return Reason("forward-mode differentiation", "torch.func.jvp or a dual level", "none")


def _compiled_forward_mode() -> Reason | None:
    """For softmax: what autograd has of it for forward mode, torch.compile does not trace."""
    return _forward_mode() if torch.compiler.is_compiling() else None


def sdpa_device(query: Tensor) -> Reason | None:
    """On a GPU nobody can ask whether results are NaN without waiting for it."""
    return None if query.is_cpu else Reason("device", str(query.device), "a CPU")


def _sdpa_tensors(*tensors: Tensor | None) -> Reason | None:
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return Reason("kind of tensors", type(tensor).__name__, "torch.Tensor")
    return None


def _sdpa_transforms() -> Reason | None:
    """Where values cannot be read, or derivatives are not those of a single backward pass."""
    if is_traced():
        actual = "torch.func, torch.jit.trace or a dispatch mode"
    elif _forward_mode() is not None:
        actual = "a dual level"
    else:
        return None
    return Reason("transforms", actual, "none")


def _sdpa_scale(scale: float | None) -> Reason | None:
    """Torch's kernels multiply what causality excludes, -inf, by the scale."""
    return None if scale is None or scale > 0 else Reason("scale", str(scale), "above 0")


def _sdpa_sizes(query: Tensor, key: Tensor, value: Tensor) -> tuple[Reason | None, ...]:
    dim, value_dim = query.shape[-1], value.shape[-1]
    sizes = (*query.shape, key.shape[-2])
    return (
        None if value_dim == dim else Reason("head dimension of value", str(value_dim), str(dim)),
        Reason("sizes of query and keys", str(sizes), "at least 1") if 0 in sizes else None,
    )


def _sdpa_added(
    query: Tensor, key: Tensor, added: list[tuple[int, int]]
) -> tuple[Reason | None, ...]:
    batches, heads = (max(sizes) for sizes in zip(*added, strict=True))
    entries = batches * heads * query.shape[-2] * key.shape[-2]
    whole = math.prod(query.shape[:-3])
    shared = [batch for batch, _ in added if batch not in (1, whole)]
    return (
        Reason("batches of bias", str(shared[0]), f"1, or {whole}") if shared else None,
        _count("entries that join the scores", entries, MAX_ADDED),
    )


def _row_scale(options: TopkOptions) -> Reason | None:
    """Kernels fold the scale of a row into its exponentials alone."""
    if not isinstance(options.scale, Tensor) or (options.bias is None and not options.softcap):
        return None
    return Reason("scale with a bias or a softcap", "a tensor", "a number")


def _choice(logits: Tensor, k: int, options: TopkOptions) -> tuple[Reason | None, ...]:
    """Kernels of routers take rows of all experts in shared memory, and no option beside."""
    bias = options.selection_bias
    if options.score == "softmax" and bias is None:
        return ()
    name = "score 'sigmoid'" if bias is None else "selection_bias"
    limits, columns = kernel_limits().topk, logits.shape[-1]
    beside = [each for each in ("mask", "bias") if getattr(options, each) is not None]
    if options.softcap:
        beside.append("softcap")
    if isinstance(options.scale, Tensor):
        beside.append("a scale of each row")
    row_bytes = columns * logits.dtype.itemsize
    return (
        _count(f"k with {name}", k, limits["kTileMaxK"]),
        _count(f"columns with {name}", columns, limits["kRouterMaxColumns"]),
        Reason(f"bytes of a row with {name}", str(row_bytes), "a multiple of 16")
        if row_bytes % 16
        else None,
        Reason(f"options beside {name}", ", ".join(beside), "none") if beside else None,
        None if bias is None else _one_for_all_rows(bias, columns),
    )


def _one_for_all_rows(selection_bias: Tensor, columns: int) -> Reason | None:
    shape = tuple(selection_bias.shape)
    if shape and selection_bias.numel() == shape[-1] == columns:
        return None
    return Reason("selection_bias", f"shape {shape}", f"[{columns}]")


def _leading_dimensions(
    scores: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    name_of_scores: str = "scores",
    visible: Ranges | None = None,
) -> list[Reason | None]:
    """Kernels see [batches, heads, queries, columns]: what precedes the heads has one stride."""
    if bias is not None and bias.dtype not in (scores.dtype, torch.float32):
        bias = torch.empty_like(bias, device="meta")  # it is converted, which may move entries
    tensors = {name_of_scores: scores, "mask": mask, "bias": bias}
    for name, bound in zip(("visible[0]", "visible[1]"), visible or (), strict=False):
        if bound is not None and bound.dtype != torch.int32:
            bound = torch.empty_like(bound, device="meta")  # likewise
        tensors[name] = None if bound is None else bound.unsqueeze(-1)
    return [
        Reason(
            f"leading dimensions of {name}",
            f"shape {tuple(tensor.shape)} with strides {tensor.stride()}",
            "a view that merges all but the last 3",
        )
        for name, tensor in tensors.items()
        if tensor is not None and not merges(tensor.expand(scores.shape), scores.dim() - 3)
    ]


def merges(expanded: Tensor, count: int) -> bool:
    """Whether the first `count` dimensions are one as a view."""
    steps = zip(expanded.shape[:count], expanded.stride()[:count], strict=True)
    varying = [(size, stride) for size, stride in steps if size != 1]
    return all(outer[1] == inner[0] * inner[1] for outer, inner in pairwise(varying))


def _rows(scores: Tensor) -> Reason | None:
    outer = math.prod(scores.shape[:-2])
    queries = scores.shape[-2] if scores.dim() > 1 else 1
    most = kernel_limits().max_index
    if outer <= most and queries <= most:
        return None
    return Reason("rows", f"{outer} x {queries}", f"at most {most} x {most}")


def _columns(scores: Tensor, is_limited: bool) -> Reason | None:
    """With a window its borders count too: up to queries before the row and columns after it."""
    columns = scores.shape[-1]
    borders = columns + scores.shape[-2] if is_limited else 0
    most = kernel_limits().max_index
    if columns + borders <= most:
        return None
    limit = f"at most {most}" + (", twice and with the queries" if is_limited else "")
    return Reason("columns", str(columns + borders), limit)


def _bias_gradient(bias: Tensor, scores: Tensor) -> list[Reason | None]:
    """Kernels sum the gradient over batches, heads and queries, but not along a row.

    Batches are all dimensions before heads together.
    """
    if not bias.requires_grad or not torch.is_grad_enabled():
        return []
    columns = bias.shape[-1] if bias.dim() > 0 else 1
    batches = math.prod(bias.shape[:-3])
    return [
        None
        if columns == scores.shape[-1]
        else Reason("keys of a bias that needs a gradient", str(columns), str(scores.shape[-1])),
        None
        if batches in (1, math.prod(scores.shape[:-3])) or scores.numel() == 0
        else Reason(
            "leading dimensions of a bias that needs a gradient",
            str(tuple(bias.shape[:-3])),
            f"{tuple(scores.shape[:-3])}, or all 1",
        ),
    ]
