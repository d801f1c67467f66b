"""Attention layers of Boltz, OpenFold-3 and Protenix: the same with megasoftmax."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from inputs import coin, normal, record_calls
from pair_layers import (
    DIM,
    HEADS,
    KINDS,
    WIDTH,
    assert_same,
    pair_bias,
    randomised,
    real,
    results,
    triangle,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import megasoftmax
from megasoftmax.integrations import cuequivariance, evoformer
from megasoftmax.integrations.folding import patch_model

TOKENS = 20  # Protenix leaves up to 16 to its own code
PACKAGES = ["boltz", "openfold3", "protenix"]
kinds = pytest.mark.parametrize("kind", KINDS)
packages = pytest.mark.parametrize("package", PACKAGES)


@pytest.fixture(autouse=True)
def _protenix_in_torch(monkeypatch):
    """Its own layer norm compiles for a GPU."""
    monkeypatch.setenv("LAYERNORM_TYPE", "torch")


def pairs(*batch: int) -> tuple[Tensor, Tensor]:
    """A pair representation, and a mask that leaves each row a key."""
    x = normal(*batch, TOKENS, TOKENS, WIDTH, device="cpu")
    keep = coin(*batch, TOKENS, TOKENS, device="cpu", odds=0.7).float()
    keep[..., 0] = keep[..., 0, :] = 1
    return x, keep


def check_patched(layer, call, *inputs):
    """Patched, the layer gives what it gave before."""
    wanted = results(layer, call, *inputs)
    with patch_model(layer):
        assert_same(results(layer, call, *inputs), wanted)


# install() of the two functions that they call.

IN_TORCH = {"triangle_attention": "torch"}


@kinds
@pytest.mark.parametrize("starting", [True, False])
@pytest.mark.parametrize(
    ("package", "without", "functions", "flags", "tolerance"),
    [
        ("boltz", {}, cuequivariance, {"use_kernels": True}, 2e-5),
        ("protenix", IN_TORCH, cuequivariance, {"triangle_attention": "cuequivariance"}, 2e-5),
        # Protenix casts to bfloat16 for it, the stand-in does not.
        ("protenix", IN_TORCH, evoformer, {"triangle_attention": "deepspeed"}, 5e-2),
    ],
)
def test_install_changes_nothing(package, kind, starting, without, functions, flags, tolerance):
    layer = triangle(package, kind, starting)
    x, keep = pairs(1) if package == "boltz" else pairs()
    wanted = results(layer, lambda x: layer(x, mask=keep, **without), x)
    with functions.install():
        found = results(layer, lambda x: layer(x, mask=keep, **flags), x)
    assert_same(found, wanted, tolerance)


_IN_OPENFOLD = """
import warnings
warnings.simplefilter("ignore")
import torch
from megasoftmax.integrations import cuequivariance, installing
installing._is_installed = lambda name: False  # cuEquivariance itself needs CUDA
cuequivariance.install()
torch.cuda.is_available = lambda: True  # else OpenFold-3 does not look for it
from openfold3.core.model.layers import triangular_attention
from openfold3.core.model.primitives import attention
torch.cuda.is_available = lambda: False
import pair_layers, test_folding
assert attention.triangle_attention is cuequivariance.triangle_attention
layer = pair_layers.triangle("openfold3", "real")
for batch in (), (1,), (2,), (1, 2):
    x, keep = test_folding.pairs(*batch)
    results = [
        pair_layers.results(
            layer, lambda x: layer(x, mask=keep, use_cueq_triangle_kernels=kernels), x
        )
        for kernels in (True, False)
    ]
    pair_layers.assert_same(*results)
with torch.no_grad():
    x, keep = test_folding.pairs(2)
    found = layer(x, mask=keep, use_cueq_triangle_kernels=True, chunk_size=3)
