"""softmax_topk of a vocabulary that is sharded over processes, against the unsharded call."""

import op_checks
import oracle
import processes
import pytest
import torch
import torch.distributed
from torch import Tensor

import megasoftmax

ROWS, COLUMNS, K = (2, 3), 37, 6
INF, NAN = torch.inf, torch.nan

# How the ranks share the columns, by number of ranks. One shard is shorter than K; one is empty.
SIZES = {2: [(23, 14), (3, 34)], 3: [(20, 4, 13), (0, 30, 7)]}


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask(odds=0.4):
    """With a row of which little is left, and one of which nothing is."""
    excluded = torch.rand(*ROWS, COLUMNS, generator=torch.Generator().manual_seed(1)) < odds
    excluded[0, 1, 2:] = True
    excluded[0, 1, 0] = False
    excluded[1, 1] = True
    return excluded


def with_poison():
    logits = normal(*ROWS, COLUMNS)
    logits[0, 0, 30], logits[0, 2, [2, 25]], logits[1, 1] = NAN, INF, -INF
    return logits


def neighbours():
    """Distinct numbers of which several have the same product with 1.1."""
    return 2 - torch.arange(1, 6 * COLUMNS + 1).float().view(*ROWS, COLUMNS).flip(-1) * 2.0**-23


CASES = {
    "plain": dict,
    "scaled": lambda: {"scale": 0.7},
    "negative scale": lambda: {"scale": -0.7, "logits": normal(*ROWS, COLUMNS).round()},
    "scale of 0": lambda: {"scale": 0.0},
    "ties": lambda: {"logits": normal(*ROWS, COLUMNS).round()},
    "constant": lambda: {"logits": torch.ones(*ROWS, COLUMNS)},
    "neighbours": lambda: {"logits": neighbours(), "scale": 1.1},
    "offset": lambda: {"logits": normal(*ROWS, COLUMNS) + 1e5, "scale": 0.7},
    "mask": lambda: {"mask": mask()},
    "mask of nearly all": lambda: {"mask": mask(0.95), "scale": -1.0},
    "mask by column": lambda: {"mask": mask()[0, 0], "renormalize": True},
    "bias": lambda: {"bias": normal(*ROWS, COLUMNS, seed=2), "mask": mask(), "scale": 0.7},
    "bias by row": lambda: {"bias": normal(ROWS[-1], 1, seed=2)},
    "bias by column": lambda: {"bias": normal(COLUMNS, seed=2), "renormalize": True},
    "renormalised": lambda: {"renormalize": True},
    "poison": lambda: {"logits": with_poison()},
    "poison, mask": lambda: {"logits": with_poison(), "mask": mask(0.9)},
    "poison, renormalised": lambda: {"logits": with_poison(), "renormalize": True},
    "float16": lambda: {"logits": normal(*ROWS, COLUMNS).half()},
    "bfloat16 to float32": lambda: {
        "logits": normal(*ROWS, COLUMNS).bfloat16(),
        "dtype": torch.float32,
    },
    "float64": lambda: {"logits": normal(*ROWS, COLUMNS).double(), "scale": -0.7, "mask": mask()},
    "softcap": lambda: {"softcap": 1.5, "scale": -0.7},
    "softcap beside a bias": lambda: {"softcap": 1.5, "bias": normal(COLUMNS, seed=2)},
    "k 0": lambda: {"k": 0},
    "k 1": lambda: {"k": 1},
    "all": lambda: {"k": COLUMNS, "logits": normal(*ROWS, COLUMNS).round()},
    "one row": lambda: {"logits": normal(COLUMNS)},
    "no rows": lambda: {"logits": normal(0, COLUMNS)},
    "strided": lambda: {"logits": normal(COLUMNS, 5).T},
    "through the ops": lambda: {"fused": True, "mask": mask(), "scale": 0.7},
    "through the ops, bias": lambda: {"fused": True, "bias": normal(COLUMNS, seed=2).double()},
}


def arguments_of(name):
    return {"logits": normal(*ROWS, COLUMNS), "k": K, "return_lse": True} | CASES[name]()


def part_of(tensor, begin, end):
    return tensor if tensor.shape[-1] == 1 else tensor[..., begin:end]


