"""Attention of windows of images: transformers', timm's and torchvision's layers."""

import copy
import importlib

import pytest
import torch
from einops import rearrange
from inputs import record_calls

pytest.importorskip("transformers")
from models import tiny
from transformers import Swinv2Model

from megasoftmax.integrations import products, vision, windows
from megasoftmax.integrations import transformers as integration
from megasoftmax.integrations.names import NAMES
from megasoftmax.integrations.patching import patch_model
from megasoftmax.integrations.windows import attend_in_windows, into_windows, out_of_windows

BATCH, IMAGE, WINDOW, HEADS = 2, 16, 4, 2
_SWIN = {"image_size": IMAGE, "patch_size": 2, "embed_dim": 16, "depths": [2]}
_SWIN |= {"num_heads": [HEADS], "window_size": WINDOW, "drop_path_rate": 0.0}
_BEIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
_BEIT |= {"intermediate_size": 48, "image_size": IMAGE, "patch_size": 4, "drop_path_rate": 0.0}
_CLAP = {"patch_embeds_hidden_size": 16, "hidden_size": 16, "depths": [2]}
_CLAP |= {"num_attention_heads": [HEADS], "window_size": WINDOW, "spec_size": 64}
_CLAP |= {"num_mel_bins": 16, "drop_path_rate": 0.0, "attention_probs_dropout_prob": 0.0}
_CLAP |= {"hidden_dropout_prob": 0.0}
_OWN_BIAS, _ONE_BIAS = "use_relative_position_bias", "use_shared_relative_position_bias"
MODELS = {
    "swin": ("SwinModel", _SWIN),
    "swinv2": ("Swinv2Model", _SWIN),
    "swin2sr": ("Swin2SRModel", _SWIN | {"patch_size": 1}),
    "donut": ("DonutSwinModel", _SWIN),
    "maskformer": ("MaskFormerSwinModel", _SWIN),
    "clap": ("ClapAudioModel", _CLAP),
    "beit": ("BeitModel", _BEIT | {_OWN_BIAS: True}),
    "beit, shared": ("BeitModel", _BEIT | {_ONE_BIAS: True}),
    "data2vec": ("Data2VecVisionModel", _BEIT | {_OWN_BIAS: True}),
    "data2vec, shared": ("Data2VecVisionModel", _BEIT | {_ONE_BIAS: True}),
}
SHIFTED = tuple(name for name in MODELS if "data2vec" not in name and "beit" not in name)


def build(name):
    model, sizes = MODELS[name]
    return with_large_weights(tiny(model, **copy.deepcopy(sizes)))


def with_large_weights(model):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.train()


def build_images(name=""):
    shape = (1, 64, 16) if name == "clap" else (3, IMAGE, IMAGE)
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def assert_same_step(ours, own, images):
    """Outputs, and gradients by the largest of the model: those of biases of keys are 0."""
    results = []
    for model in (own, ours):
        model.zero_grad()
        torch.manual_seed(2)
        output = model(images)
        output = output if isinstance(output, torch.Tensor) else output[0]
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        (output * weights).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append(
            (output, {name: each for name, each in gradients.items() if each is not None})
        )
    (expected, gradients), (actual, our_gradients) = results
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-3, atol=1e-5 * largest)
    assert all(gradient.any() for name, gradient in gradients.items() if "position_bias" in name)


@pytest.fixture
def calls(monkeypatch):
    """The tensors and options of calls of attention; a CPU takes the way of a GPU."""
    for module in (integration, products):
        monkeypatch.setattr(module, "takes_attention", lambda *given: True)
    return record_calls(monkeypatch, "attention")


# The mask of shifted windows


def attend_with_added_mask(query, key, value, bias, mask, scale):
    """What the models compute, with a mask of 0 and -100."""
    scores = query @ key.mT * scale + bias
    scores = scores.unflatten(0, (-1, len(mask))) + mask[:, None]
    return (scores.flatten(0, 1).softmax(-1) @ value).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("gap", "same"), [(0.0, True), (75.0, True), (130.0, False)])
def test_excluded_scores_that_are_much_larger(gap, same, calls):
    """Up to 75 above the visible ones the results are the same, and far above they are not."""
    tokens, windows = 9, 4
    query, key, value = torch.randn(3, BATCH * windows, HEADS, tokens, 8)
    bias = torch.randn(HEADS, tokens, tokens) * 0.1
    bias[:, 0, 1:] += gap
    mask = torch.zeros(windows, tokens, tokens)
    mask[1:, 0, 1:] = -100.0
    inputs = query * 0.1, key, value, bias, mask
    expected = attend_with_added_mask(*inputs, scale=1.0)
    actual = attend_in_windows(*inputs, scale=1.0, dropout=0.0)
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6) == same
    assert len(calls) == 1
    bool_mask = attend_in_windows(*inputs[:4], mask != 0, scale=1.0, dropout=0.0)
    assert torch.equal(bool_mask, actual)


