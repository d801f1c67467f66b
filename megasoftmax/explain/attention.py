"""Which kernel serves a call of attention.

csrc/attention/explain_attention.cpp answers from plan.h and limits.h.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from megasoftmax.explain.common import ask, check_call, visible_entries, window_of
from megasoftmax.explain.gpu import H200, LAUNCH_MICROSECONDS, Gpu, device_of
from megasoftmax.limits import kernel_limits
from megasoftmax.options import Window

# Of the nominal rate of matrix products, at head dimension 128 without a bias, measured on an H200.
# benchmarks/results/attention.csv has the figures: of Hopper's kernels 744 µs forward and 3292 with
# the backward pass, for 4 batches, 16 heads and 4096 queries and keys.
FORWARD_SHARE, BACKWARD_SHARE = 0.36, 0.27
HOPPER_FORWARD_SHARE, HOPPER_BACKWARD_SHARE = 0.75, 0.55
# Tensor cores multiply TF32 at half the rate of 16 bits, and float32 takes three such products. The
# shares of float32 follow from this and were not measured.
_TIMES_OF_FLOAT = 2 * 3
_STATISTICS_BYTES = 3 * 4  # of a query


@dataclass(frozen=True)
class AttentionExplanation:
    """How the kernels serve a call."""

    backward: bool
    kernel: str  # "forward", "decode" (up to 16 queries) or "backward"
    several_heads: bool  # a block takes several whole heads
    dtype: torch.dtype
    hopper: bool  # the kernels for compute capability 9.0 alone run, not the portable ones
    why: str
    tile_queries: int  # of a block; of "decode", rows of all heads that share keys
    tile_keys: int  # that a block takes at a time; of "decode", a warp
    tile_head_dim: int  # what the head dimension of queries and keys is filled up to
    tile_value_dim: int  # what the dimension of values is filled up to
    splits: int  # of the keys among blocks, forward; parts wait in the workspace
    slices: int  # blocks with the same keys, each for some columns of the gradients
    threads: int  # of a block
    shared_bytes: int | None  # of a block; None for Hopper's kernels
    blocks: int
    workspace_bytes: int
    bias_copied: bool  # first, to rows that begin at multiples of 16 bytes
    pairs: int  # of queries and keys that see each other, over batches and heads

    gpu: Gpu
    bytes_read: int  # fewest: each tensor once
    bytes_written: int
    flops: int  # of the matrix products of visible pairs

    def microseconds(
        self, bytes_per_second: float | None = None, flops_per_second: float | None = None
    ) -> float:
        """The longer of what the fewest bytes and the products take, with the launch.

        Args:
            bytes_per_second: of a copy. Default: of the GPU.
            flops_per_second: nominal; the kernels reach `share` of it. Default: of the GPU.
        """
        moved = self.bytes_read + self.bytes_written
        moving = moved / (bytes_per_second or self.gpu.bytes_per_second)
        computing = self.flops / (self.share * (flops_per_second or self.gpu.flops_per_second))
        return 1e6 * max(moving, computing) + LAUNCH_MICROSECONDS

    @property
    def share(self) -> float:
        """The share of the nominal 16-bit rate that such kernels reached on an H200.

        For float32, the share of kernels without TF32.
        """
        if self.hopper:
            return HOPPER_BACKWARD_SHARE if self.backward else HOPPER_FORWARD_SHARE
        share = BACKWARD_SHARE if self.backward else FORWARD_SHARE
        return share / _TIMES_OF_FLOAT if self.dtype == torch.float32 else share


def explain_attention(
    batches: int,
    heads: int,
    queries: int,
    head_dim: int,
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    masked: bool = False,
    bias: bool = False,
    relative: bool = False,
    key_bias: bool = False,
    shifted: bool = False,
    bias_dtype: torch.dtype | None = None,
    bias_gradient: bool = False,
    softcap: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    gpu: Gpu | str = H200,
    multiprocessors: int | None = None,
    major: int | None = None,
    shared_bytes: int | None = None,
) -> AttentionExplanation:
    """Explains a call of `megasoftmax.attention`, on tensors without broadcast dimensions.

    Args:
        batches, heads, queries, head_dim: of the query.
        keys, key_heads, value_dim: by default queries, heads and head_dim.
        causal, window: as in `megasoftmax.attention`.
        masked: with a bool mask, [batches, 1, queries, keys].
        bias: with a bias [1, heads, queries, keys], contiguous.
        relative: with a `RelativeBias` whose table is [heads, queries + keys - 1].
        key_bias: with a bias [1, heads, 1, keys], such as ALiBi.
        shifted: with a `ShiftedBias` of scores [batches, heads, queries, queries + keys - 1].
        bias_dtype: of the bias, its table or its scores, `dtype` or float32. Default: `dtype`.
        bias_gradient: the backward pass computes that of the bias.
        softcap: with a softcap.
        backward: explains the backward pass.
        deterministic: the backward pass runs under `torch.use_deterministic_algorithms`.
        dtype: float16, bfloat16 or float32.
        gpu: a `Gpu`, or a name for `gpu_named`, such as "L4".
        multiprocessors, shared_bytes: in place of the GPU's own.
        major: in place of that of the GPU's compute capability, 8 or more. With 9, code for 9.0a is
            assumed, as `megasoftmax build` compiles it.

    Raises:
        ValueError: an argument is no such number or dtype, or the kernels do not serve the call.
        BuildError: there is no compiled part and no C++ compiler.
    """
    keys = queries if keys is None else keys
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim
    counts = {"batches": batches, "heads": heads, "queries": queries, "head_dim": head_dim}
    counts |= {"keys": keys, "key_heads": key_heads, "value_dim": value_dim}
    limits = window_of(causal, window)
    biases = {"bias": bias, "relative": relative, "key_bias": key_bias, "shifted": shifted}
    given = [name for name, is_given in biases.items() if is_given]
    if len(given) > 1:
        raise ValueError(f"{given[1]}: a call has one bias, and {given[0]} is one")
    least = kernel_limits().attention["kLeastMajor"]
    device = device_of(gpu, multiprocessors=multiprocessors, shared_bytes=shared_bytes, major=major)
    if device.major < least:
        raise ValueError(
            f"major: expected at least {least}, the first with kernels, got {device.major}, of "
            f"{device.name}: attention runs in plain torch there"
        )
    has_bias = len(given) > 0
    bias_dtype = bias_dtype or dtype
    if bias_gradient and not (backward and has_bias):
        raise ValueError("bias_gradient: only the backward pass of a bias computes it")
    if deterministic and not backward:
        raise ValueError("deterministic: only the backward pass has another order")
    _check(counts, limits, dtype, bias_dtype)
    padded = {"head_dim": -(-head_dim // 8) * 8, "value_dim": -(-value_dim // 8) * 8}
    call = SimpleNamespace(
        **(counts | padded),
        # Sides that reach all keys limit nothing. The bindings drop them too.
        window_left=limits[0] if limits[0] < keys - 1 else -1,
        window_right=limits[1] if limits[1] < queries - 1 else -1,
        is_float=dtype == torch.float32,
        has_mask=masked,
        has_softcap=softcap,
        has_bias=has_bias,
        has_float_bias=bias_dtype == torch.float32,
        has_bias_gradient=bias_gradient,
        is_relative=relative,
        is_of_keys=key_bias,
        is_shifted=shifted,
        is_backward=backward,
        is_deterministic=deterministic,
    )
    answer = ask("megasoftmax_attention_plan", device, **vars(call))
    plan = SimpleNamespace(**{name: int(value) for name, (value,) in answer.items()})

    visible = visible_entries(limits, queries, keys)  # of a head
    pairs = batches * heads * visible
    size = dtype.itemsize
    rows = batches * heads * queries
    query_bytes, output_bytes = rows * head_dim * size, rows * value_dim * size
    key_value_bytes = batches * key_heads * keys * (head_dim + value_dim) * size
    bias_size = bias_dtype.itemsize
    of_pairs = (batches if shifted else 1) * heads if bias or shifted else 0
    bias_bytes = of_pairs * visible * bias_size
    of_head = queries + keys - 1 if relative else keys if key_bias else 0
    table_bytes = heads * of_head * bias_size
    mask_bytes = batches * visible if masked else 0
    read = query_bytes + key_value_bytes + bias_bytes + table_bytes + mask_bytes
    statistics_bytes = rows * _STATISTICS_BYTES
    if backward:
        read += 2 * output_bytes + statistics_bytes  # the output and its gradient
        written = query_bytes + key_value_bytes
        if bias_gradient:  # the launch that moves the one of shifted scores is not counted
            written += of_pairs * queries * keys * bias_size + table_bytes
        flops = 2 * pairs * (3 * head_dim + 2 * value_dim)
    else:
        written = output_bytes + statistics_bytes
        flops = 2 * pairs * (head_dim + value_dim)
    kernel = "backward" if backward else "decode" if plan.is_decode else "forward"
    return AttentionExplanation(
        backward=backward,
        kernel=kernel,
        several_heads=bool(plan.is_small or (plan.takes_heads and plan.blocks < batches * heads)),
        dtype=dtype,
        hopper=bool(plan.is_hopper),
        why=_why(kernel, plan, call, device),
        tile_queries=plan.tile_queries,
        tile_keys=plan.tile_keys,
        tile_head_dim=plan.tile_head_dim,
        tile_value_dim=plan.tile_value_dim,
        splits=plan.splits,
        slices=plan.slices,
        threads=plan.threads,
        shared_bytes=plan.shared_bytes or None,
        blocks=plan.blocks,
        workspace_bytes=plan.workspace_bytes,
        bias_copied=bool(plan.copies_bias),
        pairs=pairs,
        gpu=device,
        bytes_read=read,
        bytes_written=written,
        flops=flops,
    )


def _why(kernel: str, plan: SimpleNamespace, call: SimpleNamespace, device: Gpu) -> str:
    limits = kernel_limits().attention
    most = limits["kMaxDecodeQueries"]
    reasons = []
    if kernel == "decode":
        reasons += [f"at most {most} queries: {call.queries}"]
    elif kernel == "forward" and call.queries > most:
        reasons += [f"more than {most} queries: {call.queries}"]
    elif kernel == "forward" and call.is_float:
        reasons += ["float32"]
    elif kernel == "forward":
        few = limits["kMostQueriesOfSharedRows"]
        reasons += [f"more than {few} queries of heads that share keys: {call.queries}"]
    if plan.is_small:
        kept = ", and keeps the bias that they share" if call.has_bias else ""
        reasons += [
            f"at most {plan.tile_queries} queries and keys: a block takes several heads{kept}"
        ]
    if plan.takes_heads and call.is_backward:
        reasons += [f"{call.batches * call.heads} heads: a block takes whole ones"]
    elif plan.takes_heads:
        reasons += [
            f"{call.batches} heads share a bias: a block keeps that of {plan.tile_queries} queries"
        ]
    if plan.splits > 1:
        reasons += [f"{plan.splits} blocks share the keys of a tile of queries"]
    head_dim = max(call.head_dim, call.value_dim)
    if plan.is_hopper:
        reasons += ["compute capability 9.0: Hopper's own kernels"]
    elif device.major == limits["kHopperMajor"] and kernel != "decode" and not plan.is_small:
        is_dense = call.has_bias and not (call.is_relative or call.is_of_keys)
        if call.is_float:
            refused = "float32"
        elif call.has_softcap and call.has_bias:
            refused = "a softcap beside a bias"
        elif is_dense and call.has_float_bias:
            refused = "a dense bias in float32"
        elif call.is_of_keys and call.has_mask:
            refused = "a bias of keys beside a mask of pairs"
        elif call.is_backward and plan.queries_in_order:
            refused = "the order that deterministic mode asks for here"
        elif head_dim <= limits["kSmallHeadDim"]:
            least = f"{limits['kFilledPercent']}% of their tiles"
            refused = f"a head dimension of {head_dim} where it fills less than {least}"
        else:
            refused = f"a head dimension of {head_dim}"
            refused += " with a bias" if call.has_bias and call.is_backward else ""
        reasons += [f"portable kernels, since Hopper's own do not take {refused}"]
    if plan.tile_value_dim == plan.tile_head_dim:
        held = f"{plan.tile_head_dim} hold {head_dim}"
    else:
        held = f"{plan.tile_head_dim} and {plan.tile_value_dim} of values"
        held += f" hold {call.head_dim} and {call.value_dim}"
    reasons += [f"tiles for head dimensions up to {held}"]
    if call.is_backward:
        reasons += _order(plan)
        if plan.has_row_workers:
            reasons += ["blocks do row work of other heads beside their products"]
    if call.is_of_keys and plan.is_hopper:
        reasons += ["kernels for a bias of keys add it"]
    if call.is_shifted and not plan.copies_bias:
        reasons += ["shifted scores are read where they lie, by rows that begin anywhere"]
    if plan.copies_bias:
        reasons += ["a copy of the bias first, whose rows begin at multiples of 16 bytes"]
    return "; ".join(reasons)


def _order(plan: SimpleNamespace) -> list[str]:
    """How the backward pass sums gradients in a fixed order, where it does."""
    reasons = []
    if plan.query_sums > 1:
        reasons += [f"gradients of queries have {plan.query_sums} sums, added in order"]
    if plan.takes_turns:
        order = ", the longest first" if plan.first_keys_first else ""
        reasons += [f"blocks take turns at gradients of queries{order}"]
    if plan.queries_in_order:
        reasons += ["a launch of its own makes gradients of queries in order"]
    if plan.bias_in_order:
        reasons += ["a launch of its own sums the gradient of the bias in order"]
    return reasons


def _check(
    counts: dict[str, int], limits: Window, dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    check_call(counts, dtype, limits)
    if counts["heads"] % counts["key_heads"] != 0:
        raise ValueError(
            f"key_heads: expected a divisor of {counts['heads']} heads, got {counts['key_heads']}"
        )
    if bias_dtype not in (dtype, torch.float32):
        raise ValueError(f"bias_dtype: expected {dtype} or torch.float32, got {bias_dtype}")
    constants = kernel_limits().attention
    is_float = dtype == torch.float32
    most = constants["kMaxFloatHeadDim" if is_float else "kMaxHeadDim"]
    wide = "" if is_float else "; the kernel of larger ones, for inference, is not described"
    for name in ("head_dim", "value_dim"):
        if counts[name] > most:
            raise ValueError(f"{name}: expected at most {most}, got {counts[name]}{wide}")
    if counts["queries"] + counts["keys"] > constants["kMaxPositions"]:
        raise ValueError(
            f"queries and keys: expected at most {constants['kMaxPositions']:,} together"
        )
