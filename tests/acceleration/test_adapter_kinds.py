"""Kinds of adapters in live pipelines: DoRA, LoHa and LoKr have diffusers' pictures, and others are refused by name."""

import copy
import re

import pytest
import torch

import fastdiff
from tests.support.live.pairs import Pair, away, draw
from tests.support.pairwise import product

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # peft, at a second adapter
]


@pytest.fixture
def sd1():
    return Pair("sd1")


def lora(**options):
    return peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_v", "conv1", "proj_in"], **options)


KINDS = {
    "dora": lora(use_dora=True, lora_alpha=6),
    "bias": peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_out.0", "conv1"], lora_bias=True),
    "rank-stabilised": lora(use_rslora=True, lora_alpha=3),
    "loha": peft.LoHaConfig(r=4, alpha=2, init_weights=False, target_modules=["to_q", "conv1"]),
    "lokr": peft.LoKrConfig(r=4, alpha=2, init_weights=False, target_modules=["to_q", "conv1"], decompose_both=True),
}


@pytest.mark.parametrize("kind", KINDS)
class TestKinds:
    def test_each_kind(self, sd1, kind):
        before = sd1.check()
        for seed, name in enumerate(("first", "second")):  # at once, as the order matters for DoRA

            def add(pipe, seed=seed, name=name):
                torch.manual_seed(seed)
                peft.inject_adapter_in_model(copy.deepcopy(KINDS[kind]), pipe.unet, name)
                shrink(pipe.unet, name)

            sd1.both(add)
        ours = sd1.ours
        for names in (["first"], ["first", "second"], ["second", "first"]):
            sd1.both(lambda pipe, names=names: activate(pipe.unet, names))
            assert away(sd1.check(), before)
            before = sd1.check(cross_attention_kwargs={"scale": 0.3})
        assert sd1.ours is ours


@torch.no_grad()
def shrink(unet, adapter):
    """Make the parts of an adapter small, so that the latents stay small. Change the magnitudes of DoRA."""
    for name, parameter in unet.named_parameters():
        if f".{adapter}" in name:
            parameter.mul_(1.1 if "magnitude" in name else 2.0 if ".hada_" in name else 0.3)


def activate(unet, names):
    for module in unet.modules():
        if hasattr(module, "base_layer"):
            module.set_adapter(names)


def other_kind(pipe):
    config = peft.IA3Config(target_modules=["to_k"], feedforward_modules=[])
    peft.inject_adapter_in_model(config, pipe.unet, "first")


def two_kinds(pipe):
    peft.inject_adapter_in_model(lora(), pipe.unet, "first")
    attention = pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn1
    inner = attention.to_q
    attention.to_q = copy.deepcopy(inner)
    attention.to_q.base_layer = inner


def bias_without_bias(pipe):
    config = peft.LoraConfig(r=4, target_modules=["to_q"], lora_bias=True)
    with pytest.warns(UserWarning, match="no bias"):
        peft.inject_adapter_in_model(config, pipe.unet, "first")


REFUSED = {
    "ia3": (other_kind, r"to_k is a Linear of peft\.tuners\.ia3\.layer, not of LoRA, LoHa or LoKr"),
    "two-kinds": (two_kinds, r"adapters of two kinds, or of grouped channels, on mid_block.*to_q"),
    "bias-without-bias": (bias_without_bias, r"lora_bias on .*to_q, which has no bias"),
}


@pytest.mark.parametrize(("adapter", "when"), product(list(REFUSED), ["before", "after"], together=1))
def test_other_adapters_are_refused_by_name(adapter, when):
    change, message = REFUSED[adapter]
    pair = Pair("sd1", accelerated=when == "after")
    if when == "after":
        draw(pair.fast)
    change(pair.fast)
    for _time in range(2):
        with pytest.raises(fastdiff.InputError, match=f"^accelerate: .*{message}.*; call unload_lora_weights") as error:
            draw(fastdiff.accelerate(pair.fast) if when == "before" else pair.fast)
        assert "\n" not in str(error.value)
    pair.fast.unet.unload_lora()
    fastdiff.accelerate(pair.fast)
    pair.check()


@pytest.mark.parametrize("precision", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_in_8_bits_they_are_refused_until_they_are_unloaded(precision):
    pair = Pair("sd1", accelerated=False)
    fastdiff.accelerate(pair.fast, precision=precision)
    before = draw(pair.fast)
    with pytest.raises(fastdiff.InputError, match="a model in 8 bits cannot be saved"):  # diffusers reads the weights
        pair.fast.load_lora_weights(dict(pair.loras["first"]), adapter_name="first")
    assert torch.equal(draw(pair.fast), before)
    peft.inject_adapter_in_model(lora(), pair.fast.unet, "first")
    message = f"accelerate: LoRA layers are not supported in {precision} unless they are fused; call fuse_lora()"
    for _time in range(2):
        with pytest.raises(fastdiff.InputError, match=f"^{re.escape(message)}"):
            draw(pair.fast)
    pair.fast.unet.unload_lora()
    assert torch.equal(draw(pair.fast), before)
