"""Softmax with top-k, and sampling from it."""

from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, cast, overload

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
    new_seed,
    runs_as_op,
)
from megasoftmax.options import (
    SampleKeywords,
    TopkKeywords,
    TopkOptions,
    as_number,
    as_rows,
    check_seed,
    read_options,
)
from megasoftmax.tracing import is_traced

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@overload
def softmax_topk(
    logits: Tensor, k: int, *, return_lse: Literal[False] = ..., **options: Unpack[TopkKeywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def softmax_topk(
    logits: Tensor, k: int, *, return_lse: Literal[True], **options: Unpack[TopkKeywords]
) -> tuple[Tensor, Tensor, Tensor]: ...


@checks.takes_options_by_name
def softmax_topk(
    logits: Tensor,
    k: int,
    *unnamed: Never,
    scale: float | Tensor = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    selection_bias: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
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
    * A NaN or +inf that is not excluded makes NaN of all probabilities that are not excluded. With
      score="sigmoid" NaN makes NaN of its own score alone, or of all K if they are renormalised,
      and +inf has score 1.
    * A probability of exactly 0 takes its entry out of the backward pass.

    Of the K entries, limits drop some, whose probability is 0. The first entry stays.

    * `top_k` keeps the first so many. Then `top_p` counts in their sum. Without it `top_p` counts
      in the sum of the whole row: then K is no limit, but a nucleus of more than K entries is cut.
      A number above K, or below 1 in a tensor, is no limit: `top_p` then counts in the sum of the
      whole row.
    * `top_p` keeps the entries before which the probabilities sum to less than it, `min_p` those
      with at least this part of the largest probability. This is the order of transformers: top_k,
      top_p, min_p.
    * With `renormalize` what is kept sums to 1. The log-sum-exp is over all V. Rows of NaN have no
      limits.

    With score="sigmoid" the K largest of sigmoid(z) take the place of probabilities, and
    `renormalize` divides them by their sum, unless that is 0. `selection_bias` is added to the
    scores where they are chosen and put in order, and not to what is returned. Both are the routers
    of DeepSeek-V3. An excluded entry has score 0, and ranks last. Neither has limits or `group`,
    and the sigmoid has no log-sum-exp. Sums of a score and a selection bias that differ by few
    units in the last place may come in another order on another device.

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
        scale: factor of the logits, finite; never rounded to their type. 1 / temperature. Or a
            floating tensor that broadcasts to the rows, [...], without a gradient: a row whose
            scale is not a positive normal float32 below 2.3e38 has NaN.
        softcap: a number from 0 on; None or 0 for none. It bounds the scaled logits, as in
            `softmax`.
        mask: bool, True = excluded, broadcastable to logits, any strides; not materialised.
        bias: floating, broadcastable to logits, any strides. Its gradient, in its own type, is
            summed in float32 over what was broadcast.
        score: what is returned of the K entries: "softmax" or "sigmoid".
        selection_bias: floating, broadcastable to logits, without a gradient.
        top_k: from 1 on, or int32 or int64 that broadcast to the rows; not checked there.
        top_p, min_p: from 0 to 1, or floating tensors that broadcast to the rows; not checked
            there. 1 and 0 are none.
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
            *(logits, k, scale, softcap, mask, bias, score, selection_bias, top_k, top_p, min_p),
            *(renormalize, dtype, return_lse, group, fused),
        )
        if served is not None:
            return cast(tuple[Tensor, ...], served)
    k = checks.as_integer(k)
    if (  # the shortest way for the most frequent call on a CPU
        softcap is None
        and mask is None
        and bias is None
        and selection_bias is None
        and top_k is None
        and top_p is None
        and min_p is None
        and dtype is None
        and group is None
        and fused is None
        and renormalize is False
        and return_lse is False
        and type(scale) in (float, int)
        and scale == 1
        and type(k) is int
        and isinstance(score, str)
        and score == "softmax"
        and isinstance(logits, Tensor)
        and dispatch.is_plain_scores(logits)
        and 0 < k <= logits.shape[-1]
        and (logits.dtype.itemsize > 2 or not (logits.requires_grad and torch.is_grad_enabled()))
    ):
        return autograd.torch_softmax.softmax_topk(logits, k)
    softcap = as_number("softcap", softcap)
    options = TopkOptions(
        *(as_rows("scale", scale), softcap, mask, bias, score, selection_bias),
        *(as_rows("top_k", top_k), as_rows("top_p", top_p), as_rows("min_p", min_p)),
        *(renormalize, dtype, return_lse, group, fused),  # type: ignore[arg-type]
    )
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
        selection_bias = options.selection_bias
        is_fused = self.runs_fused()
        if is_fused:
            implementation = ops.topk.IMPLEMENTATION
            bias = cast_for_kernels(bias, logits)
            if selection_bias is not None:
                selection_bias = selection_bias.float().reshape(-1)
        elif runs_as_op("logits", logits):
            implementation = ops.topk.IMPLEMENTATION
        operands = (
            *(logits, self.k, cast(float, options.with_one_scale().scale), options.softcap or 0.0),
            *(options.mask, bias, options.renormalize),
            *(dtype_of_probabilities(logits, options.dtype), False, *self._of_rows(is_fused)),
            *(options.score == "sigmoid", selection_bias),
        )
        if options.group is not None:
            given = reference.topk.ForwardArguments(*operands)
            return vocabulary.softmax_topk(implementation, options.group, given)
        needs_gradient = torch.is_grad_enabled() and (
            logits.requires_grad or (bias is not None and bias.requires_grad)
        )
        found: tuple[Tensor, Tensor, Tensor] = call_op(
            autograd.topk.call, implementation, needs_gradient, *operands
        )
        return found

    def sample(self, seed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Indices that are drawn, and probabilities and indices of the K entries."""
        logits, options = self.tensor.detach(), self.options
        is_fused = self.runs_fused()
        function: Any = reference.topk.softmax_topk_sample
        if is_fused or not logits.is_cuda:  # on a GPU the op has kernels alone
            function = ops.topk.sample
        row_scale, *limits = self._of_rows(is_fused)
        found: tuple[Tensor, Tensor, Tensor] = function(
            *(logits, self.k, options.with_one_scale().scale, row_scale, options.mask, *limits),
            seed,
        )
        return found

    def _of_rows(self, is_fused: bool) -> tuple[Any, ...]:
        """The scale of each row, and each limit as a number and as a tensor, for ops."""
        options = self.options

        def operands(name: str, none: float) -> tuple[Any, Tensor | None]:
            given = getattr(options, name)
            if not isinstance(given, Tensor):
                return none if given is None else given, None
            return none, _rows_for_kernels(given) if is_fused else given

        limits = (*operands("top_k", 0), *operands("top_p", 1.0), *operands("min_p", 0.0))
        return operands("scale", 1.0)[1], *limits

    def _is_plain(self) -> bool:
        """Whether it is on a CPU, without options and gradients, and returns no log-sum-exp."""
        logits, options = self.tensor, self.options
        return (
            logits.is_cpu
            and self.k > 0
            and not isinstance(options.scale, Tensor)
            and options.scale > 0
            and not options.has_limits()
            and options.score == "softmax"
            and options.selection_bias is None
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


def _rows_for_kernels(rows: Tensor) -> Tensor:
    """In float32 or int32."""
    if rows.is_floating_point():
        return rows.float()
    if rows.dtype == torch.int32:
        return rows
    return rows.clamp(0, torch.iinfo(torch.int32).max).to(torch.int32)


@overload
def sample(
    logits: Tensor,
    k: int,
    *,
    return_probabilities: Literal[False] = ...,
    **options: Unpack[SampleKeywords],
) -> Tensor: ...


@overload
def sample(
    logits: Tensor,
    k: int,
    *,
    return_probabilities: Literal[True],
    **options: Unpack[SampleKeywords],
) -> tuple[Tensor, Tensor, Tensor]: ...


@checks.takes_options_by_name
def sample(
    logits: Tensor,
    k: int,
    *unnamed: Never,
    scale: float | Tensor = 1.0,
    mask: Tensor | None = None,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor | None = None,
    min_p: float | Tensor | None = None,
    seed: Tensor | None = None,
    return_probabilities: bool = False,
    fused: bool | None = None,
    **others: Never,
) -> Tensor | tuple[Tensor, ...]:
    """One index of each row, drawn from the K largest probabilities of a softmax.

    The distribution is that of `softmax_topk` with these options and renormalize=True, in float32:
    of the whole softmax what is among the K largest and within the limits. One launch reads the
    logits once and draws.

    An index is drawn by a number from 0 to 1, a function of the seed and of the number of the row,
    the same on CPU and GPU: Philox 4x32 with 7 rounds, see `reference.topk.uniform`. The first
    entry up to which the probabilities sum to more than the number is taken, in the order of
    `softmax_topk`. So the same seed gives the same index, except where a sum and the number differ
    by rounding alone. It has no gradient.

    Under torch.vmap each example draws what it would draw alone: its rows count from 0 on. Examples
    with one seed draw by equal numbers, so give each a seed of its own. Without a seed
    `randomness=` of torch.vmap decides whether examples share one.

    A row of NaN, or without a visible entry, gives its first index.

    Args:
        logits: [..., V], float16, bfloat16, float32 or float64; any rank from 1 on, any strides.
        k: from 1 to V; kernels serve up to 256. Without `top_k` it is no limit of the distribution:
            take it as large as a nucleus can be.
        scale, mask, top_k, top_p, min_p: as in `softmax_topk`. scale=1 / temperature. A row is
            drawn greedily with top_k 1. Top-k and top-p of transformers, vLLM and FlashInfer are
            `sample(logits, 50, top_k=50, top_p=0.9)`, except for equals of the K-th logit: exactly
            K entries are kept here.
        seed: int64, one element, on the device of the logits; None draws one by torch's generator.
            Take another one for each step: equal seeds and rows draw by equal numbers.
        return_probabilities: also return the distribution.
        fused: as in `softmax_topk`.

    Returns:
        Indices int64 [...]. With return_probabilities also the probabilities of the K entries,
        float32 (float64 for float64 logits) [..., K], largest first, and their indices [..., K].

    Raises:
        TypeError, ValueError: an argument is not as above, or `fused` is True and the call cannot
            run fused; names the argument, what was expected and what came. Nothing was launched.
    """
    if unnamed or others:
        raise checks.misnamed("sample", 2, unnamed, others)
    if seed is not None and not torch.compiler.is_compiling() and host.calls is not None:
        served = host.calls.sample(
            *(logits, k, scale, mask, top_k, top_p, min_p, seed, return_probabilities, fused)
        )
        if served is not None:
            return cast(Any, served)
    given = {"scale": scale, "mask": mask, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    call = _sampling(logits, k, {**given, "fused": fused}, seed, return_probabilities)
    found = call.sample(new_seed(logits.device) if seed is None else seed)
    return found if return_probabilities else found[0]


def sample_reasons(
    logits: Tensor,
    k: int,
    *unnamed: Any,
    seed: Tensor | None = None,
    return_probabilities: bool = False,
    **given: Any,
) -> tuple[Reason, ...]:
    if unnamed:
        raise checks.misnamed("sample", 2, unnamed, {})
    return _sampling(logits, k, given, seed, return_probabilities).reasons()


def _sampling(
    logits: Tensor, k: int, given: dict[str, Any], seed: Tensor | None, return_probabilities: bool
) -> TopkCall:
    """The valid call of softmax_topk whose distribution `sample` draws from."""
    for name in given:
        if name not in ("scale", "mask", "top_k", "top_p", "min_p", "fused"):
            raise checks.misnamed("sample", 2, (), {name: given[name]})
    options = read_options(TopkOptions, "sample", 2, (), given)
    options = options._replace(renormalize=True)
    k = checks.as_integer(k)
    options.check(logits, k, least=1)
    if hasattr(logits, "device_mesh"):
        raise TypeError("logits: expected no DTensor, got one; sample of each of its shards")
    checks.check_flag("return_probabilities", return_probabilities)
    if seed is not None:
        check_seed(seed, "logits", logits)
    return TopkCall(logits, k, options)


def topk_reasons(logits: Tensor, k: int, *unnamed: Any, **given: Any) -> tuple[Reason, ...]:
    options = read_options(TopkOptions, "softmax_topk", 2, unnamed, given)
    k = checks.as_integer(k)
    options.check(logits, k)
    return TopkCall(logits, k, options).reasons()


topk_reasons.__qualname__ = "softmax_topk"  # in the error of a call without logits
sample_reasons.__qualname__ = "sample"
