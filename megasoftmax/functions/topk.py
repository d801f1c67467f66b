"""Softmax with top-k."""

from typing import TYPE_CHECKING, Any, Literal, Never, cast, overload

import torch
from torch import Tensor

from megasoftmax import autograd, checks, dispatch, host, ops, reference
from megasoftmax.dispatch import Reason
from megasoftmax.distributed import vocabulary
from megasoftmax.functions.calls import (
    Call,
    call_op,
    cast_for_kernels,
    dtype_of_probabilities,
    runs_as_op,
)
from megasoftmax.options import TopkOptions, as_number, read_options
from megasoftmax.tracing import is_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = ...,
    softcap: float | None = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    renormalize: bool = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    group: "ProcessGroup | None" = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def softmax_topk(
    logits: Tensor,
    k: int,
    *,
    scale: float = ...,
    softcap: float | None = ...,
    mask: Tensor | None = ...,
    bias: Tensor | None = ...,
    renormalize: bool = ...,
    dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    group: "ProcessGroup | None" = ...,
    fused: bool | None = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...


@checks.takes_options_by_name
def softmax_topk(
    logits: Tensor,
    k: int,
    *unnamed: Never,
    scale: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    renormalize: bool = False,
    dtype: torch.dtype | None = None,
    return_lse: bool = False,
    group: "ProcessGroup | None" = None,
    fused: bool | None = None,
    **others: Never,
) -> tuple[Tensor, ...]:
    """The K largest probabilities of a softmax, without writing the others.

        z = scale * logits + bias
            with a softcap:  z = softcap * tanh(scale * logits / softcap) + bias
        p = exp(z - max z) / sum exp(z - max z),  its K largest entries along the last dimension

    computed in float32 (float64 for float64 logits), whatever the types of the tensors. The same
    rules hold on GPU and CPU, fused or not.

    * What is selected is decided by the logits (by z where a bias or a softcap is given), not by
      rounded probabilities: larger first, and the lower index first among equals. NaN comes before
      +inf, and -0 equals 0. With a softcap, z that differ by few units in the last place may come
      in another order on another device, and large logits may round to the same z.
    * An excluded entry ranks as -inf and has probability exactly 0 and gradient exactly 0, whatever
      logits, bias and incoming gradient hold there. Where fewer than K entries are left, excluded
      ones follow, by index.
    * A row with nothing left has probabilities 0, gradients 0 and a log-sum-exp of -inf where mask
      or bias is given; a plain row of -inf has NaN. Its indices are 0 to K - 1.
    * A NaN or +inf that is not excluded makes NaN of all probabilities that are not excluded.
    * A probability of exactly 0 takes its entry out of the backward pass.

    Differentiable with respect to logits and bias, twice too; incoming gradients are not modified.
    Gradients use the returned probabilities where they are summed over K, and float32 ones
    elsewhere. The same call gives the same bits on the same device, gradients included. In forward
    mode (torch.func.jvp) calls run in plain torch.

    DTensors stay split along all dimensions but the last, see `megasoftmax.distributed.sharding`.

    Vocabulary-parallel, with `group`: every rank gives its shard of the logits, of mask and of bias
    along the last dimension, in the order of the ranks; shards may have any lengths, also none.
    Every rank gets the same bits, with indices into the whole vocabulary. One all-gather moves
    2 + 2K numbers per row. In the backward pass, which does not communicate, the gradients of
    the results are taken to be the same on every rank, as Megatron-LM does, and each rank gets that
    of its shard; differentiable once. All ranks must give the same rows and options, and a mask
    or bias all or none.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64; any rank from 1 on, any strides.
        k: from 0 to V; kernels serve up to 256. With `group` V is not known on the host: if k
            exceeds V, the further results have probability 0 and index V.
        scale: factor of the logits, finite; never rounded to their type. 1 / temperature.
        softcap: a number from 0 on; None or 0 for none. It bounds the scaled logits, as in
            `softmax`.
        mask: bool, True = excluded, broadcastable to logits, any strides; not materialised.
        bias: floating, broadcastable to logits, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        renormalize: the probabilities sum to 1 over the K entries; the log-sum-exp is over all V
            all the same.
        dtype: of the probabilities; by default what torch.softmax would return: the type of the
            logits, but float32 for 16-bit logits under torch.autocast on a GPU. (torch.topk keeps
            the type that it is given under autocast.)
        return_lse: also return the log-sum-exp.
        group: the process group over whose ranks V is sharded.
        fused: None runs fused where it can, True raises where it cannot (see `why_not_fused`),
            False runs plain torch, which takes memory for rows of V.

    Returns:
        Probabilities [..., K], largest first, and their indices, int64 [..., K], both contiguous.
        With return_lse also the natural log of the denominator over V, [...], float32 (float64 for
        float64 logits).

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.
        NotImplementedError: a forward-mode derivative, or a second one, with `group`.

    Source:
        Online softmax fused with top-k: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
        Vocabulary-parallel logits: Shoeybi et al., https://arxiv.org/abs/1909.08053.
    """
    if unnamed or others:
        raise checks.misnamed("softmax_topk", 2, unnamed, others)
    if not torch.compiler.is_compiling() and host.calls is not None:
        served = host.calls.softmax_topk(
            logits, k, scale, softcap, mask, bias, renormalize, dtype, return_lse, group, fused
        )
        if served is not None:
            return cast(tuple[Tensor, ...], served)
    k = checks.as_integer(k)
    scale, softcap = as_number("scale", scale), as_number("softcap", softcap)
    options = TopkOptions(scale, softcap, mask, bias, renormalize, dtype, return_lse, group, fused)
    options.check(logits, k)
    probabilities, indices, statistics = TopkCall(logits, k, options).run()
    return (probabilities, indices, statistics[2]) if return_lse else (probabilities, indices)


class TopkCall(Call):
    """A call of `softmax_topk`."""

    __slots__ = ("k",)

    options: TopkOptions

    def __init__(self, logits: Tensor, k: int, options: TopkOptions) -> None:
        self.tensor = logits
        self.k = k
        self.options = options

    def reasons(self) -> tuple[Reason, ...]:
        return dispatch.reasons_against_fused_topk(self.tensor, self.k, self.options)

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities, indices, and statistics, the last of which is the log-sum-exp.

        Statistics mean nothing in a plain call, which returns no log-sum-exp.
        """
        logits, options = self.tensor, self.options
        if self._is_plain():
            return *self._by_torch_softmax(), logits
        implementation, bias = autograd.topk.REFERENCE, options.bias
        if self.runs_fused():
            implementation = ops.topk.IMPLEMENTATION
            bias = cast_for_kernels(bias, logits)
        elif runs_as_op("logits", logits):
            implementation = ops.topk.IMPLEMENTATION
        operands = (
            *(logits, self.k, options.scale, options.softcap or 0.0),
            *(options.mask, bias, options.renormalize),
            dtype_of_probabilities(logits, options.dtype),
        )
        if options.group is not None:
            given = reference.topk.ForwardArguments(*operands, candidates=False)
            return vocabulary.softmax_topk(implementation, options.group, given)
        needs_gradient = torch.is_grad_enabled() and (
            logits.requires_grad or (bias is not None and bias.requires_grad)
        )
        found: tuple[Tensor, Tensor, Tensor] = call_op(
            autograd.topk.call, implementation, needs_gradient, *operands, False
        )
        return found

    def _is_plain(self) -> bool:
        """Whether it is on a CPU, without options and gradients, and returns no log-sum-exp."""
        logits, options = self.tensor, self.options
        return (
            logits.is_cpu
            and self.k > 0
            and options.scale > 0
            and not options.softcap
            and options.mask is None
            and options.bias is None
            and options.group is None
            and options.fused is None
            and not options.return_lse
            and not (torch.is_grad_enabled() and logits.requires_grad)
            and type(logits) is Tensor
            and not is_traced()
        )

    def _by_torch_softmax(self) -> tuple[Tensor, Tensor]:
        """Probabilities and indices of a plain call, by torch.softmax."""
        logits, options = self.tensor, self.options
        z = logits.to(reference.softmax.accumulation_dtype(logits.dtype))
        indices = reference.topk.select(z, self.k)
        if options.scale != 1:  # exact for offsets of any size
            z = (z - z.gather(-1, indices[..., :1])).mul_(options.scale)
        probabilities = z.softmax(-1).gather(-1, indices)
        if options.renormalize:
            probabilities /= probabilities.sum(-1, keepdim=True)
        return probabilities.to(options.dtype or logits.dtype), indices


def topk_reasons(logits: Tensor, k: int, *unnamed: Any, **given: Any) -> tuple[Reason, ...]:
    options = read_options(TopkOptions, "softmax_topk", 2, unnamed, given)
    k = checks.as_integer(k)
    options.check(logits, k)
    return TopkCall(logits, k, options).reasons()


topk_reasons.__qualname__ = "softmax_topk"  # in the error of a call without logits