# From images to windows and back


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("shift", [(0, 0), (1, 2)])
def test_tokens_move_into_windows_and_back(shift, keeps, monkeypatch):
    monkeypatch.setattr(windows, "may_keep", lambda device: keeps)
    image = torch.randn(2, 6, 8, 3, dtype=torch.float64, requires_grad=True)
    rolled = torch.roll(image, (-shift[0], -shift[1]), (1, 2))
    expected = rearrange(rolled, "b (h r) (w c) d -> (b h w) (r c) d", r=3, c=4)
    found = into_windows(image, (3, 4), shift)
    assert found.equal(expected)
    assert out_of_windows(found, image.shape, (3, 4), shift).equal(image)
    strided = torch.randn(5, 4, 12, 2, dtype=torch.float64).transpose(0, 3)[..., :3]
    for weights in (strided.transpose(1, 2).reshape_as(found), torch.ones(()).expand_as(found)):
        gradients = [
            torch.autograd.grad(each, image, weights.to(each.dtype), retain_graph=True)
            for each in (found, expected)
        ]
        assert gradients[0][0].equal(gradients[1][0])

    def there_and_back(image):
        return out_of_windows(into_windows(image, (3, 4), shift).sin(), image.shape, (3, 4), shift)

    assert there_and_back(image).allclose(image.sin())
    assert torch.autograd.gradcheck(there_and_back, image, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(there_and_back, image)


def test_tokens_move_in_compiled_and_transformed_calls():
    image, size = torch.randn(2, 6, 8, 3), ((3, 4), (1, 2))
    expected = into_windows(image, *size)
    compiled = torch.compile(into_windows, backend="eager", fullgraph=True)
    assert compiled(image, *size).equal(expected)
    assert torch.vmap(lambda each: into_windows(each, *size))(image[None])[0].equal(expected)
    _, tangent = torch.func.jvp(lambda each: into_windows(each, *size), (image,), (image,))
    assert tangent.equal(expected)
    with torch.inference_mode():
        other = into_windows(torch.cat([image] * 2), *size)
    twice = torch.cat([image] * 2).requires_grad_()
    found = into_windows(twice, *size)  # by what was kept in inference mode
    assert found.equal(other)
    found.sum().backward()
    assert twice.grad.eq(1).all()


def test_indices_are_kept_for_shifted_windows():
    """Hooks of saved tensors do not see them."""
    windows._kept_indices.cache_clear()
    image = torch.randn(2, 6, 8, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: pytest.fail("saved"), lambda _: _):
        for shift in ((0, 0), (0, 2), (1, 2), (0, 2)):
            out_of_windows(into_windows(image, (3, 4), shift), image.shape, (3, 4), shift)
    assert windows._kept_indices.cache_info()[1:] == (2, 64, 2)


def test_a_declined_packed_call_makes_its_options_once(monkeypatch):
    made = record_calls(monkeypatch, "_options", windows)
    monkeypatch.setattr(windows, "served_packed_attention", lambda *given, **options: None)
    packed, bias = torch.randn(8, 9, 3, HEADS, 8), torch.randn(HEADS, 9, 9)
    mask = torch.zeros(4, 9, 9).masked_fill(torch.randn(4, 9, 9).triu(1) > 0, -100)
    found = windows.attend_packed_in_windows(packed, bias, mask, 0.3, 0.0)
    assert len(made) == 1
    assert found.equal(attend_in_windows(*products.unpacked(packed), bias, mask, 0.3, 0.0))


# transformers


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("name", MODELS)
def test_model_of_transformers_trains_as_eager(name, implementation, calls):
    eager = build(name)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    patched = patch_model(ours, implementation=implementation)
    assert_same_step(ours, eager, build_images(name))
    assert len(calls) == (2 if implementation == NAMES[0] else 0)
    patched.unpatch()
    assert {type(module) for module in ours.modules()}.isdisjoint(vision.VISION.values())


@pytest.mark.parametrize("name", SHIFTED)
def test_bias_and_mask_are_not_added_up(name, calls):
    model = build(name)
    patch_model(model)
    model(build_images(name))
    (plain, plain_options), (shifted, options) = calls
    tokens = WINDOW * WINDOW
    windows = plain[0].shape[0] // BATCH
    assert plain[0].shape == (BATCH * windows, HEADS, tokens, 16 // HEADS)
    assert shifted[0].shape == (BATCH, windows, HEADS, tokens, 16 // HEADS)
    assert plain_options["mask"] is None
    assert options["mask"].tensor.shape == (windows, 1, tokens, tokens)
    for each in (plain_options, options):
        assert each["bias"].shape == (HEADS, tokens, tokens)
        assert each["bias"].requires_grad


def test_probabilities_of_windows():
    eager = build("swinv2").eval()
    ours = copy.deepcopy(eager)
    patch_model(ours)
    images = build_images()
    expected, actual = (model(images, output_attentions=True) for model in (eager, ours))
    assert len(expected.attentions) > 0
    torch.testing.assert_close(actual.attentions, expected.attentions, rtol=1e-5, atol=1e-6)


def test_model_by_name_and_saved(tmp_path, calls):
    own = build("swinv2").eval()
    own.save_pretrained(tmp_path)
    integration.register()
    loaded = Swinv2Model.from_pretrained(tmp_path, attn_implementation="megasoftmax").eval()
    images = build_images()
    torch.testing.assert_close(loaded(images)[0], own(images)[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


# timm and torchvision


def import_or_skip(name):
    """A module. A torchvision for another build of torch raises more than ImportError."""
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"{name}: {error}")


_OF_SWIN = {"img_size": 48, "window_size": 4, "embed_dim": 16, "depths": (2, 2)}
_OF_SWIN |= {"num_heads": (1, 2)}
_OF_BEIT = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}
_SHARED_BIAS = {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}
TIMM = {
    "swin_tiny_patch4_window7_224": _OF_SWIN,
    "swinv2_tiny_window8_256": _OF_SWIN,
    "beit_base_patch16_224": _OF_BEIT,
    "beitv2_base_patch16_224": _OF_BEIT | _SHARED_BIAS,
}


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", TIMM)
def test_model_of_timm_trains_as_before(name, dropout, calls, monkeypatch):
    timm = import_or_skip("timm")
    adapter = importlib.import_module("megasoftmax.integrations.timm")
    options = TIMM[name] | {"num_classes": 7, "drop_path_rate": 0.0, "attn_drop_rate": dropout}
    own = with_large_weights(timm.create_model(name, **options))
    for layer in own.modules():
        if hasattr(layer, "fused_attn"):
            layer.fused_attn = False  # else dropout inside of SDPA draws in another order
    ours = copy.deepcopy(own)
    patched = adapter.patch_model(ours)
    images = torch.randn(BATCH, 3, options["img_size"], options["img_size"])
    if dropout:
        monkeypatch.setattr(products, "takes_attention", lambda *given: False)
    assert_same_step(ours, own, images)
    layers = len(patched.report)
    assert layers == (4 if "swin" in name else 2)
    assert len(calls) == (0 if dropout else layers)
    if "swin" in name and not dropout:
        assert [len(tensors[0].shape) for tensors, _ in calls] == [4, 5, 4, 5]
    assert ours.state_dict().keys() == own.state_dict().keys()
    patched.unpatch()
    assert [type(module) for module in ours.modules()] == [type(module) for module in own.modules()]


@pytest.mark.parametrize("size", [(64, 64), (64, 32), (52, 44)])
@pytest.mark.parametrize("name", [name for name in TIMM if "swin" in name])
def test_blocks_of_timm_move_tokens_by_one_copy(name, size, monkeypatch):
    """Windows of 4 x 4 of grids of 16 x 16, of 16 x 8, and of 13 x 11, which is padded."""
    timm = import_or_skip("timm")
    adapter = importlib.import_module("megasoftmax.integrations.timm")
    options = _OF_SWIN | {"num_classes": 7, "drop_path_rate": 0.0, "strict_img_size": False}
    own = with_large_weights(timm.create_model(name, **options)).double()
    ours = copy.deepcopy(own)
    images = torch.randn(BATCH, 3, *size, dtype=torch.float64)
    with adapter.patch_model(ours):
        assert_same_step(ours, own, images)
        if size == (52, 44):
            return
        monkeypatch.setattr(torch, "roll", lambda *given: pytest.fail("rolled"))
        ours(images).sum().backward()


@pytest.mark.parametrize("size", [(64, 64), (56, 40)])
@pytest.mark.parametrize("version", ["", "V2"])
def test_model_of_torchvision_trains_as_before(version, size, calls):
    """Windows of 4 x 4; the second size is padded to them."""
    swin = import_or_skip("torchvision.models.swin_transformer")
    adapter = importlib.import_module("megasoftmax.integrations.torchvision")
    own = with_large_weights(
        swin.SwinTransformer(
            [4, 4],
            16,
            [2, 2],
            [1, 2],
            [WINDOW, WINDOW],
            stochastic_depth_prob=0.0,
            num_classes=7,
            block=getattr(swin, f"SwinTransformerBlock{version}"),
            downsample_layer=getattr(swin, f"PatchMerging{version}"),
        )
    )
    ours = copy.deepcopy(own)
    patched = adapter.patch_model(ours)
    assert_same_step(ours, own, torch.randn(BATCH, 3, *size))
    assert len(calls) == len(patched.report) == 4
    assert [len(tensors[0].shape) for tensors, _ in calls] == [4, 5, 4, 5]
    with pytest.raises(ValueError, match=r"expected layers of .*ShiftedWindowAttention"):
        adapter.patch_model(torch.nn.Linear(1, 1))
