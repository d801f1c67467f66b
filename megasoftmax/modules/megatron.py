"""The softmax modules of Megatron-core and of apex, by name and interface; SoftmaxOne is one."""

import enum
import math
import numbers
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from megasoftmax import checks, host
from megasoftmax.autocast import autocast_dtype
from megasoftmax.dispatch import Reason
from megasoftmax.functions.softmax import softmax
from megasoftmax.functions.why_not_fused import why_not_fused
from megasoftmax.options import Window, as_number, check_scale, check_softcap, checked_window

MaskFunction = Callable[[Tensor, Tensor], Tensor]


class AttnMaskType(enum.Enum):
    """Attention mask types, with the names and values of Megatron-core."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


_MASK_TYPES = tuple(mask_type.name for mask_type in AttnMaskType)
_CAUSAL_MASK_TYPES = frozenset(name for name in _MASK_TYPES if "causal" in name)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """Scale, mask and softmax of attention scores; stands in for the class of Megatron-core.

    With `scaled_masked_softmax_fusion` it is `megasoftmax.softmax`, fused where that can be, with
    the same results where it cannot:

    * `mask`, causality and `window_size` all hold: an entry that any of them excludes has
      probability 0, and a row with nothing left is 0 throughout. `mask_func` is not called.
    * Causality and window are aligned to the last query and the last key: with one query,
      causality excludes nothing.
    * A mask that is not bool means what `mask_func` makes of it: such a call runs unfused.

    Without it, plain torch computes what Megatron-core computes without fusion, through
    `mask_func`: a window takes the place of the mask, and causality holds where there is no mask.
    Two differences: -1 lifts the limit of a side of the window (where the mask type is causal, a
    right side of -1 still ends at the query), and keys may be more than queries.

    Probabilities are of the half type that the flags name where `softmax_in_fp32` is set, else of
    the type of the input. Under torch.autocast with `scaled_masked_softmax_fusion` they are of the
    type of autocast, as those of apex's class, float64 apart; without it torch.softmax chooses.
    Fused or on a CPU, sums are in float32 in either case.

    Args:
        input_in_fp16, input_in_bf16: the half type of the model, at most one; neither for float32.
        attn_mask_type: a member of `AttnMaskType`, or of another enum with these names, or a name.
            Types with "causal" in their name are causal.
        scaled_masked_softmax_fusion: whether to run fused where possible.
        mask_func: `mask_func(scores, mask)` returns the masked scores. It may change its argument.
        softmax_in_fp32: cast half scores to float32 first; needed where `scale` is set.
        scale: factor of the scores, a number; None for 1.
        window_size: (left, right), -1 = no limit on that side: left tokens before a query, and
            right tokens after it, besides its own. None for no window.
        softcap: bounds the scaled scores, as in `megasoftmax.softmax`; None or 0 for none.
            Megatron-core's class has no such argument.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.

    Source:
        `megatron.core.fusions.fused_softmax`, https://github.com/NVIDIA/Megatron-LM.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: enum.Enum | str,
        scaled_masked_softmax_fusion: bool,
        mask_func: MaskFunction | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: Window | None = None,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        for name, flag in (
            ("input_in_fp16", input_in_fp16),
            ("input_in_bf16", input_in_bf16),
            ("scaled_masked_softmax_fusion", scaled_masked_softmax_fusion),
            ("softmax_in_fp32", softmax_in_fp32),
        ):
            checks.check_flag(name, flag)
        if mask_func is not None and not callable(mask_func):
            raise TypeError(f"mask_func: expected None or a function, got {checks.kind(mask_func)}")
        if input_in_fp16 and input_in_bf16:
            raise ValueError("input_in_fp16, input_in_bf16: expected at most one, got both")
        scale = as_number("scale", scale)
        if scale is not None:
            check_scale("scale", scale, torch.float64)
        if scale is not None and not softmax_in_fp32:
            raise ValueError(
                f"softmax_in_fp32: expected True where scale is given, got {softmax_in_fp32} "
                f"with scale {scale}"
            )
        self.input_in_fp16 = input_in_fp16
        self.input_in_bf16 = input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = _checked_mask_type(attn_mask_type)
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = checked_window("window_size", window_size)
        self.softcap = as_number("softcap", softcap)
        check_softcap("softcap", self.softcap, torch.float64)

    def forward(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None
    ) -> Tensor:
        """Probabilities.

        Args:
            input: scores [batch, heads, queries, keys].
            mask: bool, True = excluded, broadcastable to the scores; or None.
            softmax_offset: a logit per head, [heads], that joins the denominator; or None.
                Differentiable.

        Raises:
            TypeError, ValueError: an argument is not as above; names the argument.
        """
        if (
            softmax_offset is None
            and not torch.compiler.is_compiling()
            and (calls := host.calls) is not None
        ):
            options = self._derive_options() if self._options is None else self._options
            served = calls.softmax_of_module(input, mask, options)
            if served is not None:
                return cast(Tensor, served)
        _check_call(input, mask, softmax_offset)
        if self.scaled_masked_softmax_fusion and (mask is None or mask.dtype == torch.bool):
            return self.forward_fused_softmax(input, mask, softmax_offset)
        return self.forward_torch_softmax(input, mask, softmax_offset)

    def forward_fused_softmax(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None
    ) -> Tensor:
        """As `forward` with fusion, whatever the flag says."""
        options = self._options_of_call(input, mask, softmax_offset)
        try:
            return softmax(input, **options)
        except (TypeError, ValueError) as error:
            raise checks.renamed(error, _NAMES) from None

    def forward_torch_softmax(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None
    ) -> Tensor:
        """In plain torch, through `mask_func`."""
        output_dtype = self._output_dtype(input, fusion=self.scaled_masked_softmax_fusion)
        scores = input if output_dtype is None else input.float()
        if self.scale is not None:
            scores = scores * self.scale
        if self.softcap:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        for one in self._masks(scores, mask):
            if self.mask_func is None:
                raise ValueError("mask_func: expected a function where a mask is applied, got None")
            scores = self.mask_func(scores, one)
        if softmax_offset is None:
            probabilities = torch.softmax(scores, -1)
        else:
            probabilities = softmax(scores, sink=_sink(softmax_offset, scores), fused=False)
        return probabilities.to(output_dtype or probabilities.dtype)

    def is_kernel_available(self, mask: Tensor | None, b: int, np: int, sq: int, sk: int) -> bool:
        """Whether scores [b, np, sq, sk] of the type that the flags name would run fused.

        They are taken to be on the device of the mask; without a mask, on the current GPU.
        """
        device = torch.device("cuda") if mask is None else mask.device
        if device.type != "cuda" or not torch.cuda.is_available():
            return False
        dtype = self._half_dtype() or torch.float32
        scores = torch.empty((), dtype=dtype, device=device).expand(b, np, sq, sk)
        return len(self.why_not_fused(scores, mask)) == 0

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """1: what must divide the rows of a call. There is no such limit here."""
        return 1

    def why_not_fused(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None = None
    ) -> tuple[Reason, ...]:
        """Why `forward` of the same arguments would not run fused; empty: it would.

        Raises:
            TypeError, ValueError: as `forward` would.
        """
        _check_call(input, mask, softmax_offset)
        reasons = []
        if not self.scaled_masked_softmax_fusion:
            reasons.append(Reason("scaled_masked_softmax_fusion", "False", "True"))
        if mask is not None and mask.dtype != torch.bool:
            reasons.append(Reason("dtype of mask", str(mask.dtype), "torch.bool"))
        if reasons:
            mask = None  # of any shape that `mask_func` takes
        options = self._options_of_call(input, mask, softmax_offset)
        return (*reasons, *checks.called(_NAMES, why_not_fused, softmax, input, **options))

    def _options_of_call(
        self, input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None
    ) -> dict[str, Any]:
        """Those of `softmax`."""
        return {
            "scale": 1.0 if self.scale is None else self.scale,
            "softcap": self.softcap,
            "mask": mask,
            "causal": self._is_causal(),
            "window": self.window_size,
            "sink": _sink(softmax_offset, input),
            "dtype": self._output_dtype(input, fusion=True),
        }

    def extra_repr(self) -> str:
        mask_type = _name(self.attn_mask_type)
        shown = f"attn_mask_type={mask_type}, scale={self.scale}, window_size={self.window_size}"
        return f"{shown}, softcap={self.softcap}" if self.softcap else shown

    # Attributes may be set after construction, as Megatron code does: what is derived of them
    # lasts until one is set.

    _options: tuple[Any, ...] | None = None
    """What csrc/host/calls.h says of `softmax_of_module`; () if it declines; None: not derived."""

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_options"] = None
        super().__setattr__(name, value)

    def _derive_options(self) -> tuple[Any, ...]:
        options: tuple[Any, ...] = ()
        if self.scaled_masked_softmax_fusion and not self.softcap and self._is_as_written():
            scale = 1.0 if self.scale is None else self.scale
            dtype = self._half_dtype() if self.softmax_in_fp32 else None
            options = (scale, self._is_causal(), self.window_size, dtype)
        vars(self)["_options"] = options
        return options

    def _is_as_written(self) -> bool:
        """Whether nobody has replaced the methods that C++ stands for."""
        written = (FusedScaleMaskSoftmax.forward_fused_softmax, FusedScaleMaskSoftmax._output_dtype)
        found = (self.forward_fused_softmax, self._output_dtype)
        return tuple(getattr(method, "__func__", None) for method in found) == written

    def _is_causal(self) -> bool:
        return _name(self.attn_mask_type) in _CAUSAL_MASK_TYPES

    def _half_dtype(self) -> torch.dtype | None:
        if self.input_in_fp16:
            return torch.float16
        return torch.bfloat16 if self.input_in_bf16 else None

    def _output_dtype(self, scores: Tensor, *, fusion: bool) -> torch.dtype | None:
        if fusion and torch._C._is_any_autocast_enabled():
            dtype = autocast_dtype(scores)
            if dtype is not None:
                return dtype
        return self._half_dtype() if self.softmax_in_fp32 else None

    def _masks(self, scores: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
        """What `mask_func` is to apply, in turn."""
        left, right = checked_window("window_size", self.window_size) or (-1, -1)
        queries, keys = scores.shape[-2:]
        if self.scaled_masked_softmax_fusion:  # all of them hold, as fused
            given = () if mask is None else (mask,)
            right = 0 if self._is_causal() else right
            if left < 0 and (right < 0 or (right == 0 and queries == 1)):
                return given
            return *given, _outside(queries, keys, left, right, scores.device)
        if self.window_size is not None:
            right = 0 if right < 0 and self._is_causal() else right
            return (_outside(queries, keys, left, right, scores.device),)
        if mask is not None:
            return (mask,)
        if self._is_causal() and queries > 1:
            return (_outside(queries, keys, -1, 0, scores.device),)
        return ()


class ScaledUpperTriangMaskedSoftmax:
    """Softmax of scaled scores in which a query does not see the keys after it."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Probabilities of scores [batch * heads, queries, keys], in their type; differentiable."""
        checks.check_rank("inputs", inputs, 3, "[batch * heads, queries, keys]")
        return _softmax_of_apex(inputs, scale, causal=True)


class ScaledMaskedSoftmax:
    """Softmax of scaled scores with a mask."""

    @staticmethod
    def apply(inputs: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Probabilities of scores [batch, heads, queries, keys], in their type; differentiable.

        The mask is bool, True = excluded, and broadcastable to the scores; or None.
        """
        checks.check_rank("inputs", inputs, 4, "[batch, heads, queries, keys]")
        return _softmax_of_apex(inputs, scale, mask=mask)


class ScaledSoftmax:
    """Softmax of scaled scores."""

    @staticmethod
    def apply(inputs: Tensor, scale: float) -> Tensor:
        """Probabilities of scores [..., queries, keys], in their type; differentiable."""
        return _softmax_of_apex(inputs, scale)


_NAMES_OF_ONE = {"scores": "x", "sink": "denominator_offset"}


class SoftmaxOne(torch.nn.Module):
    """Softmax with a further term in the denominator: the off-by-one softmax by default.

        p = exp(x) / (sum exp(x) + offset),  or + exp(offset) where the offset is a tensor

    Args:
        dim: over which the probabilities and what is missing sum to 1; None for the last.
        denominator_offset: a number, not negative, is the term itself. A tensor, [heads] or one
            element, holds its logarithm, as in Megatron-core, and is differentiable; heads are the
            third dimension from the end, and `dim` one of the last two.

    Raises:
        TypeError, ValueError: an argument is not as above; names the argument.

    Source:
        Miller, "Attention is off by one", https://www.evanmiller.org/attention-is-off-by-one.html.
    """

    def __init__(self, dim: int | None = None, denominator_offset: Tensor | float = 1.0) -> None:
        super().__init__()
        if dim is not None:
            dim = checks.checked_integer("dim", dim, -(2**63))
        if isinstance(denominator_offset, Tensor):
            checks.check_floating("denominator_offset", denominator_offset)
        else:
            if not isinstance(denominator_offset, numbers.Real):
                kind = checks.kind(denominator_offset)
                raise TypeError(f"denominator_offset: expected a tensor or a number, got {kind}")
            if not 0 <= denominator_offset < math.inf:
                raise ValueError(
                    f"denominator_offset: expected a finite number from 0 on, "
                    f"got {denominator_offset}"
                )
        self.dim = dim
        self.denominator_offset = denominator_offset

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities of the shape of x, in the type that torch.softmax would return."""
        scores, sink = self._scores_and_sink(x)
        dim = -1 if self.dim is None else self.dim
        try:
            return softmax(scores, sink=sink).movedim(-1, dim)
        except (TypeError, ValueError) as error:
            raise checks.renamed(error, _NAMES_OF_ONE) from None

    def why_not_fused(self, x: Tensor) -> tuple[Reason, ...]:
        """Why `forward` of the same argument would not run fused; empty: it would.

        Raises:
            TypeError, ValueError: as `forward` would.
        """
        scores, sink = self._scores_and_sink(x)
        return checks.called(_NAMES_OF_ONE, why_not_fused, softmax, scores, sink=sink)

    def extra_repr(self) -> str:
        offset = self.denominator_offset
        shown = tuple(offset.shape) if isinstance(offset, Tensor) else offset
        return f"dim={self.dim}, denominator_offset={shown}"

    def _scores_and_sink(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """x with `dim` last, and the logit."""
        checks.check_floating("x", x)
        rank = x.dim()
        dim = -1 if self.dim is None else self.dim
        if not -rank <= dim < rank:
            raise ValueError(f"dim: expected from {-rank} to {rank - 1}, got {dim}")
        moved = x.movedim(dim, -1)
        offset = self.denominator_offset
        if not isinstance(offset, Tensor):
            return moved, math.log(offset) if offset > 0 else -math.inf
        if offset.numel() != 1:
            heads = x.shape[-3] if rank > 2 else 1
            if dim % rank < rank - 2 or offset.numel() != heads:
                raise ValueError(
                    f"denominator_offset: expected one element, or [{heads}] and dim one of the "
                    f"last two, got shape {tuple(offset.shape)} and dim {dim}"
                )
        return moved, offset.reshape(-1)


def _softmax_of_apex(inputs: Tensor, scale: float, **options: Any) -> Tensor:
    checks.check_floating("inputs", inputs)
    try:
        return softmax(inputs, scale=scale, dtype=inputs.dtype, **options)
    except (TypeError, ValueError) as error:
        raise checks.renamed(error, {"scores": "inputs"}) from None


def _name(mask_type: enum.Enum | str) -> str:
    return mask_type if isinstance(mask_type, str) else mask_type._name_  # .name takes longer


def _checked_mask_type(mask_type: enum.Enum | str) -> enum.Enum | str:
    """As given, so that it stays equal to the member that it was."""
    if not isinstance(mask_type, (enum.Enum, str)):
        raise TypeError(f"attn_mask_type: expected an enum member, got {type(mask_type).__name__}")
    if _name(mask_type) not in _MASK_TYPES:
        raise ValueError(
            f"attn_mask_type: expected one of {', '.join(_MASK_TYPES)}, got {_name(mask_type)}"
        )
    return mask_type


_NAMES = {"scores": "input", "window": "window_size", "sink": "softmax_offset"}


def _check_call(input: Tensor, mask: Tensor | None, softmax_offset: Tensor | None) -> None:
    """What the way in plain torch needs too."""
    checks.check_floating("input", input)
    if input.dim() != 4:
        checks.check_rank("input", input, 4, "[batch, heads, queries, keys]")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask: expected None or a tensor, got {checks.kind(mask)}")
        checks.check_layout("mask", mask)
    if softmax_offset is None:
        return
    checks.check_floating("softmax_offset", softmax_offset)
    heads = input.shape[1]
    if softmax_offset.numel() not in (1, heads):
        raise ValueError(
            f"softmax_offset: expected [{heads}], one per head, "
            f"got shape {tuple(softmax_offset.shape)}"
        )
    if softmax_offset.is_meta:  # the only device from which nothing moves
        checks.check_device("softmax_offset", softmax_offset, "input", input)


def _sink(softmax_offset: Tensor | None, scores: Tensor) -> Tensor | None:
    """One logit per head, on the device of the scores."""
    return None if softmax_offset is None else softmax_offset.to(scores.device).reshape(-1)


def _outside(queries: int, keys: int, left: int, right: int, device: torch.device) -> Tensor:
    """Bool [queries, keys], True = outside the window."""
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        visible = visible.triu(keys - queries - left)
    if right >= 0:
        visible = visible.tril(keys - queries + right)
    return ~visible
