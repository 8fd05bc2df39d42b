"""Changes to a live pipeline before and after accelerate take effect, or are refused by name until they are undone."""

import functools
import re

import pytest
import torch
from diffusers.hooks import ModelHook
from diffusers.hooks.hooks import HookRegistry
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import (
    ImageProjection,
    IPAdapterFaceIDImageProjection,
    MultiIPAdapterImageProjection,
)
from torch import nn

import fastdiff
from fastdiff.acceleration.changes import Watch
from tests.support.text_pipelines import text_pipeline

ATTENTION = "mid_block.attentions.0.transformer_blocks.0.attn1"


@pytest.fixture
def pipe():
    return text_pipeline("sd1")


def draw(pipe, **options):
    given = {"prompt": "a photo of the cat", "num_inference_steps": 1, "output_type": "np"}
    return pipe(**given | options, generator=torch.Generator().manual_seed(3)).images


class CustomProcessor(AttnProcessor):
    pass


class LoraLinear(nn.Module):
    """Wraps a layer as PEFT does."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_B = nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(x)


class PeftLinear(LoraLinear):
    __module__ = "peft.tuners.lora.layer"


class FloatParameter(nn.Parameter):
    pass


def free_u(pipe):
    pipe.enable_freeu(0.9, 0.2, 1.2, 1.4)
    return pipe.disable_freeu


def custom_processors(pipe):
    pipe.unet.set_attn_processor(CustomProcessor())
    return lambda: pipe.unet.set_attn_processor(AttnProcessor2_0())


def one_processor(pipe):
    attention = pipe.unet.get_submodule(ATTENTION)
    attention.set_processor(CustomProcessor())
    return lambda: attention.set_processor(AttnProcessor2_0())


def slices(pipe):
    pipe.enable_attention_slicing(1)
    return pipe.disable_attention_slicing


def fused(part):
    def change(pipe):
        getattr(pipe, part).fuse_qkv_projections()
        return getattr(pipe, part).unfuse_qkv_projections

    return change


def ip_adapter(projection, change=lambda unet: None):
    """Return a change of the U-Net as load_ip_adapter's, with a projection of this class, and then `change`."""

    def load(pipe):
        unet = pipe.unet
        unet.set_attn_processor(
            {
                name: IPAdapterAttnProcessor2_0(32, 32) if "attn2" in name else AttnProcessor2_0()
                for name in unet.attn_processors
            }
        )
        unet.encoder_hid_proj = MultiIPAdapterImageProjection([projection(8, 32)])
        unet.config.encoder_hid_dim_type = "ip_image_proj"
        change(unet)

        def unload():
            unet.text_encoder_hid_proj = None
            pipe.unload_ip_adapter()

        return unload

    return load