torch.testing.assert_close(found, layer(x, mask=keep), rtol=2e-5, atol=2e-5)
print("the same")
"""


def test_install_in_openfold():
    """It imports the function when it is imported itself, in which it looks for CUDA."""
    real("openfold3.core.model.layers.triangular_attention")
    result = subprocess.run(
        [sys.executable, "-c", _IN_OPENFOLD],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout == "the same\n", result.stderr


def test_deepspeed_in_openfold():
    """OpenFold-3 imports it at the top, and casts to bfloat16 for it."""
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    layer = triangle("openfold3", "real")
    x, keep = pairs(1)
    wanted = results(layer, lambda x: layer(x, mask=keep), x)
    with evoformer.install() as installed:
        assert any(name.startswith("openfold3.") for name in installed.report)
        found = results(layer, lambda x: layer(x, mask=keep, use_deepspeed_evo_attention=True), x)
    assert_same(found, wanted, 5e-2)


# patch_model


@kinds
@packages
@pytest.mark.parametrize("batch", [(), (1,), (2,)])
@pytest.mark.parametrize("starting", [True, False])
def test_patched_triangle_attention(package, kind, batch, starting):
    layer = triangle(package, kind, starting)
    x, keep = pairs(*batch)

    def call(x: Tensor) -> Tensor:
        return layer(x, mask=keep)

    wanted = results(layer, call, x)
    with patch_model(layer) as patched:
        assert [str(each) for each in patched.report] == ["mha"]
        assert patched.report["mha"].runs in ("SDPA", "attention")
        assert_same(results(layer, call, x), wanted)
    assert patched.report["mha"].runs == "unchanged"
    assert_same(results(layer, call, x), wanted, tolerance=0)


@kinds
@packages
def test_flags_make_no_difference(package, kind):
    """Those by which the layers choose an implementation."""
    flags = {
        "boltz": [{"use_kernels": True}],
        "openfold3": [{"use_high_precision": True}],
        "protenix": [{"triangle_attention": "deepspeed"}, {"triangle_attention": "cuequivariance"}],
    }[package]
    if package == "openfold3" and kind == "real":
        flags = [{"use_deepspeed_evo_attention": True}, {"use_cueq_triangle_kernels": True}]
        flags += [{"use_triton_triangle_kernels": True}, {"use_lma": True}]
    layer = triangle(package, kind)
    x, keep = pairs()
    with patch_model(layer):
        wanted = results(layer, lambda x: layer(x, mask=keep), x)
        for each in flags:
            found = results(layer, lambda x, each=each: layer(x, mask=keep, **each), x)
            assert_same(found, wanted)


@packages
def test_in_chunks(package):
    """The packages cut the rows into pieces for inference."""
    layer = triangle(package, "real")
    x, keep = pairs(1)
    with torch.no_grad():
        wanted = layer(x, mask=keep)
        with patch_model(layer):
            found = layer(x, mask=keep, chunk_size=3)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)


@kinds
@pytest.mark.parametrize("multiplicity", [1, 3])
@pytest.mark.parametrize("keys", [TOKENS, TOKENS + 4])
def test_patched_pair_bias(kind, multiplicity, keys):
    layer = pair_bias(kind)
    samples = 2 * multiplicity
    s = normal(samples, TOKENS, HEADS * DIM, device="cpu", seed=1)
    k_in = normal(samples, keys, HEADS * DIM, device="cpu", seed=2)
    z = normal(2, TOKENS, keys, WIDTH, device="cpu", seed=3)
    for mask in (coin(samples, keys, device="cpu", odds=0.7), torch.ones(1, keys)):
        mask[:, 0] = 1

        def call(s: Tensor, z: Tensor, k_in: Tensor, mask: Tensor = mask) -> Tensor:
            return layer(s, z, mask, k_in, multiplicity)

        check_patched(layer, call, s, z, k_in)


def test_boltz_pairformer():
    """A layer of its trunk, with padding: results of tokens that count, and all gradients."""
    module = real("boltz.model.layers.pairformer")
    layer = module.PairformerLayer(HEADS * DIM, WIDTH, HEADS, 0.0, DIM, HEADS, v2=True)
    with torch.no_grad():
        for weight in randomised(layer).parameters():
            weight.mul_(0.3)
    s = normal(1, TOKENS, HEADS * DIM, device="cpu")
    z = normal(1, TOKENS, TOKENS, WIDTH, device="cpu", seed=2)
    mask = (torch.arange(TOKENS) < TOKENS - 5).float()[None]
    of_pairs = mask[:, :, None] * mask[:, None]

    def call(s: Tensor, z: Tensor) -> Tensor:
        s, z = layer(s, z, mask, of_pairs)
        return torch.cat([(s * mask[..., None]).flatten(), (z * of_pairs[..., None]).flatten()])

    wanted = results(layer, call, s, z)
    with patch_model(layer) as patched:
        assert len(patched.report) == 3
        assert_same(results(layer, call, s, z), wanted)


@kinds
def test_upcast(kind, monkeypatch):
    """Boltz computes this in float32 whatever its projections have; here too, unless told."""
    layer = pair_bias(kind)
    s = 0.3 * normal(2, TOKENS, HEADS * DIM, device="cpu")
    z = 0.3 * normal(2, TOKENS, TOKENS, WIDTH, device="cpu", seed=3)
    mask = torch.ones(2, TOKENS)
    wanted = layer(s, z, mask, s)
    calls = record_calls(monkeypatch, "attention")
    with torch.autocast("cpu", torch.bfloat16):
        for upcast in (True, False):
            with patch_model(layer, upcast=upcast):
                found = layer(s, z.bfloat16(), mask, s)
            assert found.dtype == layer(s, z, mask, s).dtype == torch.bfloat16
            torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=3e-2)
    types = [query.dtype for (query, *_), _ in calls]
    assert types == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name", ["AttentionPairBias", "DiffusionAttentionPairBias"])
@pytest.mark.parametrize("samples", [1, 3])
def test_openfold_pair_bias(name, samples):
    """Samples share a bias of pairs, [batch, 1, heads, tokens, tokens]."""
    module = real("openfold3.core.model.layers.attention_pair_bias")
    layer = randomised(
        getattr(module, name)(
            *(WIDTH, WIDTH, WIDTH), c_s=WIDTH, c_z=WIDTH, c_hidden=DIM, no_heads=HEADS
        )
    )
    a = normal(2, samples, TOKENS, WIDTH, device="cpu")
    z = normal(2, 1, TOKENS, TOKENS, WIDTH, device="cpu", seed=3)
    keep = coin(2, samples, TOKENS, device="cpu", odds=0.7).float()
    keep[..., 0] = 1
    further = (a,) if name.startswith("Diffusion") else ()

    check_patched(layer, lambda a, z: layer(a, z, *further, mask=keep), a, z)


def test_openfold_windows():
    """Attention of atoms: 32 queries see 128 keys, of which the mask leaves out some."""
    module = real("openfold3.core.model.layers.attention_pair_bias")
    layer = randomised(
        module.CrossAttentionPairBias(
            *(WIDTH, WIDTH, WIDTH, WIDTH, WIDTH, DIM, HEADS), n_query=4, n_key=8
        )
    )
    a, s = (normal(2, 10, WIDTH, device="cpu", seed=i) for i in (1, 2))
    z = normal(2, 3, 4, 8, WIDTH, device="cpu", seed=3)

    check_patched(layer, lambda a, z: layer(a, z, s), a, z)


def test_openfold_in_high_precision():
    """Float32 between projections in bfloat16."""
    layer = triangle("openfold3", "real").mha
    x = normal(TOKENS, WIDTH, device="cpu")
    bias = normal(HEADS, TOKENS, TOKENS, device="cpu", seed=2)
    mask = torch.zeros(1, 1, TOKENS)
    wanted = layer(x, x, [mask, bias])
    with patch_model(layer), torch.autocast("cpu", torch.bfloat16):
        found = layer(x, x, [mask, bias], use_high_precision=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("windows", [{}, {"n_queries": 4, "n_keys": 8}])
def test_the_line_for_protenix(windows, monkeypatch):
    """The guide's, for its pair bias and its atoms."""
    module = real("protenix.model.modules.transformer")
    primitives = real("protenix.model.modules.primitives")
    layer = randomised(module.AttentionPairBias(n_heads=HEADS, c_a=24, c_s=WIDTH, c_z=WIDTH))
    a = normal(2, 10, 24, device="cpu")
    s = normal(2, 10, WIDTH, device="cpu", seed=2)
    z = normal(2, *((3, 4, 8) if windows else (10, 10)), WIDTH, device="cpu", seed=3)

    def call(a: Tensor, z: Tensor) -> Tensor:
        return layer(a, s, z, **windows)

    wanted = results(layer, call, a, z)
    guide = Path(__file__).parents[1] / "docs" / "guides" / "learned-biases.md"
    (line,) = (each for each in guide.read_text().splitlines() if each.startswith("return "))

    names = {"megasoftmax": megasoftmax}
    exec(f"def _attention(q, k, v, attn_bias=None, *flags, **named):\n    {line}", names)
    monkeypatch.setattr(primitives, "_attention", names["_attention"])
    assert_same(results(layer, call, a, z), wanted)


