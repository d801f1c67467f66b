"""What sanitize.py runs: calls of the operators that reach every kernel, on small edge shapes.

`cases()` lists them. A case names what chooses a kernel: direction, type, mask, bias, regime. It
calls its operator for each of several sizes, and takes layouts, sinks, scales and types of the
result in turn. Which sizes suit a regime follows from limits.h. `sanitize.py` compares the kernels
that ran with those of the binary, so that a kernel without a case is found.
"""

import ctypes
import functools
import itertools
import re
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from inputs import KERNELS, PLAIN_TOPK, attention_kernels, gpu_like

from megasoftmax.build import extension, library
from megasoftmax.explain import PACK_BYTES, explain
from megasoftmax.limits import kernel_limits
from megasoftmax.reference import attention as of_pairs
from megasoftmax.reference import softmax as of_rows
from megasoftmax.reference.softmax import as_record, plain

OPS = torch.ops.megasoftmax
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DIRECTIONS = ("forward", "backward")
LENGTHS = (0, 1, 7, 8, 9, 33, 257)
BATCHES, HEADS, QUERIES = 2, 2, 3
# For persistent blocks: twice the rows that an H200 has at a time.
MANY_QUERIES = 530
KEPT_BYTES = 36 * 2**20  # a fifth more than the shared memory of an H200

# How a tensor lies in its storage, which ends where the tensor ends: "offset" begins at the second
# element, "padded" has 8 elements between rows, "transposed" has columns in the place of rows,
# "broadcast" has one row with stride 0. What lies between rows is 0: kernels read it, by 16 bytes.
LAYOUTS = ("exact", "offset", "padded", "transposed", "broadcast")


@dataclass(frozen=True)
class Case:
    """A function of this file, and its options."""

    call: Callable[..., None]
    options: tuple[tuple[str, Any], ...]

    @property
    def family(self):
        """The name of the function, in words. The first one is of FAMILIES in sanitize.py."""
        return self.call.__name__.replace("_", " ")

    @property
    def name(self):
        """Such as "columns direction=forward dtype=bf16 inner=3"."""
        return " ".join([self.family, *(f"{key}={value}" for key, value in self.options)])

    @property
    def has_large_clusters(self):
        """Whether it launches clusters of more than 8 blocks, as "cluster_256x16" does.

        Smaller clusters have the same kernels.
        """
        options = dict(self.options)
        if self.family in ("topk forward", "topk capped"):
            return TOPK_REGIMES[options["regime"]][0] == "cluster_16"
        return options.get("regime") in LARGE_CLUSTERS

    def run(self, device, is_brief=False):
        """Calls the operators, with the same numbers each time; if brief, for fewer sizes."""
        self.call(Inputs(device, is_brief), **dict(self.options))


def cases():
    """All of them."""
    passes, beside = {"direction": DIRECTIONS, "dtype": DTYPES}, {"mask": (False, True)}
    beside["bias"] = BIAS_DTYPES
    topk, sums = {"dtype": DTYPES, **beside}, {"dtype": DTYPES, "regime": REGIMES}
    halves, topk_regimes = {"dtype": ("fp16", "bf16")}, range(len(TOPK_REGIMES))
    own_dims = sorted(set(HOPPER_DIMS))
    of_attention = {"dtype": DTYPES, "dim": sorted({*HEAD_DIMS[False], *own_dims})}
    of_attention |= {"bias": ATTENTION_BIASES, "bias_dtype": BIAS_DTYPES}
    of_attention |= {"deterministic": (False, True), "kernels": KERNELS}
    return [
        *product(softmax_tile, **passes, lanes=TILE_LANES),
        *product(softmax_rows, has_kernels, **passes, **beside),
        *product(softmax_regime, is_regime, **passes, **beside, kind=KINDS, regime=REGIMES),
        *product(softmax_capped, is_regime, **passes, kind=KINDS, regime=REGIMES),
        *product(softmax_bias_gradient, is_summed, **sums),
        *product(softmax_dropout, is_regime_with_dropout, **passes, **beside, regime=REGIMES),
        *product(softmax_dropout_bias_gradient, is_summed, **sums, bias=BIAS_DTYPES[1:]),
        *product(columns, **passes, inner=(16, 6, 3)),
        *product(topk_tile, is_topk_tile, dtype=DTYPES, k=TILE_KS, vectors=TILE_VECTORS),
        *product(topk_router, dtype=DTYPES, k=(1, 8, 16), columns=(16, 40, 256, 1024)),
        *product(topk_forward, has_kernels, **topk, regime=topk_regimes),
        *product(topk_capped, dtype=DTYPES, regime=topk_regimes),
        *product(topk_backward, has_kernels, **topk, vectors=TOPK_BACKWARD_VECTORS),
        *product(attention, is_attention, **of_attention),
        *product(attention_in_turns, takes_turns, dtype=DTYPES, dim=own_dims, bias=BIASES_IN_TURNS),
        *product(attention_row_workers, **halves, dim=(64, 128)),
        *product(attention_small, **halves, dim=(32, 64)),
        *product(attention_heads, **halves, has_bias=(False, True)),
        *product(attention_shared_bias, **halves),
        *product(attention_rows, **halves, dim=DIMS_OF_ROWS),
        *product(attention_wide, **halves, has_bias=(False, True)),
    ]


def product(call, keeps=None, **axes):
    """A case for each combination, or for those that `keeps` is true of."""
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        if keeps is None or keeps(**options):
            yield Case(call, tuple(options.items()))


# Tensors


