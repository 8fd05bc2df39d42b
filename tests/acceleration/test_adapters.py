"""Adapters of peft in live pipelines: diffusers' pictures, without a new model of ours, and plain weights untouched."""

import copy
import pickle

import pytest
import torch

import fastdiff
from tests.support.live.loras import random_lora
from tests.support.live.pairs import Pair, away, draw
from tests.support.text_pipelines import text_pipeline

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # peft, at a second adapter
]
ATTENTION = ("attn1.to_q", "attn2.to_k", "attn2.to_v", "ff.net.0.proj")
NARROW = {"seed": 1, "targets": ATTENTION}


@pytest.fixture(params=["sd1", pytest.param("sdxl", marks=pytest.mark.slow)])
def pair(request):
    return Pair(request.param)


@pytest.fixture
def sd1():
    return Pair("sd1")


@pytest.fixture
def kept(pair):
    """Check after a test that our model and its programs are the same objects as before."""
    plain = pair.check()
    ours, programs = pair.ours, dict(pair.ours._graphs)
    yield plain
    assert pair.ours is ours
    assert programs and programs.items() <= ours._graphs.items()


class TestOperations:
    def test_load_set_disable_delete_and_unload(self, pair, kept):
        pair.load("first")
        first = pair.check()
        assert away(first, kept)
        pair.load("second")
        assert away(pair.check(), first)  # it is the only active one
        pair.both(lambda pipe: pipe.set_adapters(["first", "second"], [0.7, -0.4]))
        mixed = pair.check()
        assert away(mixed, first)
        pair.both(lambda pipe: pipe.disable_lora())
        assert torch.equal(pair.check(), kept)
        pair.both(lambda pipe: pipe.enable_lora())
        assert torch.equal(pair.check(), mixed)
        pair.both(lambda pipe: pipe.set_adapters("first"))
        assert torch.equal(pair.check(), first)
        pair.both(lambda pipe: pipe.set_adapters("first", 0.0))
        assert torch.equal(pair.check(), kept)
        pair.both(lambda pipe: pipe.set_adapters(["first", "second"], [0.7, -0.4]))
        pair.both(lambda pipe: pipe.delete_adapters("second"))
        assert away(pair.check(), mixed)
        pair.both(lambda pipe: pipe.unload_lora_weights())
        assert torch.equal(pair.check(), kept)

    def test_weights_of_blocks(self, pair, kept):
        pair.loras["first"] = random_lora(pair.plain.unet, **NARROW)
        pair.load("first")
        whole = pair.check()
        for weights in ({"mid": 0.2, "down": 0.5}, {"mid": 1.5, "up": {"block_1": 0.0}, "down": 0.5}):
            pair.both(lambda pipe, weights=weights: pipe.set_adapters("first", {"unet": weights}))
            assert away(pair.check(), whole)

    def test_fuse_and_unfuse(self, pair, kept):
        pair.load("first")
        before = pair.check()
        pair.both(lambda pipe: pipe.fuse_lora(lora_scale=0.5))
        fused = pair.check()
        assert away(fused, before) and away(fused, kept)
        pair.both(lambda pipe: pipe.unfuse_lora())
        pair.check()
        pair.both(lambda pipe: pipe.fuse_lora(safe_fusing=True))
        pair.check()
        pair.both(lambda pipe: pipe.disable_lora())  # peft unfuses at the next call
        assert not away(pair.check(), kept)
        pair.both(lambda pipe: pipe.enable_lora())
        pair.both(lambda pipe: pipe.fuse_lora())
        fused = pair.check()
        pair.both(lambda pipe: pipe.unload_lora_weights())
        assert torch.equal(pair.check(), fused)

    def test_scale_of_a_call(self, pair, kept):
        pair.load("first", "second")
        pair.both(lambda pipe: pipe.set_adapters(["first", "second"], [0.7, 0.4]))
        whole = pair.check()
        half = pair.check(cross_attention_kwargs={"scale": 0.5})
        assert away(half, whole)
        assert torch.equal(pair.check(cross_attention_kwargs={"scale": 0.5}), half)
        assert torch.equal(pair.check(), whole)
        pair.check(cross_attention_kwargs={"scale": 0.0})
        assert away(pair.check(), whole)  # diffusers gives each adapter the weight 1 after the scale 0

    def test_hotswap(self, pair, kept):
        """Equal ranks are copied through `.data`: nothing but the values changes, and torch counts no write."""
        pair.load("first")
        first, others = pair.check(), (("equal", 4), ("smaller", 2), ("larger", 6))
        for seed, (_name, rank) in enumerate(others):
            state = random_lora(pair.plain.unet, 10 + seed, rank)
            pair.hotswap(state)
            latents = pair.check()
            assert away(latents, first)
            first = latents
        pair.both(lambda pipe: pipe.unload_lora_weights())
        assert torch.equal(pair.check(), kept)

    def test_hotswap_with_padded_ranks(self, pair, kept):
        pair.both(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
        pair.load("first")
        first = pair.check()
        state = random_lora(pair.plain.unet, 10, rank=6)
        pair.hotswap(state)
        second = pair.check()
        assert away(second, first)
        for layer in pair.fast.unet.modules():
            if hasattr(layer, "scaling"):
                layer.scaling["first"].data.mul_(2)
        assert away(draw(pair.fast), second)


class TestLoops:
    """Loops that call the U-Net themselves."""

    BLOCK = "mid_block.attentions.0.transformer_blocks.0"
    TIMESTEPS = torch.arange(900, 0, -300)

    @pytest.fixture(autouse=True)
    def no_grad(self):
        with torch.no_grad():
            yield

    def run(self, pair, scales=(1.0, 1.0, 1.0), change=lambda unet: None):
        """Run a loop with two texts at each step, and make a change after each step."""
        sample, *texts = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32), torch.randn(1, 5, 32)
        for t, scale in zip(self.TIMESTEPS, scales, strict=True):
            for text in texts:
                given = {"cross_attention_kwargs": {"scale": scale}}
                expected, found = (pipe.unet(sample, t, text, **given).sample for pipe in (pair.plain, pair.fast))
                assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), t
            pair.both(lambda pipe: change(pipe.unet))

    def test_a_scale_counts_at_once(self, sd1):
        sd1.load("first")
        self.run(sd1, scales=(1.0, 0.5, 1.0))

    @pytest.mark.parametrize("part", ["attn2.to_v", "ff.net.0.proj"])
    def test_a_write_that_torch_counts_counts_at_the_next_step(self, sd1, part):
        sd1.load("first")
        self.run(sd1, change=lambda unet: unet.get_submodule(f"{self.BLOCK}.{part}").lora_B["first"].weight.mul_(-2))
        self.run(sd1, change=lambda unet: unet.get_submodule(f"{self.BLOCK}.{part}").base_layer.weight.mul_(1.5))

    def test_another_write_counts_when_the_loop_starts_again(self, sd1):
        sd1.load("first")
        for _time in range(2):
            self.run(sd1)
            sd1.both(
                lambda pipe: pipe.unet.get_submodule(f"{self.BLOCK}.attn2.to_v").lora_A["first"].weight.data.mul_(-3)
            )


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_before_accelerate(kind):
    pair = Pair(kind, accelerated=False)
    pair.load("first")
    fastdiff.accelerate(pair.fast)
    first = pair.check()
    pair.both(lambda pipe: pipe.set_adapters("first", 0.3))
    assert away(pair.check(), first)
    ours = pair.ours
    pair.both(lambda pipe: pipe.unload_lora_weights())
    plain = pair.check()
    assert pair.ours is ours and torch.equal(plain, draw(fastdiff.accelerate(text_pipeline(kind))))