def test_a_row_without_a_key_gets_zeros():
    layer = triangle("protenix", "stand-in")
    x, keep = pairs()
    keep[3] = 0
    with patch_model(layer):
        output = layer(x, mask=keep)
    torch.testing.assert_close(output[3], layer.mha.linear_o.bias.expand(TOKENS, WIDTH))


def test_a_model_of_several_layers():
    model = nn.ModuleDict(
        {
            "pairs": triangle("boltz", "stand-in"),
            "samples": pair_bias("stand-in"),
            "other": nn.MultiheadAttention(WIDTH, 1),
        }
    )
    state = model.state_dict()
    patched = patch_model(model)
    assert list(patched.report) == ["pairs.mha", "samples"]
    assert patch_model(model).names == ()
    assert model.state_dict().keys() == state.keys()
    patched.unpatch()
    assert {str(each) for each in patched.report.values()} == {"unchanged: not patched"}
    assert type(model["samples"]).__name__ == "AttentionPairBias"


def test_what_cannot_be_served():
    layer = triangle("boltz", "stand-in")
    layer.mha.forward = layer.mha.forward
    with pytest.raises(ValueError, match="mha: its forward was replaced"):
        patch_model(layer)
    del layer.mha.forward
    model = nn.ModuleList([layer, pair_bias("stand-in")])
    del model[1].proj_g
    with pytest.raises(ValueError, match="1: it has no proj_g"):
        patch_model(model)
    with patch_model(model, strict=False) as patched:
        assert patched.report["0.mha"].runs == "SDPA"
        assert patched.report["1"].why.startswith("it has no proj_g")
    forward = type(model[1]).forward
    type(model[1]).forward = lambda self, s, unknown: None
    try:
        model[1].proj_g = nn.Identity()
        with pytest.raises(ValueError, match="1: its forward takes unknown"):
            patch_model(model)
    finally:
        type(model[1]).forward = forward
    with pytest.raises(ValueError, match="model: expected one with boltz"):
        patch_model(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="model: expected a module, got str"):
        patch_model("boltz")


