"""What `megasoftmax check` draws: calls whose results the reference in float32 decides.

Scores are normal, so that an error of each result follows from the rounding of its inputs: `_noise`
is the relative error of a probability or of a product of rounded numbers. benchmarks/soak.py adds
other values to these families, such as NaN in excluded entries, and compares in float64.
"""

import math
from collections.abc import Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor

import megasoftmax
from megasoftmax import RelativeBias, ShiftedBias
from megasoftmax.check.choices import distances_of_drawn, in_order
from megasoftmax.check.draws import (
    BFLOAT,
    FLOAT,
    HALF,
    HEAD_DIMS,
    MAX_FLOAT_HEAD_DIM,
    MAX_HEAD_DIM,
    MAX_K,
    MAX_ROUTER_K,
    ROW_LIMITS,
    Data,
    Drawn,
    Layout,
    Mask,
    OfRows,
    Ranges,
    SelectionBias,
    Shape,
    chance,
    draw_broadcast,
    draw_columns,
    draw_experts,
    draw_limits,
    draw_most,
    draw_rows,
    draw_size,
    draw_window,
    made,
    unless_fused,
)
from megasoftmax.check.suite import Deviation, Suite
from megasoftmax.reference.topk import uniform

Deviations = dict[str, Deviation]
SCALES = (1.0, 0.125, -0.7)
SCALES_OF_ROWS = ((0.01, 0.1), (0.3, 2.5), (2.0, 9.0))
USUAL = {"cuda": 2**17, "cpu": 2**13}  # scores: few configurations have more


class Softmax(Drawn):
    """A softmax over the last dimension, with the gradients of scores and bias."""

    family = "softmax"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Softmax":
        shape, dtype = draw_rows(random, usual)
        return cls(
            shape=shape,
            dtype=dtype,
            layout=Layout.draw(random, len(shape)),
            scale=random.choice(SCALES),
            bias=draw_broadcast(random, shape[:-1]) if chance(random, 0.4) else None,
            dropout=random.choice((0.1, 0.5)) if chance(random, 0.2) else 0.0,
            **_draw_excluded(random, shape),
            softcap=random.choice((1.5, 8.0)) if chance(random, 0.2) else None,
        )

    def drops(self, data: Data) -> dict[str, Any]:
        """The arguments of a call with dropout."""
        if self.dropout == 0:
            return {}
        seed = torch.tensor([math.prod(self.shape)], dtype=torch.int64, device=data.device)
        return {"dropout": self.dropout, "seed": seed}

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        scores = self.layout.place(data.normal(self.shape).to(self.dtype))
        incoming = data.normal(self.shape).to(self.dtype)
        bias = None
        if self.bias is not None:  # whole rows, along which kernels do not sum
            bias = data.normal((*self.bias, self.shape[-1])).to(self.dtype)
        given, drops = {"scale": self.scale, **excluding(self, data)}, self.drops(data)
        given["softcap"] = self.softcap
        unless_fused(megasoftmax.softmax, fused, scores, bias=bias, **given, **drops)

        def run(fused: bool | None, *tensors: Tensor | None) -> list[Tensor]:
            leaves = _leaves(tensors[:2])
            p = megasoftmax.softmax(leaves[0], bias=leaves[1], fused=fused, **given, **drops)
            return [p.detach(), *_gradients(p, tensors[2], leaves)]

        tensors = scores, bias, incoming
        wide = _in_float(tensors)
        actual, expected = run(fused, *tensors), run(False, *wide)
        p = _stored(megasoftmax.softmax(wide[0], bias=wide[1], fused=False, **given), self.dtype)
        kept = p / (1 - self.dropout)
        errors = _score_errors(p, kept, wide[2].abs(), (kept * wide[2].abs()).sum(-1, True))
        slopes = _slope_errors(wide[0] * self.scale, self.softcap)
        allowed = [kept, abs(self.scale) * errors * slopes]
        names = ["probabilities", "gradient of scores"]
        if bias is not None:
            allowed.append(errors.sum_to_size(bias.shape))
            names.append("gradient of bias")
        return _deviations(names, actual, expected, allowed, self.dtype)