class TestParameters:
    @pytest.fixture
    def before(self, sd1):
        return {name: tensor.clone() for name, tensor in sd1.plain.unet.state_dict().items()}

    def test_keep_plain_values(self, sd1, before):
        sd1.load("first")
        sd1.check()
        state = sd1.fast.unet.state_dict()
        for name, tensor in before.items():
            path, _, kind = name.rpartition(".")
            found = state.get(name, state.get(f"{path}.base_layer.{kind}"))
            assert torch.equal(found, tensor), name
        sd1.both(lambda pipe: pipe.unload_lora_weights())
        for _time in range(2):  # before and after the next call
            state = sd1.fast.unet.state_dict()
            assert state.keys() == before.keys()
            assert all(torch.equal(state[name], before[name]) for name in before)
            sd1.check()

    def test_share_memory_with_our_model_again(self, sd1):
        addresses = [each.data_ptr() for each in sd1.fast.unet.parameters()]
        sd1.load("first")
        sd1.check()
        sd1.both(lambda pipe: pipe.unload_lora_weights())
        sd1.check()
        assert [each.data_ptr() for each in sd1.fast.unet.parameters()] == addresses

    @pytest.mark.parametrize("unloaded", ["before", "after"])
    def test_restore(self, sd1, before, unloaded):
        plain = draw(sd1.plain)
        sd1.load("first")
        expected = draw(sd1.plain)
        sd1.check()
        if unloaded == "before":
            sd1.fast.unload_lora_weights()
        fastdiff.restore(sd1.fast)
        if unloaded == "after":
            assert torch.equal(draw(sd1.fast), expected)
            sd1.fast.unload_lora_weights()
        assert torch.equal(draw(sd1.fast), plain)
        state = sd1.fast.unet.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
        assert all(state[name].stride() == tensor.stride() for name, tensor in before.items())

    def test_a_model_that_moves_or_is_copied(self, sd1):
        sd1.load("first")
        sd1.check()
        other = copy.deepcopy(sd1.fast.unet)
        sd1.both(lambda pipe: pipe.to(torch.float64))
        assert sd1.fast.unet.conv_in.base_layer.weight.dtype == torch.float64
        sd1.check()
        sd1.both(lambda pipe: pipe.to(torch.float32))
        expected = sd1.check()
        sd1.fast.unload_lora_weights()
        sd1.fast.unet = other
        assert torch.equal(draw(sd1.fast), expected)

    def test_a_model_that_is_pickled(self, sd1):
        sd1.load("first")
        expected = sd1.check()
        sd1.fast.unet = pickle.loads(pickle.dumps(sd1.fast.unet))
        assert torch.equal(sd1.check(), expected)

    def test_weights_that_change_below_an_adapter(self, sd1):
        sd1.load("first")
        before = sd1.check()

        def write(pipe):
            pipe.unet.conv_in.base_layer.weight.data.neg_()  # not counted by torch

        sd1.both(write)
        assert away(sd1.check(), before)
        sd1.both(lambda pipe: pipe.unload_lora_weights())
        sd1.check()