def test_the_environment_switches_it_off(monkeypatch):
    layer = triangle("boltz", "stand-in")
    monkeypatch.setenv("MEGASOFTMAX_DISABLE", "1")
    patched = patch_model(layer)
    assert patched.names == ()
    assert str(patched.report["mha"]) == "unchanged: MEGASOFTMAX_DISABLE=1"


def test_copies_run_it_too():
    """Trainers keep an average of the weights in a copy of the model."""
    layer = triangle("boltz", "stand-in")
    x, keep = pairs(1)
    with patch_model(layer):
        copied = copy.deepcopy(layer)
        assert torch.equal(copied(x, mask=keep), layer(x, mask=keep))
    assert type(copied.mha) is not type(layer.mha)


def test_subclasses_stay():
    layer = triangle("boltz", "stand-in")
    layer.mha.__class__ = type("Ours", (type(layer.mha),), {})
    model = nn.ModuleList([layer, pair_bias("stand-in")])
    with patch_model(model) as patched:
        assert str(patched.report["0.mha"]) == "unchanged: not patched"
        assert patched.report["1"].runs == "SDPA"


def test_report_of_quantised_weights():
    """Integers say nothing of the type of a call."""
    layer = triangle("boltz", "stand-in")
    with patch_model(layer) as patched:
        weight = layer.mha.linear_q.weight
        layer.mha.linear_q.weight = nn.Parameter(weight.detach().to(torch.int8), False)
        assert patched.report["mha"].runs == "SDPA"


def test_code_compiled_for_a_patch_serves_the_next():
    layer, (x, keep) = triangle("boltz", "stand-in"), pairs()
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter)
    for _ in range(2):
        with patch_model(layer):
            compiled(x, mask=keep)
    assert counter.frame_count == 1
