"""What `export-kernels` writes is loaded by Hugging Face's `kernels`, and computes by itself."""

import re
import textwrap
import tomllib
from functools import partial
from pathlib import Path

import pytest
import torch
from inputs import command

import megasoftmax
from megasoftmax import hub
from megasoftmax._export_kernels import export_kernels
from megasoftmax.build import extension, library

pytest.importorskip("kernels", reason="kernels is not installed: pip install 'megasoftmax[test]'")

SETUP = """
import sys
from pathlib import Path
import kernels
import torch

torch.manual_seed(0)
folder = Path(sys.argv[1])

def check(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, check_dtype=False)
"""
ALONE = 'sys.modules["megasoftmax"] = None  # importing it fails\n'
OF_TRANSFORMERS = """
import os
os.environ["LOCAL_KERNELS"] = f"org/fused={folder}"
os.environ["HF_HUB_OFFLINE"] = "1"
from transformers.integrations import hub_kernels
hub_kernels.is_kernels_available = lambda: True  # it asks for a version of kernels
hub_kernels.get_kernel = lambda name, **others: kernels.get_kernel(name, version=1)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    export_kernels(folder)
    return folder


@pytest.fixture
def run(forks):
    """Runs SETUP and a script, with a folder, in another process."""

    def run_script(script, folder):
        result = forks.run(SETUP + textwrap.dedent(script), folder)
        assert result.returncode == 0, result.stderr

    return run_script


COMPUTES = """
kernel = kernels.get_local_kernel(folder)
logits = torch.randn(3, 4, 5, 7, dtype=torch.float64)
exact = torch.softmax(logits / 3, -1)
check(kernel.softmax(logits.float(), scale=1 / 3), exact)

values, indices = exact.topk(3)
found, columns = kernel.softmax_topk(logits.float(), 3, scale=1 / 3, renormalize=True)
check(found, values / values.sum(-1, keepdim=True))
assert torch.equal(columns, indices)