class Inputs:
    """Random tensors and other arguments. Layouts and options change from one call to the next."""

    def __init__(self, device, is_brief):
        self.device, self.is_brief = device, is_brief
        self.generator = torch.Generator().manual_seed(0)
        self.layouts = itertools.cycle(LAYOUTS)
        self.sinks = itertools.cycle((None, "heads", 0.5))
        self.scales = itertools.cycle((1.0, -0.7))
        self.softcaps = itertools.cycle((0.0, 0.0, 0.6))
        self.flags = itertools.cycle((True, True, False))
        self.dropouts = itertools.cycle((0.0, 0.3, 0.0, 0.0, 0.9))
        self.ranged = itertools.cycle(((False, False), (True, True), (True, False), (False, True)))
        self.broadcast = itertools.cycle(((), (-4,), (-4, -3), (-2,)))

    def sizes(self, every, brief=None):
        """Those to call an operator for; the last one is brief enough unless it says otherwise."""
        return every if not self.is_brief else every[-1:] if brief is None else brief

    def many(self, batches, heads):
        """So many that a GPU takes another kernel. A CPU has one path and computes a few."""
        return (batches, heads) if self.device != "cpu" else (2, 3)

    def floats(self, *shape, dtype, layout=None):
        values = torch.randn(shape, generator=self.generator).to(dtype)
        return lay_out(values, layout or next(self.layouts), self.device)

    def states(self, batches, heads, lengths, dims, dtype, layout=None):
        """Query, key, value and a gradient of the output.

        Args:
            heads, lengths: of the query, and of key and value.
            dims: of query and key, and of the value.
        """
        (query_heads, key_heads), (queries, keys), (dim, value_dim) = heads, lengths, dims
        shapes = ((query_heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, value_dim))
        shapes = (*shapes, (query_heads, queries, value_dim))
        element = DTYPES[dtype]
        return [self.floats(batches, *shape, dtype=element, layout=layout) for shape in shapes]

    def bias(self, kind, dtype, shape):
        """Of one of BIAS_DTYPES, which broadcasts to a shape."""
        if kind is None:
            return None
        bias_dtype = DTYPES["fp32" if kind == "fp32" else dtype]
        return self.floats(*self.beside(shape), dtype=bias_dtype)

    def mask(self, *shape):
        """Leaves nothing of the first of several rows."""
        values = torch.rand(shape, generator=self.generator) < 0.3
        if values.shape[-2] > 1:
            values[..., :1, :] = True
        return lay_out(values, next(self.layouts), self.device)

    def ranges(self, *shape, keys):
        """First and end, or one of them, or none; some are empty, some reach beyond the keys."""
        *shape, _ = self.beside((*shape, 1))
        first = torch.randint(-2, keys + 2, shape, generator=self.generator)
        end = first + torch.randint(-2, keys + 2, shape, generator=self.generator)
        kept = zip(next(self.ranged), (first, end), strict=True)
        return [bound.int().to(self.device) if has_bound else None for has_bound, bound in kept]

    def beside(self, shape):
        """The shape of a mask or bias, which broadcasts to a shape."""
        dims = next(self.broadcast)
        return tuple(1 if i in dims else size for i, size in enumerate(shape, -len(shape)))

    def sink(self, heads):
        """As operators take it: as a tensor or as a number."""
        sink = next(self.sinks)
        if sink != "heads":
            return None, sink
        return self.floats(1, heads, dtype=torch.float32, layout="offset")[0], None

    def dropout(self):
        """With the seed, as operators take it."""
        dropout = next(self.dropouts)
        return dropout, torch.tensor([7], device=self.device) if dropout else None