class Topk(Drawn):
    """softmax_topk, with the gradient of the logits, and sample where that takes the options."""

    family = "softmax_topk"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Topk":
        is_router = chance(random, 0.35)
        shape, dtype = draw_rows(random, usual, draw_experts if is_router else draw_columns)
        most = min(shape[-1], MAX_ROUTER_K if is_router else MAX_K)
        edges = [k for k in (0, 1, 2, 8, 16, 17, 32, 33, 64, MAX_K - 1, most) if k <= most]
        k = random.choice((random.choice(edges), random.randint(1, most)))
        score, has_bias = "softmax", False
        if is_router:
            score, has_bias = random.choice(
                (("softmax", True), ("sigmoid", True), ("sigmoid", False))
            )
        takes_others = not is_router or chance(random, 0.1)  # kernels of routers do not
        case = cls(
            shape=shape,
            dtype=dtype,
            k=k,
            layout=Layout.draw(random, len(shape)),
            scale=random.choice(SCALES) if dtype != FLOAT else 1.0,  # logits keep their order
            softcap=random.choice((1.5, 8.0)) if takes_others and chance(random, 0.15) else None,
            mask=Mask.draw(random, shape) if takes_others else None,
            score=score,
            selection_bias=SelectionBias.draw(random, shape) if has_bias else None,
            renormalize=chance(random, 0.4),
            **(dict.fromkeys(ROW_LIMITS) if is_router else draw_limits(random, shape[:-1], k)),
        )
        if not is_router and case.softcap is None and chance(random, 0.3):
            case.scale = OfRows.draw(random, shape[:-1], *random.choice(SCALES_OF_ROWS))
        return case

    def is_router(self) -> bool:
        return self.score == "sigmoid" or self.selection_bias is not None

    def options(self, data: Data) -> dict[str, Any]:
        """The arguments of a call that `sample` takes too."""
        return {name: made(getattr(self, name), data) for name in ("scale", "mask", *ROW_LIMITS)}

    def drawn(
        self, data: Data, fused: bool | None, logits: Tensor, options: dict[str, Any]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor] | None:
        """What `sample` returns for these logits, and the numbers that it draws by."""
        if self.is_router() or self.k == 0:
            return None
        seed = torch.tensor([math.prod(self.shape)], device=data.device, dtype=torch.int64)
        found = megasoftmax.sample(
            logits, self.k, **options, seed=seed, return_probabilities=True, fused=fused
        )
        rows = self.shape[:-1]
        return found, uniform(seed, math.prod(rows)).view(rows)

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        logits = self.layout.place(data.normal(self.shape).to(self.dtype))
        incoming = data.normal((*self.shape[:-1], self.k)).to(self.dtype)
        options = self.options(data)
        others = {
            "softcap": self.softcap,
            "score": self.score,
            "selection_bias": made(self.selection_bias, data),
            "renormalize": self.renormalize,
        }
        given = options | others
        unless_fused(megasoftmax.softmax_topk, fused, logits, self.k, **given)

        def run(fused: bool | None, *tensors: Tensor | None) -> tuple[list[Tensor], Tensor]:
            leaves = _leaves(tensors[:1])
            p, indices = megasoftmax.softmax_topk(leaves[0], self.k, fused=fused, **given)[:2]
            return [p.detach(), *_gradients(p, tensors[1], leaves)], indices

        actual, indices = run(fused, logits, incoming)
        wide = _in_float((logits, incoming))
        expected, expected_indices = run(False, *wide)
        # A row is skipped if rounding decides whether a limit keeps an entry.
        is_clear = self._is_clear(wide[0], options)
        is_other = indices != expected_indices
        if self.selection_bias is not None or self.softcap is not None:
            is_clear = is_clear & ~is_other.any(-1)
            is_other = is_other.any(-1) & ~in_order(indices, *self._ranks(wide[0], given), FLOAT)
        count = int(is_other.sum())
        found = {"indices": Deviation(math.inf if count else 0.0, f"{count} others")}

        def clear(*tensors: Tensor) -> list[Tensor]:
            return [each[is_clear] for each in tensors]

        allowed = self._errors(wide, given, expected[0], expected_indices)
        names = ["probabilities", "gradient of logits"]
        compared = clear(*actual), clear(*expected), clear(*allowed)
        found |= _deviations(names, *compared, self.dtype)
        if self.softcap is None and (drawn := self.drawn(data, fused, logits, options)):
            (draws, p, among), numbers = drawn
            expected_p, expected_among = megasoftmax.softmax_topk(
                wide[0], self.k, **options, renormalize=True, fused=False
            )
            compared = clear(p), clear(expected_p), clear(expected_p)
            found |= _deviations(["probabilities of sample"], *compared, FLOAT)
            distances = distances_of_drawn(draws, expected_p, expected_among, numbers)
            distances = distances.masked_fill((among != expected_among).any(-1), math.inf)
            worst = float(torch.where(is_clear, distances, 0.0).max()) if distances.numel() else 0.0
            message = f"{worst:.3g} from the numbers that draw an index"
            found["indices of sample"] = Deviation(worst / _noise(FLOAT), message)
        return found

    def _is_clear(self, logits: Tensor, options: dict[str, Any]) -> Tensor:
        """Rows whose kept entries stay the same when limits change by 1e-5 of themselves."""

        def kept(factor: float) -> Tensor:
            moved = dict(options)
            for name in ("top_p", "min_p"):
                if options[name] is not None:
                    limit = torch.as_tensor(options[name], device=logits.device, dtype=FLOAT)
                    of_none = limit >= 1 if name == "top_p" else limit <= 0
                    moved[name] = torch.where(of_none, limit, (limit * factor).clamp(max=1))
            given = moved | {"softcap": self.softcap, "fused": False}
            return megasoftmax.softmax_topk(logits, self.k, **given)[0] > 0

        if options["top_p"] is None and options["min_p"] is None:
            return torch.ones(self.shape[:-1], dtype=torch.bool, device=logits.device)
        return (kept(1 - 1e-5) == kept(1 + 1e-5)).all(-1)

    def _ranks(self, logits: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The number that ranks each entry, and its error in float32."""
        eps = torch.finfo(FLOAT).eps
        z = logits.double() * _of_logits(given["scale"])
        errors = eps * z.abs()
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
            errors = 8 * eps * z.abs()
        if given["mask"] is not None:
            z = z.masked_fill(given["mask"], -torch.inf)
        if self.selection_bias is None:
            return z, errors
        if self.score == "sigmoid":
            scores, relative = z.sigmoid(), errors
        else:
            scores = z.softmax(-1)
            relative = errors + (scores * errors).sum(-1, True)
        ranks = (scores + given["selection_bias"]).masked_fill(z == -torch.inf, -torch.inf)
        return ranks, scores * (relative + 8 * eps)

    def _errors(
        self, wide: list[Tensor], given: dict[str, Any], chosen: Tensor, indices: Tensor
    ) -> list[Tensor]:
        """The sizes that errors of probabilities and of the logits' gradient are relative to."""
        logits, incoming = wide
        scale = _of_logits(given["scale"])
        dense = torch.zeros_like(logits).scatter(-1, indices, (chosen > 0) * incoming.abs())
        if self.renormalize or self.score == "sigmoid":
            p = torch.zeros_like(logits).scatter(-1, indices, chosen)
        else:
            of_row = {"softcap": self.softcap, "mask": given["mask"]}
            p = megasoftmax.softmax(logits * scale, **of_row, fused=False)
        p = _stored(p, self.dtype)
        errors, z = _score_errors(p, p, dense, (p * dense).sum(-1, True)), logits * scale
        if self.score == "sigmoid" and not self.renormalize:
            errors = p * dense
        if self.softcap is not None:
            errors = errors * _slope_errors(z, self.softcap)
            z = self.softcap * torch.tanh(z / self.softcap)
        if self.score == "sigmoid":
            errors = errors * torch.sigmoid(-z)
        return [chosen, abs(scale) * errors]


def _of_logits(scale: Any) -> Any:
    """The scale of all rows, or [..., 1] of each."""
    return scale.float().unsqueeze(-1) if isinstance(scale, Tensor) else scale


class Attention(Drawn):
    """Attention, with the gradients of query, key, value and bias.

    bias: its shape. relative: it is the table of a RelativeBias. shifted: of a ShiftedBias.
    """

    shifted: bool = False
    family = "attention"

    @classmethod
    def draw(cls, random: Random, usual: int) -> "Attention":
        most = draw_most(random, usual)
        few = random.choices(("neither", "queries", "keys", "both"), (65, 18, 5, 12))[0]
        key_heads = random.choice((1, 1, 2, 3, 5))
        heads = key_heads * random.choice((1, 1, 2, 3, 4, 8))
        batch = random.choice((1, 1, 2, 3, 4, 6))
        pairs = max(most // (batch * heads), 16)
        longest = max(pairs // 64, 64)  # keys and values are tensors too
        dtype = random.choice((HALF, BFLOAT, FLOAT))
        # Kernels take fewer in float32 than the reference.
        is_narrow = dtype == FLOAT and usual > USUAL["cpu"]
        widest = MAX_FLOAT_HEAD_DIM if is_narrow else MAX_HEAD_DIM
        head_dims = [dim for dim in HEAD_DIMS if dim <= widest]
        head_dim = random.choice(head_dims)
        if few == "queries":  # as in decoding
            queries = random.randint(1, 16)
            keys = draw_size(random, min(pairs, longest))
        elif few == "keys":  # sums over many queries
            batch, key_heads, heads = 1, 1, random.choice((1, 2, 3))
            keys, head_dim = 16, min(160, widest)
            queries = min(max(most, usual // 2) // (heads * keys), 20000)
        elif few == "both":  # as in windows of images
            key_heads = heads = random.choice((1, 2, 3))
            queries, keys = random.randint(8, 66), random.randint(1, 66)
            queries = keys if chance(random, 0.5) else queries
            batch = max(min(most // (heads * queries * keys), 600), 1)
        else:
            keys = draw_size(random, min(int(pairs ** random.uniform(0.3, 1)), longest))
            queries = draw_size(random, min(pairs // keys, random.choice((3000, 3000, 2**17 + 1))))
        shape = (batch, heads, queries, keys)
        bias, kind = _draw_bias(random, shape)
        return cls(
            shape=shape,
            key_heads=key_heads,
            head_dim=head_dim,
            value_dim=head_dim if chance(random, 0.5) else random.choice(head_dims),
            dtype=dtype,
            query_layout=Layout.draw(random, 3),  # all columns alike would be rounded alike
            key_layout=Layout.draw(random, 3),
            value_layout=Layout.draw(random, 3),
            bias=bias,
            bias_layout=Layout.draw(random, len(bias or ())),
            relative=kind in ("relative", "shifted"),
            shifted=kind == "shifted",
            **_draw_excluded(random, shape),
        )

    def as_bias(self, leaf: Tensor | None) -> Any:
        """What attention takes for a tensor that learns."""
        if leaf is None or not self.relative:
            return leaf
        return ShiftedBias(leaf) if self.shifted else RelativeBias(leaf)

    def tensors(self, data: Data) -> Iterator[Tensor]:
        """Query, key and value."""
        batch, heads, queries, keys = self.shape
        for layout, sizes in (
            (self.query_layout, (batch, heads, queries, self.head_dim)),
            (self.key_layout, (batch, self.key_heads, keys, self.head_dim)),
            (self.value_layout, (batch, self.key_heads, keys, self.value_dim)),
        ):
            yield layout.place(data.normal(sizes).to(self.dtype))

    def compare(self, data: Data, fused: bool | None) -> Deviations:
        batch, heads, queries, keys = self.shape
        group = heads // self.key_heads

        query, key, value = self.tensors(data)
        incoming = data.normal((batch, heads, queries, self.value_dim)).to(self.dtype)
        bias = None
        if self.bias is not None:
            bias = self.bias_layout.place(data.normal(self.bias).to(self.dtype))
        given, scale = excluding(self, data), self.head_dim**-0.5

        def run(fused: bool | None, *tensors: Tensor | None) -> list[Tensor]:
            leaves = _leaves(tensors[:4])
            output = megasoftmax.attention(
                *leaves[:3], bias=self.as_bias(leaves[3]), fused=fused, **given
            )
            return [output.detach(), *_gradients(output, tensors[4], leaves)]

        tensors = query, key, value, bias, incoming
        unless_fused(
            megasoftmax.attention, fused, query, key, value, bias=self.as_bias(bias), **given
        )
        actual, wide = run(fused, *tensors), _in_float(tensors)
        expected = run(False, *wide)

        q, k, v, b, g = wide
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        dense = self.as_bias(b).dense(queries, keys) if self.relative else b
        p = megasoftmax.softmax(q @ k.mT, scale=scale, bias=dense, fused=False, **given)
        p = _stored(p, self.dtype)
        sums = p @ v.abs()
        incoming_of_p = g.abs() @ v.abs().mT
        errors = _score_errors(p, p, incoming_of_p, (g.abs() * sums).sum(-1, True))

        def of_key_heads(each: Tensor) -> Tensor:
            return each.unflatten(1, (self.key_heads, group)).sum(2)

        allowed = [
            sums,
            scale * errors @ k.abs(),
            of_key_heads(scale * errors.mT @ q.abs()),
            of_key_heads(p.mT @ g.abs()),
        ]
        names = ["output", *(f"gradient of {name}" for name in ("query", "key", "value"))]
        if b is not None:
            table = torch.zeros_like(b).requires_grad_()
            entries = self.as_bias(table).dense(queries, keys) if self.relative else table
            allowed.append(torch.autograd.grad(entries.expand(self.shape), table, errors)[0])
            names.append("gradient of bias")
        return _deviations(names, actual, expected, allowed, self.dtype)


SUITE = Suite(
    families={each.family: each for each in (Softmax, Topk, Attention)},
    shares={"softmax": 0.35, "softmax_topk": 0.15, "attention": 0.5},
    usual=USUAL,
)


def _draw_excluded(random: Random, shape: Shape) -> dict[str, Any]:
    has_queries = len(shape) > 1
    return {
        "mask": Mask.draw(random, shape),
        "causal": has_queries and chance(random, 0.3),
        "window": draw_window(random, shape[-1]) if has_queries else None,
        "ranges": Ranges.draw(random, shape),
    }


def excluding(case: Drawn, data: Data) -> dict[str, Any]:
    """The arguments of a call that exclude entries."""
    return {
        "mask": made(case.mask, data),
        "causal": case.causal,
        "window": case.window,
        "visible": made(case.ranges, data),
    }


def _draw_bias(random: Random, shape: Shape) -> tuple[Shape | None, str]:
    """The shape of a bias of attention, dense or broadcast, and its kind."""
    kind = random.choices(("none", "dense", "relative", "shifted"), (35, 40, 15, 10))[0]
    if kind == "none":
        return None, kind
    batch, heads, queries, keys = shape
    leading = random.choice((1, batch)), random.choice((1, heads))
    whole: Shape = (*leading, queries + keys - 1)
    if kind == "dense":
        whole = (*leading, random.choice((queries, queries, 1)), random.choice((keys, keys, 1)))
    if kind == "shifted":
        whole = (*leading, queries, queries + keys - 1 + random.choice((0, 1, 7)))
    missing = 1 if whole[0] == 1 and chance(random, 0.5) else 0
    return whole[missing:], kind


def _leaves(tensors: Any) -> list[Any]:
    return [None if each is None else each.detach().requires_grad_() for each in tensors]


def _in_float(tensors: Any) -> list[Any]:
    return [None if each is None else each.float() for each in tensors]


def _gradients(result: Tensor, incoming: Tensor | None, leaves: list[Any]) -> tuple[Tensor, ...]:
    given = [leaf for leaf in leaves if leaf is not None]
    return torch.autograd.grad(result, given, incoming)


def _score_errors(p: Tensor, kept: Tensor, incoming: Tensor, sums: Tensor) -> Tensor:
    """What the gradient of a logit, p * (incoming - sums), is rounded of, times `_noise`.

    kept: probabilities that multiply `incoming`: with dropout, larger ones.
    """
    return kept * incoming + p * sums


def _slope_errors(z: Tensor, softcap: float | None) -> Tensor | float:
    """What the slope of a softcap makes of errors of gradients of z."""
    # 0.05: slopes may err by twice the 8 eps of tanh beside the 5e-5 that is allowed.
    return 1.0 if softcap is None else 1 - torch.tanh(z / softcap).square() + 0.05


def _stored(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Larger by the step between the smallest numbers of a type, in units of `_noise`."""
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / _noise(dtype)
    return torch.where(p > 0, p + step, 0)


def _noise(dtype: torch.dtype) -> float:
    """Four roundings to the type, and what float32 loses of logits and sums."""
    return 4 * torch.finfo(dtype).eps + 5e-5


def _deviations(
    names: list[str],
    actual: list[Tensor],
    expected: list[Tensor],
    allowed: list[Tensor],
    dtype: torch.dtype,
) -> Deviations:
    limits = torch.finfo(dtype)
    found = {}
    for name, ours, theirs, bound in zip(names, actual, expected, allowed, strict=True):
        error = (ours.float() - theirs).abs()
        # An entry without a visible pair is 0 exactly. Others may be numbers below the normal ones.
        most = _noise(dtype) * bound + (bound > 0) * limits.smallest_normal * limits.eps
        ratio = torch.where(error == 0, 0.0, error / most).nan_to_num(nan=math.inf, posinf=math.inf)
        worst, message = 0.0, ""
        if ratio.numel():
            index = int(ratio.argmax())
            worst, got, wanted = (float(each.flatten()[index]) for each in (ratio, ours, theirs))
            message = f"expected {wanted:.6g}, got {got:.6g}, entry {index}"
        found[name] = Deviation(worst, message)
    return found