query, key, value = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(3))
scores = query @ key.mT / 8**0.5
scores.masked_fill_(torch.ones(6, 6).triu(1).bool(), -torch.inf)
output = kernel.attention(query.float(), key.float(), value.float(), causal=True)
check(output, torch.softmax(scores, -1) @ value)
"""


def test_copy_does_not_name_the_package(exported):
    modules = [*exported.rglob("*.py")]
    assert len(modules) > 10
    for module in modules:
        assert not re.search(r"^ *(from|import) megasoftmax", module.read_text(), re.M), module.name


def test_copy_of_links_computes(exported, tmp_path, run):
    """The cache of the hub keeps files elsewhere, under other names, and links them one by one."""
    blobs, linked = tmp_path / "blobs", tmp_path / "linked"
    blobs.mkdir()
    for number, file in enumerate(sorted(exported.rglob("*.*"))):
        if file.is_file():
            link = linked / file.relative_to(exported)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(blobs / str(number))
            (blobs / str(number)).write_bytes(file.read_bytes())
    run(ALONE + COMPUTES, linked)


@pytest.mark.parametrize("first", ["copy", "package"])
def test_copy_and_package_live_together(exported, first, run):
    script = """
    from megasoftmax.reference.softmax import softmax_forward

    name = kernel.__name__
    assert name != "megasoftmax"
    assert sys.modules[f"{name}.functions.calls"] is not megasoftmax.functions.calls
    scores = torch.randn(2, 3, requires_grad=True)
    for owner, space in ((kernel, getattr(torch.ops, name)), (megasoftmax, torch.ops.megasoftmax)):
        compiled = torch.compile(owner.softmax, fullgraph=True, backend="eager")
        expected = torch.softmax(2 * scores.double(), -1)
        check(compiled(scores, scale=2.0), expected)
        forward = space.softmax_forward
        rest = (None, None, None, None, scores.dtype, False, 0.0, None)
        found, _ = forward(scores, 2.0, 0.0, None, None, False, -1, -1, *rest)
        check(found, expected)
        upstream = torch.randn(2, 3)
        gradient = torch.autograd.grad(found, scores, upstream)[0]
        check(gradient, torch.autograd.grad(expected, scores, upstream.double())[0])
    """
    imports = ["kernel = kernels.get_local_kernel(folder)", "import megasoftmax"]
    run(
        "\n".join(imports if first == "copy" else imports[::-1]) + textwrap.dedent(script), exported
    )


def test_layers_replace_those_of_a_model(exported, run):
    script = """
    from transformers import Qwen3_5MoeTextConfig
    from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter

    def repository(name):
        return {"cpu": kernels.LocalLayerRepository(folder, layer_name=name)}

    # transformers marks its routers so, but with versions of kernels that it knows.
    kernels.replace_kernel_forward_from_hub(Qwen3_5MoeTopKRouter, "SoftmaxTopKRouter")
    kernels.replace_kernel_forward_from_hub(LagunaTopKRouter, "SoftmaxTopKRouter")
    kernels.replace_kernel_forward_from_hub(torch.nn.Softmax, "Softmax")
    mapping = {name: repository(name) for name in ("SoftmaxTopKRouter", "Softmax")}

    config = Qwen3_5MoeTextConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3)
    router = Qwen3_5MoeTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    softmax = torch.nn.Softmax(dim=1)
    hidden = torch.randn(2, 5, 16, requires_grad=True)

    def results():
        logits, scores, experts = router(hidden)
        loss = (scores * torch.arange(3)).sum() + softmax(hidden)[0].square().sum()
        return logits, scores, experts, *torch.autograd.grad(loss, [hidden, router.weight])

    expected = results()
    model = torch.nn.ModuleList([router, softmax])
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(
            model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, use_fallback=False
        )
    for module in model:
        assert module.forward.__func__.__module__.startswith("_megasoftmax_")
    for actual, wanted in zip(results(), expected, strict=True):
        check(actual, wanted)
    torch.compile(router, fullgraph=True, backend="eager")(hidden)

    class Sigmoid(LagunaTopKRouter):  # marked with the same name, computes something else
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.weight = self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(8))

    model = torch.nn.ModuleList([Sigmoid()])
    with kernels.use_kernel_mapping(mapping):
        kernels.kernelize(model, mode=kernels.Mode.INFERENCE)
    try:
        model[0](hidden)
    except ValueError as error:
        assert "got Sigmoid with e_score_correction_bias" in str(error)
    else:
        raise AssertionError("a router of sigmoids was taken for one of softmax")
    """
    run(ALONE + textwrap.dedent(script), exported)


def test_copy_is_whole_and_named_by_its_content(exported, tmp_path):
    variant = exported / "build" / "torch-universal"
    text = "\n".join(file.read_text() for file in variant.glob("*.py"))
    assert not re.search(r"^\s*(import|from) megasoftmax", text, re.MULTILINE)
    assert "torch.ops.megasoftmax" not in re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    sources = {file.relative_to(extension.CSRC) for file in extension.CSRC.rglob("*.*")}
    assert {file.relative_to(variant / "csrc") for file in variant.rglob("csrc/**/*.*")} == sources

    binary = tmp_path / "library.so"
    binary.write_bytes(b"compiled")
    first, second = tmp_path / "first", tmp_path / "second"
    universal, compiled = export_kernels(first, binary, 13, ["9.0a"])
    assert re.fullmatch(r"torch-stable-abi211-cu130-\w+-linux", compiled.name)
    assert (compiled / extension.LIBRARY_NAME).read_bytes() == b"compiled"
    assert (universal / "metadata.json").read_text() == (variant / "metadata.json").read_text()
    binary.write_bytes(b"compiled again")
    *_, other = export_kernels(second, binary, 13, ["9.0a"])
    assert (compiled / "metadata.json").read_text() != (other / "metadata.json").read_text()


def test_metadata_are_those_that_kernels_reads(tmp_path):
    from kernels._rust import Backend, Build, Digest, Metadata

    binary = tmp_path / "library.so"
    binary.write_bytes(b"compiled")
    for variant in export_kernels(tmp_path / "kernel", binary, 13, ["8.0", "9.0a+PTX"]):
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert (metadata.version, metadata.license) == (1, "Apache-2.0")
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
        (variant / "csrc" / "common" / "limits.h").write_text("changed")
        with pytest.raises(Exception, match=r"csrc/common/limits\.h"):
            metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    assert metadata.backend.backend_type == Backend.CUDA
    assert metadata.backend.archs == ["8.0", "9.0a+PTX"]
    assert Build.open(tmp_path / "kernel").general.backends == [Backend.CUDA]


def test_build_toml_names_the_sources(exported):
    build = tomllib.loads((exported / "build.toml").read_text())
    assert build["torch"]["stable-abi"] == {"cuda": "2.11"}
    listed = build["torch"]["src"] + build["kernel"]["megasoftmax"]["src"]
    assert all((exported / path).is_file() for path in listed)
    compiled = {path for path in listed if path.endswith((".cu", ".cpp"))}
    sources = {f"csrc/{path.relative_to(extension.CSRC)}" for path in extension.sources()}
    assert compiled == sources
    assert (exported / "torch-ext" / "megasoftmax" / "__init__.py").is_file()


def test_earlier_versions_find_the_kernel_in_a_folder(exported, run):
    script = """
    import importlib.util
    file = folder / "build" / "torch-universal" / "megasoftmax" / "__init__.py"
    spec = importlib.util.spec_from_file_location("earlier", file)
    earlier = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(earlier)
    scores = torch.randn(2, 3)
    check(earlier.softmax(scores), scores.softmax(-1))
    assert earlier.layers.Softmax.has_backward
    """
    run(ALONE + textwrap.dedent(script), exported)


def test_models_of_transformers_take_the_attention_function(exported, run):
    """With the masks that transformers gives to kernels: padding, or none."""
    script = """
    from transformers import (
        BertConfig, BertModel, GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM
    )

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(vocab_size=64, max_position_embeddings=64)
    few = dict(num_key_value_heads=2, sliding_window=5)
    experts = dict(head_dim=8, num_local_experts=2, num_experts_per_tok=1)
    configs = [
        (MistralForCausalLM, MistralConfig(**sizes, **few)),
        (GptOssForCausalLM, GptOssConfig(**sizes, **few, **experts)),
        (BertModel, BertConfig(**sizes)),
    ]
    ids = torch.randint(1, 64, (2, 12))
    left = torch.ones(2, 12, dtype=torch.long)
    left[0, :4] = 0
    right = left.flip(-1)
    packed = torch.cat([torch.arange(7), torch.arange(5)])[None]
    for model_class, config in configs:
        model = model_class(config).eval()

        def run(implementation, **given):
            model.set_attn_implementation(implementation)
            return model(**given)[0]

        run("org/fused:attention_forward", input_ids=ids)
        function = ALL_ATTENTION_FUNCTIONS["org/fused:attention_forward"]
        assert function.__module__.startswith("_megasoftmax_")
        calls = [dict(input_ids=ids)]
        calls += [dict(input_ids=ids, attention_mask=mask) for mask in (left, right)]
        if model_class is MistralForCausalLM:  # eager GPT-OSS keeps no sequences apart
            calls.append(dict(input_ids=ids[:1], position_ids=packed, use_cache=False))
        for given in calls:
            expected = run("eager", **given)
            actual = run("org/fused:attention_forward", **given)
            kept = given.get("attention_mask", torch.ones(given["input_ids"].shape)) != 0
            torch.testing.assert_close(actual[kept], expected[kept], rtol=1e-3, atol=1e-4)
        if model_class is BertModel:
            continue
        texts = []
        for implementation in ("eager", "org/fused:attention_forward"):
            model.set_attn_implementation(implementation)
            given = dict(attention_mask=left, max_new_tokens=8, do_sample=False, pad_token_id=0)
            texts.append(model.generate(ids, **given))
        assert torch.equal(*texts)
        model.train()
        losses = []
        for implementation in ("eager", "org/fused:attention_forward"):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            model(input_ids=ids, attention_mask=right, labels=ids).loss.backward()
            losses.append(model.model.layers[0].self_attn.q_proj.weight.grad.clone())
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)
    """
    run(ALONE + OF_TRANSFORMERS + textwrap.dedent(script), exported)


def test_a_static_cache_of_transformers(exported, run):
    """Its unused entries do not count. For a name with "flash", transformers keeps the mask."""
    script = """
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(vocab_size=64)
    given = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    given |= dict(cache_implementation="static", disable_compile=True, output_logits=True)
    for model in (
        LlamaForCausalLM(LlamaConfig(**sizes)),
        MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=6)),
    ):
        ids, logits = torch.randint(1, 64, (2, 9)), []
        for implementation in ("eager", "flash_attn_forward", "attention_forward"):
            name = implementation if implementation == "eager" else f"org/fused:{implementation}"
            model.set_attn_implementation(name)
            found = model.eval().generate(ids, **given, return_dict_in_generate=True)
            logits.append(torch.stack(found.logits))
        for found in logits[1:]:
            torch.testing.assert_close(found, logits[0], rtol=1e-3, atol=1e-4)
    """
    run(ALONE + OF_TRANSFORMERS + textwrap.dedent(script), exported)


def test_attention_function_of_a_kernel():
    """Masks of SDPA, a bias, packed sequences, a static cache, dropout, and what it refuses."""
    module = torch.nn.Module()
    module.is_causal = True
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))

    def call(mask=None, **given):
        return hub.attention_forward(module, query, key, value, mask, **given)[0]

    expected = megasoftmax.attention(query, key, value, causal=True).transpose(1, 2)
    visible = torch.ones(9, 9).tril().bool()[None, None]
    torch.testing.assert_close(call(), expected)
    torch.testing.assert_close(call(visible, sliding_window=2), expected)
    torch.testing.assert_close(call(torch.ones(1, 9), dropout=1e-9), expected)
    last = call(torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1]]), is_causal=False)
    key, value = key.clone(), value.clone()
    key[:, :, 8], value[:, :, 8] = 100, 100  # of a static cache, not yet written
    torch.testing.assert_close(call(torch.ones(1, 8), is_causal=False), last)
    bias = torch.randn(1, 4, 9, 9)
    wanted = megasoftmax.attention(query, key[:, :, :8], value[:, :, :8], bias=bias[..., :8])
    for dropout in (0.0, 1e-9):
        given = {"position_bias": bias, "is_causal": False, "dropout": dropout}
        torch.testing.assert_close(call(torch.ones(1, 8), **given), wanted.transpose(1, 2))
    key, value = torch.randn(2, 1, 2, 9, 8).unbind(0)
    whole = query, key, value
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = call(cu_seq_lens_q=ends, cu_seq_lens_k=ends, sliding_window=3)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(call(position_ids=positions, sliding_window=3), packed)
    # A static cache with room for more keys, and one that a window trimmed.
    written = megasoftmax.attention(
        query[:, :, 3:5], key[:, :, :5], value[:, :, :5], causal=True, window=(2, 2)
    )
    query, place = query[:, :, 3:5], torch.tensor([[3, 4]])
    found = call(position_ids=place, sliding_window=3)
    torch.testing.assert_close(found, written.transpose(1, 2))
    key, value = key[:, :, 1:5], value[:, :, 1:5]
    found = call(position_ids=place, sliding_window=3)
    torch.testing.assert_close(found, written.transpose(1, 2))
    query, key, value = whole
    query, key, value = (each[:, :, 4:] for each in (query, key, value))
    torch.testing.assert_close(call(sliding_window=3), packed[:, 4:])
    capped = megasoftmax.attention(query, key, value, causal=True, window=(2, 0), softcap=0.5)
    torch.testing.assert_close(call(sliding_window=3, softcap=0.5), capped.transpose(1, 2))
    for name in ("indices", "block_indices", "cache", "sinks"):
        with pytest.raises(NotImplementedError, match=f"{name}: expected None, got a tensor"):
            call(**{name: bias})
    with pytest.raises(ValueError, match=r"attention_mask: expected \[batch, keys\] or 4"):
        call(torch.ones(1, 1, 5))
    with pytest.raises(ValueError, match="attention_mask: expected a bool"):
        call(torch.ones(1, 1, 5, 5))


@pytest.mark.parametrize(
    ("torch_version", "cuda", "chosen"),
    [
        ("2.11", "13.0", "compiled"),
        ("2.14", "13.2", "compiled"),
        ("2.10", "13.0", "universal"),
        ("2.11", "12.8", "universal"),
        ("2.13", None, "universal"),
    ],
)
def test_kernels_chooses_the_variant(tmp_path, torch_version, cuda, chosen):
    from kernels.backends import CPU, CUDA
    from kernels.variants import _resolve_variant_for_system, get_variants_local
    from packaging.version import Version

    binary = tmp_path / "library.so"
    binary.write_bytes(b"compiled")
    universal, compiled = export_kernels(tmp_path / "kernel", binary, 13, ["9.0a"])
    platform, system = compiled.name.split("-")[-2:]
    variants, _ = _resolve_variant_for_system(
        get_variants_local(compiled.parent),
        CUDA(Version(cuda)) if cuda else CPU(),
        platform,
        system,
        Version(torch_version),
        True,
        None,
    )
    expected = {"compiled": compiled, "universal": universal}[chosen]
    assert variants[0].variant_str == expected.name


def test_command_writes_what_is_there_and_overwrites_nothing(tmp_path):
    export = partial(command, "export-kernels", str(tmp_path))
    export()
    assert (tmp_path / "build" / "torch-universal" / "metadata.json").exists()
    assert "torch-universal is there already; --force replaces it" in export(code=1).output
    leftover = tmp_path / "build" / "torch-universal" / "leftover"
    leftover.touch()
    export("--force")
    assert (leftover.parent / "metadata.json").exists()
    assert not leftover.exists()


def test_force_replaces_only_what_an_export_wrote(tmp_path):
    foreign = tmp_path / "build" / "torch-universal" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    for text in (None, "[]", '{"name": "other"}'):
        if text is not None:
            (foreign.parent / "metadata.json").write_text(text)
        with pytest.raises(FileExistsError, match="expected an export of megasoftmax"):
            export_kernels(tmp_path, force=True)
    assert foreign.exists()


def test_compiled_part_needs_the_version_of_cuda_and_architectures(tmp_path):
    with pytest.raises(ValueError, match=r"cuda: expected the major version .* got none"):
        export_kernels(tmp_path, Path("library.so"))
    with pytest.raises(ValueError, match=r"archs: expected the architectures .* got none"):
        export_kernels(tmp_path, Path("library.so"), 13)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_compiled_copy_runs_fused_beside_the_package(tmp_path, run):
    compiled = library.load().path
    assert compiled is not None
    major = int(torch.version.cuda.split(".")[0])
    export_kernels(tmp_path, compiled, major, library.architectures_of(compiled) or ["9.0a"])
    script = """
    import megasoftmax
    kernel = kernels.get_local_kernel(folder)
    assert "torch-stable-abi" in kernel.__file__
    scores = torch.randn(4, 64, 65, device="cuda", requires_grad=True)
    upstream = torch.randn_like(scores)
    for owner in (kernel, megasoftmax):
        found = owner.softmax(scores, causal=True, fused=True)
        hidden = torch.ones(64, 65, device="cuda").triu(2).bool()
        expected = torch.softmax(scores.double().masked_fill(hidden, -torch.inf), -1)
        check(found, expected)
        gradient = torch.autograd.grad(found, scores, upstream)[0]
        check(gradient, torch.autograd.grad(expected, scores, upstream.double())[0])
    """
    run(script, tmp_path)