def lay_out(values, layout, device):
    """`values`, which are on the CPU, on the device and in a layout."""
    if layout == "transposed":
        return values.mT.contiguous().to(device).mT
    if layout == "broadcast":
        return values[..., :1, :].contiguous().to(device).expand(values.shape)
    if layout == "exact" or values.numel() == 0:
        return values.contiguous().to(device)
    columns = values.shape[-1]
    start, pitch = (1, columns) if layout == "offset" else (0, columns + 8)
    rows = values.numel() // columns
    storage = torch.zeros(start + (rows - 1) * pitch + columns, dtype=values.dtype)
    strides = [*(pitch * size // columns for size in values.stride()[:-1]), 1]
    storage.as_strided(values.shape, strides, start).copy_(values)
    return storage.to(device).as_strided(values.shape, strides, start)


# Forced regimes


@contextmanager
def forced(function, *rows):
    """Takes rows of the tables in limits.h for the calls inside, where they serve them."""
    path = library.status().path
    if path is None:
        yield
        return
    force = getattr(ctypes.CDLL(str(path)), function)
    force(*rows)
    try:
        yield
    finally:
        force(*[-1] * len(rows))


def table_of(header, name):
    """The cells of a table in a limits.h below csrc, as text."""
    text = (extension.CSRC / header).read_text()
    table = re.search(rf"{name}\[\] = \{{\n(.*?)\n\}};", text, re.DOTALL)
    assert table is not None, name
    return [re.findall(r"\w+", row) for row in re.findall(r"^ *\{(.*)\}", table[1], re.MULTILINE)]


# Softmax over the last dimension

LIMITS = kernel_limits()
BIAS_DTYPES = (None, "fp32", "same")
KINDS = (
    "unmasked",
    "ragged",
    "limited",
    "masked",
    "bias or ragged mask",
    "windowed",
    "contiguous",
    "contiguous ragged",
)
REGIMES = tuple(dict.fromkeys(regime.name for regime in (*LIMITS.forward, *LIMITS.backward)))
LARGE_CLUSTERS = {row.name for row in LIMITS.forward if (row.blocks_per_row or 1) > 8}
LARGE_CLUSTERS |= {row.name for row in LIMITS.backward if (row.blocks_per_row or 1) > 8}
TILE_LANES = (1, 2, 4, 8, 16, 32)  # of a row, see flat.cuh
TILE_ELEMENTS = range(8, 17, 2)  # of a lane
WINDOWS = {"limited": (-1, 0), "windowed": (5, 0)}


def has_kernels(dtype, mask, bias, direction="forward", **_):
    """A bias is float32 or has the type of the scores. The backward pass takes no mask."""
    return not (dtype == "fp32" and bias == "same") and not (direction == "backward" and mask)


def table_for(direction):
    return LIMITS.forward if direction == "forward" else LIMITS.backward


def find_regime(direction, name, kind):
    """The row of the table. None if an earlier one serves such rows by the same launch."""
    launches = [
        replace(regime, name="", max_vectors=None, min_rows=0, serves=())
        if any(kind in LIMITS.kinds[served] for served in regime.serves)
        else None
        for regime in table_for(direction)
    ]
    names = [regime.name for regime in table_for(direction)]
    found = [i for i, launch in enumerate(launches) if launch is not None and names[i] == name]
    return found[0] if found and launches.index(launches[found[0]]) == found[0] else None


def is_regime(direction, dtype, kind, regime, mask=False, bias=None):
    """Whether such rows exist, as in plan.h, and the regime serves them."""
    unmasked = ("unmasked", "ragged", "limited", "contiguous", "contiguous ragged")
    kinds = ("masked", "bias or ragged mask") if mask else unmasked
    kinds = ("bias or ragged mask",) if bias else kinds
    return (
        has_kernels(dtype, mask, bias, direction)
        and (direction == "forward" or bias is None)
        and kind in (*kinds, "windowed")
        and find_regime(direction, regime, kind) is not None
    )


def lengths_for(direction, dtype, kind, index):
    """Edges, and the longest rows: those that fill registers, or have a segment too many."""
    regime, constants = table_for(direction)[index], LIMITS.constants
    pack = PACK_BYTES // DTYPES[dtype].itemsize
    if kind == "windowed":
        long = constants["kLongRow"] * pack
        return [long, long + 1]
    if regime.storage == "reread":
        # More than shared memory has room for, so that a part of each row is read twice.
        vector_bytes = PACK_BYTES * (1 if direction == "forward" else 2)
        vectors = KEPT_BYTES // (BATCHES * HEADS * QUERIES * vector_bytes)
    else:
        vectors = (1 + regime.blocks_per_row) * constants["kWarpTileVectors"] + 1
    if regime.max_vectors is not None and regime.storage == "registers":
        vectors = regime.max_vectors
    elif regime.max_vectors is not None:
        vectors = min(regime.max_vectors, vectors)
    # Long rows that are no multiple of a vector may need a line more, others a vector.
    line = constants["kLineVectors"]
    ragged = [(vectors - more) * pack + 1 for more in (1, line) if more < vectors]
    lengths = {*LENGTHS[1:], *ragged, vectors * pack}
    if kind not in ("limited", "bias or ragged mask"):
        lengths = {length for length in lengths if (length % pack == 0) != kind.endswith("ragged")}
    found = {n: explain(1, n, DTYPES[dtype], backward=direction == "backward") for n in lengths}
    return sorted(n for n in lengths if found[n].vectors <= vectors)


def softmax_tile(given, direction, dtype, lanes):
    """Without a softcap, which has other kernels."""
    for elements, less in itertools.product(TILE_ELEMENTS, (1, 0)):
        columns = lanes * elements - less
        call_softmax(given, direction, dtype, columns, layout="exact", softcap=0.0)


def softmax_rows(given, direction, dtype, mask, bias):
    """The size alone chooses the regime."""
    lengths, counts = given.sizes((*LENGTHS, 2049)), given.sizes((0, QUERIES))
    for columns, queries in itertools.product(lengths, counts):
        call_softmax(given, direction, dtype, columns, mask, bias, queries, has_ranges=True)


def softmax_regime(given, direction, dtype, mask, bias, kind, regime, softcap=None):
    if not mask and bias is None and softcap is None:
        softcap = 0.0
    index = find_regime(direction, regime, kind)
    assert index is not None
    is_persistent = table_for(direction)[index].is_persistent
    is_contiguous = kind.startswith("contiguous")
    layouts = itertools.cycle(
        LAYOUTS[:1] if is_contiguous else LAYOUTS[1:] if kind in ("unmasked", "ragged") else LAYOUTS
    )
    rows = (index, -1) if direction == "forward" else (-1, index)
    with forced("megasoftmax_force_regimes", *rows):
        for columns in given.sizes(lengths_for(direction, dtype, kind, index)):
            queries = MANY_QUERIES if is_persistent and columns < 64 else QUERIES
            window, layout = WINDOWS.get(kind, (-1, -1)), next(layouts)
            has_ranges = not is_contiguous and kind not in ("unmasked", "ragged")
            options = (mask, bias, queries, window, layout, has_ranges)
            beside = {"has_sinks": not is_contiguous, "softcap": softcap}
            call_softmax(given, direction, dtype, columns, *options, **beside)


def softmax_capped(given, direction, dtype, kind, regime):
    """Rows without a mask and a bias, which then have kernels of their own."""
    softmax_regime(given, direction, dtype, False, None, kind, regime, softcap=0.6)


def softmax_bias_gradient(given, dtype, regime):
    sizes, gpu = sizes_for_sums(dtype, regime)
    with gpu:
        for columns, queries in given.sizes(sizes):
            call_softmax(given, "backward", dtype, columns, False, "same", queries)


def is_regime_with_dropout(direction, dtype, mask, bias, regime):
    """With a bias, rows with a mask and without one take the same kernel."""
    return (
        not (dtype == "fp32" and bias == "same")
        and not (mask and bias is not None)
        and find_regime(direction, regime, "dropped") is not None
    )


def softmax_dropout(given, direction, dtype, mask, bias, regime):
    index = find_regime(direction, regime, "dropped")
    assert index is not None
    is_persistent = table_for(direction)[index].is_persistent
    rows = (index, -1) if direction == "forward" else (-1, index)
    masks = itertools.cycle((mask, mask or bias is not None))
    with forced("megasoftmax_force_regimes", *rows):
        for columns in given.sizes(lengths_for(direction, dtype, "dropped", index)):
            queries = MANY_QUERIES if is_persistent and columns < 64 else QUERIES
            for window in ((-1, -1), (-1, 0), (5, 2)):
                call_softmax(
                    *(given, direction, dtype, columns, next(masks), bias, queries, window),
                    has_ranges=True,
                    drops=True,
                    sums_bias=False,
                )


def softmax_dropout_bias_gradient(given, dtype, regime, bias):
    masks = itertools.cycle((False, True))
    sizes, gpu = sizes_for_sums(dtype, regime, drops=True)
    with gpu:
        for columns, queries in given.sizes(sizes):
            options = (next(masks), bias, queries)
            call_softmax(given, "backward", dtype, columns, *options, drops=True)


def is_summed(dtype, regime, bias=None):
    """The bias is read with dropout only."""
    is_twice = dtype == "fp32" and bias == "same"
    return not is_twice and bool(sizes_for_sums(dtype, regime, drops=bias is not None)[0])


def sizes_for_sums(dtype, regime, drops=False):
    """Columns and queries for which the table chooses the regime, and the GPU that is acted then.

    It cannot be forced. The last regimes are chosen on compute capability 7.5 alone.
    """
    found = sizes_of_table(dtype, regime, drops)
    needs_other = not found and torch.cuda.is_available()
    gpu = gpu_like("7.5") if needs_other else nullcontext()
    return found or sizes_of_table(dtype, regime, drops, shared_bytes=65536, max_cluster=1), gpu


@functools.cache
def sizes_of_table(dtype, regime, drops, **gpu):
    """The first three, at the edges of vectors where regimes end."""
    pack = PACK_BYTES // DTYPES[dtype].itemsize
    ends = {row.max_vectors for row in LIMITS.backward if row.max_vectors}
    edges = set()
    for row in LIMITS.backward:
        if row.name == regime:
            queries = max(-(-row.min_rows // (BATCHES * HEADS)), QUERIES)
            for end, more in itertools.product(ends, (1 - pack, 0, 1)):
                if row.max_vectors is None or end <= row.max_vectors:
                    edges.add((end * pack + more, queries))

    def is_chosen(edge):
        return regime_for_sums(dtype, *edge, drops, **gpu) == regime

    return [*itertools.islice(filter(is_chosen, sorted(edges)), 3)]


@functools.cache
def regime_for_sums(dtype, columns, queries, drops, **gpu):
    options = {"bias_gradient": True, "backward": True, "dropout": drops, **gpu}
    return explain(BATCHES * HEADS * queries, columns, DTYPES[dtype], **options).regime.name


def call_softmax(
    given,
    direction,
    dtype,
    columns,
    mask=False,
    bias=None,
    queries=QUERIES,
    window=(-1, -1),
    layout=None,
    has_ranges=False,
    drops=False,
    sums_bias=True,
    has_sinks=True,
    softcap=None,
):
    """Ranges, sinks and softcaps, if it has any, are those that come next: there may be none.

    Args:
        softcap: in place of the next one.
    """
    shape, element = (BATCHES, HEADS, queries, columns), DTYPES[dtype]
    scale, out = next(given.scales), element if next(given.flags) else torch.float32
    has_lse = next(given.flags)
    sink, sink_value = given.sink(HEADS) if has_sinks else (None, None)
    has_sink = sink is not None or sink_value is not None
    bias_tensor = given.bias(bias, dtype, shape)
    excluded = given.mask(*given.beside(shape)) if mask else None
    dropout = (0.3, torch.tensor([7], device=given.device)) if drops else (0.0, None)
    softcap = next(given.softcaps) if softcap is None else softcap
    first, end = given.ranges(*shape[:-1], keys=columns) if has_ranges else (None, None)
    scores = given.floats(*shape, dtype=element, layout=layout)
    options = {"scale": scale, "softcap": softcap, "mask": excluded, "bias": bias_tensor}
    options |= {"first": first, "end": end, "sink": sink, "sink_value": sink_value, "dtype": out}
    options |= {"window_left": window[0], "window_right": window[1], "return_lse": has_lse}
    options |= {"dropout": dropout[0], "seed": dropout[1]}
    forward = plain(of_rows.ForwardArguments, scores=scores, **options)
    if direction == "forward":
        OPS.softmax_forward(*forward)
        return
    lse, lse_gradient = (given.floats(*shape[:-1], dtype=torch.float32) for _ in "lg")
    backward = {
        "gradient": given.floats(*shape, dtype=element, layout=layout),
        "lse_gradient": lse_gradient if has_lse else None,
        "lse": lse,
        "bias_gradient": sums_bias and bias is not None,
        "sink_gradient": has_sink,
    }
    op, record = OPS.softmax_dropout_backward, of_rows.DropoutBackwardArguments
    if not of_rows.keeps_scores(forward):
        op, record = OPS.softmax_backward, of_rows.BackwardArguments
        backward["probabilities"] = scores
    op(*as_record(record, forward, **backward))


# Softmax over an earlier dimension


def columns(given, direction, dtype, inner):
    """`inner` decides how many elements a thread reads at a time where the tensor is aligned."""
    layouts = itertools.cycle(LAYOUTS[:2])  # contiguous ones
    # One block, a cluster, one that reads again.
    for length in given.sizes((*LENGTHS, 2049, 12289), (33, 2049, 12289)):
        shape = (BATCHES, length, inner)
        first, second = (
            given.floats(*shape, dtype=DTYPES[dtype], layout=layout)
            for layout in ("exact", next(layouts))
        )
        scale, has_lse = next(given.scales), next(given.flags)
        out = DTYPES[dtype] if next(given.flags) else torch.float32
        lse = given.floats(BATCHES, inner, dtype=torch.float32) if has_lse else None
        if direction == "forward":
            for scores in (first, second):
                OPS.softmax_columns_forward(scores, scale, out, has_lse)
        else:
            for probabilities in (first, second):
                OPS.softmax_columns_backward(first, probabilities, lse, scale, out)


# Softmax and top-k

TOPK_REGIMES = table_of("topk/limits.h", "kTopkRegimes")
TILE_KS, TILE_VECTORS = (1, 2, 3, 8, 16), (1, 2, 3, 4, 8, 9, 256)
# The longest rows of each regime, and the next ones.
TOPK_BACKWARD_VECTORS = tuple(
    int(row[-1]) + more
    for row in table_of("topk/limits.h", "kTopkBackwardRegimes")
    for more in (0, 1)
    if row[-1].isdigit()
)


def is_topk_tile(dtype, k, vectors):
    return k <= vectors * PACK_BYTES // DTYPES[dtype].itemsize


def topk_tile(given, dtype, k, vectors):
    for rows in given.sizes((1, 257, 7)):
        columns = vectors * PACK_BYTES // DTYPES[dtype].itemsize
        call_topk(given, dtype, (1, rows, columns), k, layout="exact")


def topk_router(given, dtype, k, columns):
    element = DTYPES[dtype]
    for rows in given.sizes((1, 257, 7)):
        for sigmoid, has_bias in ((True, True), (True, False), (False, True)):
            logits = given.floats(rows, columns, dtype=element, layout="exact")
            bias = given.floats(columns, dtype=torch.float32, layout="exact") if has_bias else None
            flags = (next(given.flags), element, False)
            OPS.softmax_topk_forward(
                *(logits, k, next(given.scales), 0.0, None, None, *flags),
                *(*PLAIN_TOPK[:-2], sigmoid, bias),
            )


def topk_forward(given, dtype, mask, bias, regime, softcap=None):
    _, threads, _, vectors, blocks, *_ = TOPK_REGIMES[regime]
    pack = PACK_BYTES // DTYPES[dtype].itemsize
    segment = int(threads) * int(vectors) * pack
    long = segment * (2 * int(blocks) if blocks.isdigit() else 40) + 1
    ks = itertools.cycle((0, 1, 8, min(int(threads), 200)))
    with forced("megasoftmax_force_topk_regime", regime):
        # As many as there are layouts: rows that are not contiguous have a kernel of their own.
        for columns in given.sizes((*LENGTHS[1:], segment, long), (9, segment, 33, 8, long)):
            shape = (BATCHES, QUERIES, columns)
            k = min(next(ks), columns)
            call_topk(given, dtype, shape, k, mask, bias, softcap=softcap)


def topk_capped(given, dtype, regime):
    """Rows that have kernels of their own if their columns lie side by side."""
    topk_forward(given, dtype, False, None, regime, softcap=0.6)


def topk_backward(given, dtype, mask, bias, vectors):
    pack = PACK_BYTES // DTYPES[dtype].itemsize
    ks = itertools.cycle((0, 1, 8, 200))
    for columns in given.sizes((*LENGTHS, vectors * pack - 1, vectors * pack)):
        for layout in ("exact", None):
            shape, k = (BATCHES, QUERIES, columns), min(next(ks), columns)
            call_topk(given, dtype, shape, k, mask, bias, layout, backward=True)


def call_topk(
    given, dtype, shape, k, mask=False, bias=None, layout=None, backward=False, softcap=None
):
    element, scale, renormalize = DTYPES[dtype], next(given.scales), next(given.flags)
    logits = given.floats(*shape, dtype=element, layout=layout)
    excluded = given.mask(*given.beside(shape)) if mask else None
    bias_tensor = given.bias(bias, dtype, shape)
    softcap = next(given.softcaps) if softcap is None else softcap
    options = (scale, softcap, excluded, bias_tensor, renormalize)
    probabilities, indices, statistics = OPS.softmax_topk_forward(
        *(logits, k, *options, element if next(given.flags) else torch.float32, False),
        *PLAIN_TOPK,
    )
    if not backward:
        if bias is None and k > 0 and not given.is_brief:
            rows = given.floats(*shape[:-1], dtype=torch.float32).abs()
            top_k = torch.full(shape[-2:-1], k, dtype=torch.int32, device=given.device)
            limits = (0, top_k, 0.9, rows, 0.0, None)
            seed = torch.tensor([3], device=given.device)
            OPS.softmax_topk_sample(logits, k, 1.0, rows, excluded, *limits, seed)
        return
    gradient = given.floats(*probabilities.shape, dtype=probabilities.dtype)
    lse_gradient = given.floats(*shape[:-1], dtype=torch.float32) if next(given.flags) else None
    OPS.softmax_topk_backward(
        *(gradient, probabilities, indices, lse_gradient, logits, statistics),
        *(*options, False, element, None, False),
    )


# Attention


def dims_of(table, *, is_float=False):
    """Of the rows for 16 bits, or for float32, which tell the bytes of an element."""
    columns = 6 if is_float else 5
    rows = table_of("attention/limits.h", table)
    return tuple(int(row[0]) for row in rows if len(row) == columns or "Hopper" in table)


HOPPER_DIMS = dims_of("kAttentionHopperTiles")
DIMS_OF_ROWS = tuple(dim for dim in HOPPER_DIMS if dim <= LIMITS.attention["kMostHeadDimOfRows"])
# Of values, of tiles for a head dimension.
VALUE_DIMS = {dim: [] for dim in HOPPER_DIMS}
for tile in table_of("attention/limits.h", "kAttentionHopperTiles"):
    VALUE_DIMS[int(tile[0])].append(int(tile[1]))
# Of each width of elements: head dimensions of tiles, and those for which GPUs with small blocks
# have tiles of their own.
HEAD_DIMS, SMALL_DIMS = {}, {}
for is_wide in (False, True):
    forward = dims_of("kAttentionForwardTiles", is_float=is_wide)
    of_both = forward + dims_of("kAttentionBackwardTiles", is_float=is_wide)
    HEAD_DIMS[is_wide] = tuple(dict.fromkeys(forward))
    SMALL_DIMS[is_wide] = tuple(dim for dim in HEAD_DIMS[is_wide] if of_both.count(dim) > 2)
# Queries and keys. Up to 16 queries take kernels of their own; 1030 keys are split.
ATTENTION_SIZES = (
    *((0, 9), (17, 0), (1, 1030), (7, 33), (17, 1), (33, 90), (65, 8), (129, 257)),
    (33, 1030),
)
# In brief. Hopper's kernels have two stages of copies: only a third tile of keys, forward, or of up
# to 128 queries, backward, takes the place of one that was read. The first sizes run without mask
# and dropout, which have kernels of their own. So have up to 64 keys, of the portable ones.
# Small head dimensions run on Hopper where they fill most of its tiles.
FILLING_SIZES = ((380, 376),)
BRIEF_ATTENTION_SIZES = {
    "own": ((300, 257), (300, 300), (70, 33)),
    "portable": ((70, 72), (65, 40), (7, 33), (40, 72)),
    "small": ((7, 33), (65, 40), (70, 33)),
}
# Sizes of the bias: b batches, h heads, m queries, n keys. Each has a gradient of its own kind.
ATTENTION_BIASES = {
    "none": "",
    "dense": "bhmn",
    "shared": "1hmn",
    "keys": "bh1n",
    "queries": "1hm1",
    "one": "1111",
    "relative": "table",
}
TILE_BIASES = ("dense", "shared")  # those that tensor copies take
BIASES_IN_TURNS = ("none", *TILE_BIASES, "relative")
MASKINGS = ("none", "causal", "window", "mask", "mask of keys", "ranges", "blocks")


def is_attention(dtype, dim, bias, bias_dtype, kernels, **_):
    """Hopper's own kernels take few head dimensions and kinds of bias; the others run there too."""
    is_wide = dtype == "fp32"
    is_tile = bias in TILE_BIASES and bias_dtype != "fp32"
    are_there = {
        "own": (bias in ("none", "relative") or is_tile) and dim in HOPPER_DIMS and not is_wide,
        "portable": dim in HEAD_DIMS[is_wide],
        "small": dim in SMALL_DIMS[is_wide],
    }
    has_one_dtype = not is_wide or bias_dtype in (None, "fp32")
    return (bias == "none") == (bias_dtype is None) and has_one_dtype and are_there[kernels]


def attention(given, kernels, **options):
    """Forward and backward."""
    sizes = given.sizes(ATTENTION_SIZES, BRIEF_ATTENTION_SIZES[kernels])
    if kernels == "own":  # they take no broadcast dimensions, and a bias whose rows are aligned
        is_small = options["dim"] <= LIMITS.attention["kSmallHeadDim"]
        sizes = (*sizes, *FILLING_SIZES) if is_small else sizes
        given.layouts = itertools.cycle(each for each in LAYOUTS if each != "broadcast")
        if options["bias"] in TILE_BIASES:
            given.layouts = itertools.cycle(("exact", "padded"))
            sizes = [(queries, -(-keys // 8) * 8) for queries, keys in sizes]
    with attention_kernels(kernels):
        call_attention(given, sizes, **options)


def call_attention(given, sizes, dtype, dim, bias, bias_dtype, deterministic):
    element = DTYPES[dtype]
    maskings, key_heads = itertools.cycle(MASKINGS), itertools.cycle((HEADS, 1))
    # Of two cases, each size takes either kernels of float32.
    allows_tf32 = itertools.cycle((deterministic, not deterministic))
    dims = itertools.cycle((dim, dim - 8, dim - 5))  # the last one is filled up
    most_of_values = itertools.cycle(VALUE_DIMS.get(dim, (dim,)))
    for queries, keys in sizes:
        masking, of_keys, head_dim = next(maskings), next(key_heads), next(dims)
        value_dim = min(next(dims), next(most_of_values))
        query, key, value, output_gradient = given.states(
            BATCHES, (HEADS, of_keys), (queries, keys), (head_dim, value_dim), dtype
        )
        mask = table = None
        if masking == "mask":
            mask = given.mask(BATCHES, HEADS, queries, keys)
        elif masking == "mask of keys":
            mask = given.mask(BATCHES, 1, 1, keys)
        elif masking == "blocks":
            mask = given.mask(1, HEADS, -(-queries // 64), -(-keys // 64))
        block = 64 if masking == "blocks" else 1
        has_note = mask is not None and queries > 16 and next(given.flags)
        note = OPS.tile_note(mask, block, queries, keys) if has_note else None
        first = end = None
        if masking in ("ranges", "window") and note is None:
            first, end = given.ranges(BATCHES, HEADS, queries, keys=keys)
        if bias != "none":
            sizes = {"b": BATCHES, "h": HEADS, "m": queries, "n": keys, "1": 1}
            shape = [sizes[letter] for letter in ATTENTION_BIASES[bias] if bias != "relative"]
            table = given.floats(
                *(shape or (1, HEADS, max(queries + keys - 1, 0))),
                dtype=torch.float32 if bias_dtype == "fp32" else element,
            )
        sink, sink_value = given.sink(HEADS)
        left, right = {"causal": (-1, 0), "window": (5, 2)}.get(masking, (-1, -1))
        if masking == "blocks" and queries <= 16:  # kernels of few queries know of no blocks
            mask, block = None, 1
        dropout, seed = given.dropout()
        lse_gradient = given.floats(BATCHES, HEADS, queries, dtype=torch.float32, layout="offset")
        options = {"bias": table, "relative": bias == "relative", "mask": mask, "note": note}
        options |= {"softcap": next(given.softcaps), "window_left": left, "window_right": right}
        options |= {"sink": sink, "sink_value": sink_value, "first": first, "end": end}
        options |= {"block": block, "dropout": dropout, "seed": seed, "tf32": next(allows_tf32)}
        d_lse = lse_gradient if next(given.flags) else None
        attend(query, key, value, output_gradient, d_lse, deterministic=deterministic, **options)


def attend(
    query, key, value, d_output=None, d_lse=None, sums_bias=True, deterministic=False, **options
):
    """Forward, merged with itself, and, if there is a gradient of the output, backward."""
    tensors = {"query": query, "key": key, "value": value, "scale": 0.3}
    forward = plain(of_pairs.ForwardArguments, **tensors, **options)
    output, statistics = OPS.attention_forward(*forward)
    for dtype in (output.dtype, torch.float32):
        merged = output.to(dtype, copy=True), statistics.clone()
        OPS.attention_merge(*merged, output, statistics)
    if d_output is not None:
        backward = {"d_output": d_output, "d_lse": d_lse, "output": output}
        backward |= {"statistics": statistics, "deterministic": deterministic}
        backward["bias_gradient"] = sums_bias and forward.bias is not None
        backward["sink_gradient"] = forward.sink is not None
        OPS.attention_backward(*as_record(of_pairs.BackwardArguments, forward, **backward))


def takes_turns(dtype, dim, bias):
    """float32, and a bias above a head dimension of 128, have portable kernels alone."""
    return (dtype != "fp32" or dim in HEAD_DIMS[True]) and (dim <= 128 or bias == "none")


def attention_in_turns(given, dtype, dim, bias):
    """So many heads that blocks of keys take turns in deterministic mode.

    With 70 queries most of Hopper's kernels have a sum for each tile of keys instead.
    """
    batches, heads = given.many(150, 2)
    sizes = given.sizes(((70, 200), (140, 264)), ((140, 264),))
    sizes = (*sizes, *FILLING_SIZES) if dim == LIMITS.attention["kSmallHeadDim"] else sizes
    # Heads that share keys have another order of turns.
    shared = {heads, 1} if bias == "none" else {heads}
    for (queries, keys), key_heads in itertools.product(sizes, shared):
        query, key, value, output_gradient = given.states(
            batches, (heads, key_heads), (queries, keys), (dim, dim), dtype, "exact"
        )
        shapes = {"shared": (1, heads, queries, keys), "relative": (1, heads, queries + keys - 1)}
        shapes["dense"] = (batches, heads, queries, keys)
        table = None
        if bias != "none":
            table = given.floats(*shapes[bias], dtype=DTYPES[dtype], layout="exact")
        masks = (None, given.mask(batches, 1, queries, keys), given.mask(batches, 1, 1, keys))
        seed = torch.tensor([7], device=given.device)
        ways = [*({"mask": mask} for mask in masks), {"dropout": 0.3, "seed": seed}]
        ways += [{"window_left": -1, "window_right": 0}]
        for way, allows_tf32 in itertools.product(ways, {False, dtype == "fp32"}):
            # Beside a softcap a bias would have portable kernels.
            softcap = next(given.softcaps) if table is None else 0.0
            options = {"softcap": softcap, "tf32": allows_tf32} | way
            options |= {"bias": table, "relative": bias == "relative", "deterministic": True}
            attend(query, key, value, output_gradient, **options)


def attention_row_workers(given, dtype, dim):
    """So many heads, and keys for them, that Hopper's backward has row workers."""
    batches, heads = given.many(140, 2)
    for queries, way in itertools.product((33, 70), ({}, {"window_left": 700, "window_right": -1})):
        query, key, value, output_gradient = given.states(
            batches, (heads, heads), (queries, 777), (dim, dim), dtype, "exact"
        )
        mask = given.mask(batches, 1, 1, 777)
        for masked in (None, mask):
            attend(query, key, value, output_gradient, mask=masked, deterministic=False, **way)


def attention_small(given, dtype, dim):
    """So many heads of few queries and keys that a block takes several which share a bias."""
    batches, heads = given.many(16, 100)
    sizes = ((17, 1), (64, 64), (36, 60), (49, 49))
    if dim == 32:  # more than 64 keys
        sizes = (*sizes, (100, 70), (144, 144), (20, 130))
    for queries, keys in given.sizes(sizes, sizes[3:]):
        masks = (None, given.mask(batches, 1, queries, keys), given.mask(batches, 1, 1, keys))
        for mask, bias_dtype in itertools.product(masks, (None, dtype, "fp32")):
            query, key, value, output_gradient = given.states(
                batches, (heads, heads), (queries, keys), (dim, dim - 8), dtype, "exact"
            )
            table = None
            if bias_dtype is not None:
                table = given.floats(1, heads, queries, keys, dtype=DTYPES[bias_dtype])
            sink, sink_value = given.sink(heads)
            options = {"bias": table, "mask": mask, "sink": sink, "sink_value": sink_value}
            if mask is None and bias_dtype == "fp32":
                options |= {"window_left": 5, "window_right": 2}
            d_lse = given.floats(batches, heads, queries, dtype=torch.float32, layout="exact")
            d_lse = d_lse if next(given.flags) else None
            sums_bias = next(given.flags)
            attend(query, key, value, output_gradient, d_lse, sums_bias=sums_bias, **options)


def attention_heads(given, dtype, has_bias):
    """So many heads that a block of Hopper's backward takes several, in one or more units."""
    batches, heads = given.many(132, 2)
    sizes = ((64, 200), (60, 300), (190, 130), (120, 500), (63, 769))
    dims = itertools.cycle((32, 24, 8))
    for queries, keys in given.sizes(sizes, sizes[1:3]):
        dim = next(dims)
        query, key, value, output_gradient = given.states(
            batches, (heads, heads), (queries, keys), (dim, 32), dtype, "exact"
        )
        for mask in (None, given.mask(batches, 1, 1, keys), given.mask(batches, heads, 1, keys)):
            bias = None
            if has_bias:
                bias = given.floats(1, heads, queries, keys, dtype=DTYPES[dtype], layout="exact")
            d_lse = given.floats(batches, heads, queries, dtype=torch.float32, layout="exact")
            d_lse = d_lse if next(given.flags) else None
            attend(query, key, value, output_gradient, d_lse, bias=bias, mask=mask)


def attention_shared_bias(given, dtype):
    """Rows enough that a block of Hopper's forward keeps their bias.

    Logits far from the bias make it compute rows step by step.
    """
    batches, heads = given.many(16, 33)
    sizes = ((120, 250), (100, 384), (250, 501), (120, 639), (125, 199), (100, 769), (90, 1024))
    for queries, keys in given.sizes(sizes, sizes[2:4]):
        query, key, value, output_gradient = given.states(
            batches, (heads, heads), (queries, keys), (32, 24), dtype, "exact"
        )
        bias = given.floats(1, heads, queries, keys, dtype=DTYPES[dtype], layout="exact")
        query[::3] *= 50
        for mask in (None, given.mask(batches, 1, 1, keys), given.mask(batches, heads, 1, keys)):
            attend(query, key, value, output_gradient, None, bias=bias, mask=mask)


def attention_rows(given, dtype, dim):
    """A dense bias whose rows begin anywhere, on Hopper; its storage ends with the last one. Where
    that ends within 16 bytes, its rows are copied."""
    sizes = ((374, 371), (130, 250), (66, 125), (380, 383))
    layouts = itertools.cycle(("exact", "offset"))
    for queries, keys in given.sizes(sizes):
        query, key, value, output_gradient = given.states(
            BATCHES, (HEADS, HEADS), (queries, keys), (dim, dim), dtype, "exact"
        )
        shape = (BATCHES, HEADS, queries, keys)
        outer = given.floats(queries, BATCHES, HEADS, keys, dtype=DTYPES[dtype], layout="exact")
        own = given.floats(*shape, dtype=DTYPES[dtype], layout=next(layouts))
        masks = (None, given.mask(BATCHES, 1, 1, keys), given.mask(*shape))
        for mask, bias in itertools.product(masks, (own, outer.permute(1, 2, 0, 3))):
            window = {} if mask is not None else {"window_right": 0}
            for options in ({"mask": mask}, window):
                attend(query, key, value, output_gradient, bias=bias, **options)


def attention_wide(given, dtype, has_bias):
    """Head dimensions beyond kMaxHeadDim, forward; values are the first columns of keys, or not."""
    wide = tuple(LIMITS.attention[f"kMaxWide{each}Dim"] for each in ("Head", "Value"))
    maskings = itertools.cycle(("none", "mask", "blocks", "causal", "ranges"))
    sizes = ((1, 1030), (1, 9), (33, 40), (7, 65), (0, 3), (2, 0))
    for (queries, keys), (head_dim, value_dim) in zip(
        given.sizes(sizes, sizes[1:3]), itertools.cycle((wide, (264, 40), (24, 300)))
    ):
        masking, of_query = next(maskings), (4 * HEADS, queries, head_dim)
        query, key, value = (
            given.floats(BATCHES, *shape, dtype=DTYPES[dtype])
            for shape in (of_query, (HEADS, keys, head_dim), (HEADS, keys, value_dim))
        )
        if value_dim < head_dim and next(given.flags):
            value = key[..., :value_dim]
        block = 64 if masking == "blocks" else 1
        mask = None
        if masking in ("mask", "blocks"):
            mask = given.mask(BATCHES, 4 * HEADS, -(-queries // block), -(-keys // block))
        first = end = None
        if masking == "ranges":
            first, end = given.ranges(BATCHES, 4 * HEADS, queries, keys=keys)
        bias = None
        if has_bias:
            bias = given.floats(1, 4 * HEADS, queries, keys, dtype=DTYPES[dtype])
        right = 0 if masking == "causal" else -1
        sink, sink_value = given.sink(4 * HEADS)
        options = {"softcap": next(given.softcaps), "sink": sink, "sink_value": sink_value}
        options |= {"bias": bias, "mask": mask, "window_right": right, "block": block}
        attend(query, key, value, **options, first=first, end=end)