def run(device, begin, end, group, given):
    """The call on columns begin to end, and the gradients of what of logits and bias is there."""
    given = {
        name: part_of(value, begin, end).to(device) if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    inputs = [given["logits"].requires_grad_()]
    if "bias" in given:
        inputs.append(given["bias"].requires_grad_())
    p, indices, lse = megasoftmax.softmax_topk(**given, group=group)
    g, h = normal(*p.shape, seed=3).to(p), normal(*lse.shape, seed=4).to(lse)
    gradients = torch.autograd.grad((p, lse), inputs, (g, h))
    names = ["p", "indices", "lse", "logits", "bias"]
    tensors = [p, indices, lse, *gradients]
    return {name: tensor.detach().cpu() for name, tensor in zip(names, tensors, strict=False)}


def worker(rank, world, device, folder):
    """What every case makes of this rank's shard."""
    group = torch.distributed.group.WORLD
    found = {}
    for sizes in SIZES[world]:
        begin = sum(sizes[:rank])
        for name in CASES:
            given = arguments_of(name)
            if device != "cpu" or sizes[rank] == 0:  # kernels take no shard without columns
                given.pop("fused", None)
            found[sizes, name] = run(device, begin, begin + sizes[rank], group, given)
    found["messages"] = messages(device, group)
    too_much = megasoftmax.softmax_topk(torch.ones(2, 2, device=device), 9, group=group)
    found["too much"] = [each.cpu() for each in too_much]
    return found


def messages(device, group):
    """What is said where a call with a group is refused."""
    logits = normal(2, 5).to(device).requires_grad_()
    said = []
    p, _ = megasoftmax.softmax_topk(logits, 3, group=group)
    (first,) = torch.autograd.grad(p.square().sum(), logits, create_graph=True)
    for refused in (
        lambda: torch.autograd.grad(first.sum() + logits.sum(), logits),
        lambda: megasoftmax.softmax_topk(logits, -1, group=group),
    ):
        with pytest.raises((NotImplementedError, ValueError)) as error:
            refused()
        said.append(str(error.value))
    return said


def check(ranks, sizes, name):
    found = [rank[sizes, name] for rank in ranks]
    for output in ("p", "indices", "lse"):
        for other in found[1:]:  # NaN has bits, too
            assert other[output].dtype == found[0][output].dtype
            assert other[output].numpy().tobytes() == found[0][output].numpy().tobytes()
    given = arguments_of(name) | {"fused": False}
    wanted = run("cpu", 0, COLUMNS, None, given)
    assert torch.equal(found[0]["indices"], wanted["indices"])
    computed = wanted["lse"].dtype
    tolerance = oracle.coarser(computed, given["logits"].dtype)
    for output in ("p", "lse"):
        oracle.assert_matches(found[0][output], wanted[output].double(), tolerance, what=output)
    gradients = [rank["logits"] for rank in found]
    assert [gradient.shape[-1] for gradient in gradients] == list(sizes)
    oracle.assert_matches(
        torch.cat(gradients, -1),
        wanted["logits"].double(),
        tolerance,
        magnitude=wanted["logits"].double().abs() + 0.1,
        what="gradient of the logits",
    )
    if "bias" in wanted:
        parts = [rank["bias"] for rank in found]
        shared = wanted["bias"].shape[-1] == 1
        oracle.assert_matches(
            sum(parts) if shared else torch.cat(parts, -1),
            wanted["bias"].double(),
            tolerance,
            magnitude=wanted["bias"].double().abs() + 1,
            what="gradient of the bias",
        )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return processes.spawned_once(worker, tmp_path_factory)


@pytest.mark.parametrize(
    ("world", "sizes"), [(world, sizes) for world, each in SIZES.items() for sizes in each]
)
@pytest.mark.parametrize("name", CASES)
def test_shards_agree_with_the_whole(ranks, world, sizes, name):
    check(ranks(world), sizes, name)


@pytest.mark.parametrize("world", SIZES)
def test_what_k_exceeds_the_vocabulary_by(ranks, world):
    for rank in ranks(world):
        p, indices = rank["too much"]
        columns = 2 * world
        assert indices.tolist() == [[*range(columns), *[columns] * (9 - columns)]] * 2
        torch.testing.assert_close(p[:, :columns], torch.full((2, columns), 1 / columns))
        assert (p[:, columns:] == 0).all()


def test_messages(ranks):
    for rank in ranks(2):
        twice, negative = rank["messages"]
        assert twice == "group: expected None for a second derivative, got a group"
        assert negative.startswith("k: expected an integer from 0")
        assert negative.endswith("got -1")


def test_compiled(group_of_one):
    def function(logits):
        options = {"scale": 0.7, "return_lse": True, "group": group_of_one}
        return megasoftmax.softmax_topk(logits, K, **options)

    logits = normal(*ROWS, COLUMNS).requires_grad_()
    op_checks.check_compiled(function, op_checks.gradients_of, [logits], dynamic=False)


def test_forward_mode_is_refused(group_of_one):
    def function(logits):
        return megasoftmax.softmax_topk(logits, K, group=group_of_one)[0]

    logits = normal(*ROWS, COLUMNS)
    with pytest.raises(NotImplementedError, match=r"^group: expected None for a forward-mode"):
        torch.func.jvp(function, (logits,), (logits,))


def test_reasons(group_of_one):
    def reasons(k, columns=200, **arguments):
        found = megasoftmax.why_not_fused(
            megasoftmax.softmax_topk, normal(2, columns), k, **arguments, group=group_of_one
        )
        return [reason.constraint for reason in found if reason.constraint != "compiled part"]

    assert reasons(K) == ["device"]
    assert reasons(K, columns=K - 1) == ["device"]  # of a shard shorter than K all are candidates
    assert reasons(K, scale=0.0) == ["device", "scale"]
    assert reasons(300) == ["device", "k"]  # in the backward pass, no shard has fewer
    assert reasons(K, columns=0) == ["device"]


def test_neighbours_have_equal_products():
    """Or else the case of that name would not test what it is for."""
    logits = neighbours()
    assert all(row.unique().numel() == COLUMNS for row in logits.flatten(0, 1))
    assert (logits * 1.1)[0, 0].unique().numel() < COLUMNS


def test_group_is_a_group():
    with pytest.raises(TypeError, match=r"^group: expected a process group, got str"):
        megasoftmax.softmax_topk(normal(2, 5), 3, group="tensor parallel")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="torch has no NCCL")
def test_shards_on_two_gpus(tmp_path):
    found = processes.spawn(worker, 2, "cuda", tmp_path)
    for sizes in SIZES[2]:
        for name in CASES:
            check(found, sizes, name)