@pytest.mark.parametrize("scale", [None, "1", float("nan"), [1.0]])
def test_a_scale_that_is_no_number(sd1, scale):
    with pytest.raises(fastdiff.InputError, match=r"cross_attention_kwargs: scale .* is not a finite number"):
        sd1.fast.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 4, 32), cross_attention_kwargs={"scale": scale})


def test_other_attention_arguments_beside_a_scale_are_refused(sd1):
    given = {"scale": 1.0, "gligen": {}}
    with pytest.raises(fastdiff.InputError, match="cross_attention_kwargs: attention processors are not supported"):
        sd1.fast.unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 4, 32), cross_attention_kwargs=given)
    assert given == {"scale": 1.0, "gligen": {}}


def test_a_vae(sd1):
    config = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "conv1", "conv_in"])
    z, before = torch.randn(1, 4, 8, 8), None
    with torch.no_grad():
        for _time in range(2):
            expected, found = (pipe.vae.decode(z).sample for pipe in (sd1.plain, sd1.fast))
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
            assert before is None or away(found, before)
            before = found
            sd1.both(lambda pipe: (torch.manual_seed(0), peft.inject_adapter_in_model(config, pipe.vae, "first")))


def test_what_is_merged_is_rounded_once():
    """In bfloat16, the weights are the sum in float32, rounded to bfloat16."""
    pair = Pair("sd1")
    pair.fast.unet.to(torch.bfloat16)
    pair.load("first", "second")
    pair.fast.set_adapters(["first", "second"], [0.7, -0.4])
    layer = pair.fast.unet.mid_block.resnets[0].conv1
    sample, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 32)
    with torch.no_grad():
        pair.fast.unet(sample.bfloat16(), 3, text.bfloat16())
        parts = ((0.7, "first"), (-0.4, "second"))
        weight = layer.base_layer.weight.float()
        for scale, name in parts:
            product = layer.lora_B[name].weight.float().flatten(1) @ layer.lora_A[name].weight.float().flatten(1)
            weight = weight + scale * product.view(weight.shape)
        assert torch.equal(pair.ours.mid_block.resnets[0].conv1.weight, weight.bfloat16())