def plain_processor(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(AttnProcessor2_0())


def another_processor(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn1.set_processor(IPAdapterAttnProcessor2_0(32, 32))


def more_layers_of_values(unet):
    unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor.to_v_ip.append(nn.Linear(32, 32, bias=False))


def without_a_projection(unet):
    unet.encoder_hid_proj = None


def own_processor(unet):
    class IPAdapterAttnProcessor(IPAdapterAttnProcessor2_0):
        pass

    unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(IPAdapterAttnProcessor(32, 32))


def text_projection(unet):
    """Add what load_ip_adapter keeps of Kolors."""
    unet.text_encoder_hid_proj = nn.Linear(32, 32)


def lora(pipe):
    """Wrap a layer as PEFT does, in another class, and return a function that undoes it."""
    unet, (parent, name) = pipe.unet, (pipe.unet.get_submodule(ATTENTION), "to_q")
    layer = parent.to_q
    parent.to_q, unet.peft_config = LoraLinear(layer), {"default": object()}

    def unload():
        setattr(parent, name, layer)
        del unet.peft_config

    return unload


def another_layer(kind):
    def change(pipe):
        parent = pipe.unet.get_submodule(ATTENTION)
        layer, parent.to_k = parent.to_k, kind(parent.to_k)
        return lambda: setattr(parent, "to_k", layer)

    return change


def more_layers(pipe):
    pipe.unet.position_net = nn.Linear(2, 2)
    return lambda: delattr(pipe.unet, "position_net")


def single_layers_offloaded(pipe):
    """Change the U-Net as enable_sequential_cpu_offload does: hooks on single layers, and weights in other memory."""
    layer = pipe.unet.conv_out
    layer._hf_hook, weight = object(), layer.weight
    layer.weight = nn.Parameter(weight.detach().clone())

    def remove():
        del layer._hf_hook
        layer.weight = weight

    return remove


def hooks_of_diffusers(pipe):
    """Add a hook as group offload and layerwise casting do."""
    registry = HookRegistry.check_if_exists_or_initialize(pipe.unet.conv_in)
    registry.register_hook(ModelHook(), "layerwise_casting")
    return lambda: registry.remove_hook("layerwise_casting")


REFUSED = {
    "free-u": (free_u, "FreeU is not supported; call disable_freeu()"),
    "custom-processor": (custom_processors, "CustomProcessor is not supported; call set_attn_processor("),
    "one-processor": (one_processor, "CustomProcessor is not supported"),
    "sliced-attention": (slices, "SlicedAttnProcessor is not supported"),
    "fused": (fused("unet"), "FusedAttnProcessor2_0 is not supported; call unfuse_qkv_projections()"),
    "fused-vae": (fused("vae"), "FusedAttnProcessor2_0 is not supported; call unfuse_qkv_projections()"),
    "ip-adapter-face-id": (
        ip_adapter(IPAdapterFaceIDImageProjection),
        "an IP-Adapter with IPAdapterFaceIDImageProjection is not supported; call unload_ip_adapter()",
    ),
    "ip-adapter-of-another-library": (
        ip_adapter(ImageProjection, own_processor),
        "an IP-Adapter with IPAdapterAttnProcessor is not supported; call unload_ip_adapter()",
    ),
    "ip-adapter-of-kolors": (
        ip_adapter(ImageProjection, text_projection),
        "an IP-Adapter of Kolors is not supported; call unload_ip_adapter()",
    ),
    **{
        f"ip-adapter-{change.__name__}": (
            ip_adapter(ImageProjection, change),
            "the IP-Adapter is not on each cross-attention, or also on other layers; call unload_ip_adapter()",
        )
        for change in (plain_processor, another_processor, more_layers_of_values, without_a_projection)
    },
    "lora": (lora, f"{ATTENTION}.to_q is a LoraLinear of tests; restore diffusers' own layer first"),
    "lora-of-another-kind": (
        another_layer(PeftLinear),
        f"{ATTENTION}.to_k is a PeftLinear of peft.tuners.lora.layer, not of LoRA, LoHa or LoKr; call unload_lora_weig",
    ),
    "another-layer": (
        another_layer(LoraLinear),
        f"{ATTENTION}.to_k is a LoraLinear of tests; restore diffusers' own layer first",
    ),
    "more-layers": (more_layers, "the model's config has no position_net.bias"),
    "offload-of-layers": (
        single_layers_offloaded,
        "offload of single layers (conv_out) is not supported; call remove_all_hooks()",
    ),
    "hooks-of-diffusers": (hooks_of_diffusers, "hooks on conv_in would not run; remove them first"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
class TestRefused:
    def test_before(self, pipe, change, message):
        undo = change(pipe)
        with pytest.raises(fastdiff.InputError, match=f"^accelerate: {re.escape(message)}") as error:
            fastdiff.accelerate(pipe)
        assert "\n" not in str(error.value)
        assert "_apply" not in vars(pipe.unet) and "_apply" not in vars(pipe.vae)
        undo()
        expected = draw(pipe)
        assert abs(draw(fastdiff.accelerate(pipe)) - expected).max() <= 1e-4

    @pytest.mark.slow
    def test_after(self, pipe, change, message):
        expected = draw(fastdiff.accelerate(pipe))
        undo = change(pipe)
        for _ in range(2):  # it stays refused
            with pytest.raises(fastdiff.InputError, match=f"^accelerate: {re.escape(message)}"):
                draw(pipe)
        undo()
        assert abs(draw(pipe) - expected).max() == 0


def hooked_layer(pipe):
    pipe.unet.mid_block.register_forward_pre_hook(lambda module, args: None)


def patched_layer(pipe):
    layer = pipe.unet.get_submodule(ATTENTION).to_v
    layer.forward = lambda x: 2 * type(layer).forward(layer, x)


def patched_model(pipe):
    pipe.unet.forward = lambda *args, **kwargs: None


def quantised(pipe):
    pipe.unet.conv_in.weight = FloatParameter(pipe.unet.conv_in.weight.detach())


BEFORE_ONLY = {
    "hook": (hooked_layer, "hooks on mid_block would not run; remove them first"),
    "patched-layer": (patched_layer, f"the forward of {ATTENTION}.to_v was replaced; undo that first"),
    "patched-model": (patched_model, "the model's forward was replaced; undo that first"),
    "quantised": (quantised, "conv_in.weight is a FloatParameter; use a model that is not quantised"),
}


@pytest.mark.parametrize(("change", "message"), BEFORE_ONLY.values(), ids=BEFORE_ONLY)
def test_refused_when_it_is_there(pipe, change, message):
    change(pipe)
    with pytest.raises(fastdiff.InputError, match=f"^accelerate: {re.escape(message)}"):
        fastdiff.accelerate(pipe)


def test_the_call_refuses_what_it_is_given(pipe):
    fastdiff.accelerate(pipe)
    with pytest.raises(fastdiff.InputError, match="cross_attention_kwargs: attention processors are not supported"):
        draw(pipe, cross_attention_kwargs={"gligen": {}})


@pytest.mark.parametrize("kind", [AttnProcessor, AttnProcessor2_0])
def test_both_plain_processors_are_followed(pipe, kind):
    expected = draw(fastdiff.accelerate(pipe))
    for part in (pipe.unet, pipe.vae):
        part.set_attn_processor(kind())
    assert abs(draw(pipe) - expected).max() == 0
    fastdiff.accelerate(fastdiff.restore(pipe))
    assert abs(draw(pipe) - expected).max() == 0


def test_a_lora_that_was_fused_counts(pipe):
    """A LoRA is loaded, fused and unloaded between two calls. It changes the weights in place, or replaces them."""
    before = draw(fastdiff.accelerate(pipe))
    unload = lora(pipe)
    layer = pipe.unet.get_submodule(ATTENTION).to_q.base_layer
    with torch.no_grad():
        layer.weight += 0.5 * torch.randn(layer.weight.shape)
    unload()
    changed = draw(pipe)
    assert abs(changed - before).max() > 1e-3
    layer.weight.data = layer.weight.data + torch.randn(layer.weight.shape)
    again = draw(pipe)
    assert abs(again - changed).max() > 1e-3
    assert abs(draw(fastdiff.restore(pipe)) - again).max() <= 1e-4


class Offload:
    """Imitates the accelerate library's model offload on one device: a move is a copy of the weights."""

    def __init__(self):
        self.moves = 0

    def add(self, model):
        model._old_forward, model._hf_hook = model.forward, self

        @functools.wraps(model._old_forward)
        def forward(*args, **kwargs):
            self._move(model)
            return model._old_forward(*args, **kwargs)

        model.forward = forward

    def remove(self, model):
        model.forward = model._old_forward
        del model._old_forward, model._hf_hook

    def _move(self, model):
        self.moves += 1
        model._apply(torch.clone)


@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_of_whole_models_goes_on(pipe, when):
    """The hook keeps the forward that it wraps, and ours replaces that one. Both can be removed in any order."""
    expected, hook = draw(pipe), Offload()
    if when == "before":
        hook.add(pipe.unet)
        fastdiff.accelerate(pipe)
    else:
        fastdiff.accelerate(pipe)
        hook.add(pipe.unet)
    assert abs(draw(pipe) - expected).max() <= 1e-4
    moves = hook.moves
    assert moves > 0
    hook.remove(pipe.unet)  # diffusers removes the hook after each call and adds it again
    hook.add(pipe.unet)
    with pytest.raises(fastdiff.InputError, match="inference only"):
        pipe.unet(torch.zeros(1, 4, 8, 8, requires_grad=True), 1, torch.zeros(1, 4, 32))
    fastdiff.accelerate(pipe)
    assert abs(draw(fastdiff.restore(pipe)) - expected).max() == 0
    assert hook.moves > moves + 1
    hook.remove(pipe.unet)
    assert abs(draw(fastdiff.accelerate(pipe)) - expected).max() <= 1e-4
    assert abs(draw(fastdiff.restore(pipe)) - expected).max() == 0


def test_restore_does_not_tear_another_patch_apart(pipe):
    fastdiff.accelerate(pipe)
    ours = pipe.unet.forward
    pipe.unet.forward = lambda *args, **kwargs: ours(*args, **kwargs)
    with pytest.raises(fastdiff.InputError, match="was replaced since it was accelerated; undo that first"):
        fastdiff.restore(pipe)
    pipe.unet.forward = ours
    fastdiff.restore(pipe)


def test_every_weight_is_watched(pipe):
    watch = Watch(pipe.unet)
    assert not watch.sees_a_change()
    for parameter in (parameter for parameter in pipe.unet.parameters() if parameter.ndim > 1):
        data = parameter.data
        parameter.data = data.clone()
        assert watch.sees_a_change()
        parameter.data = data
    assert not watch.sees_a_change()
