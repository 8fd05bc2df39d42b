"""IP-Adapters in live pipelines: diffusers' latents, loaded before or after accelerate, by the pipeline's methods."""

import pytest
import torch

import fastdiff
from fastdiff.models.prompt import PromptCheck
from tests.parity.control.pipelines import KINDS as CONTROLLED
from tests.parity.image_prompts.adapters import ip_adapter, nested, picture, with_encoder
from tests.parity.image_starts import pictures as starts
from tests.support.live.pairs import Pair, away, draw
from tests.support.pairwise import product
from tests.support.text_pipelines import tiny_controlnet

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers
]
TIMESTEPS = torch.arange(900, 0, -300)
EMBEDS = torch.randn(2, 1, 24, generator=torch.Generator().manual_seed(5))  # of a plain adapter: both halves


class Prompted(Pair):
    """Two equal pipelines with image encoders, and the same IP-Adapters once they are loaded."""

    def __init__(self, kind="sd1", *adapters, accelerated=True):
        super().__init__(kind, accelerated=False)
        self.both(with_encoder)
        self.adapters = adapters
        if accelerated:
            fastdiff.accelerate(self.fast)
        if adapters:
            self.load_adapters(*adapters)

    def load_adapters(self, *adapters):
        files = [nested(ip_adapter(self.plain.unet, adapter, i)) for i, adapter in enumerate(adapters)]
        self.both(lambda pipe: load(pipe, files))
        self.adapters = adapters

    def unload(self):
        self.both(lambda pipe: pipe.unload_ip_adapter())
        self.adapters = ()

    def scale(self, scale):
        self.both(lambda pipe: pipe.set_ip_adapter_scale(scale))

    def check(self, **options):
        given = {"ip_adapter_image": [picture(i) for i in range(len(self.adapters))]} if self.adapters else {}
        return super().check(**given | options)

    @property
    def reader(self):
        return self.ours.image_reader


def load(pipe, files):
    count = len(files)
    pipe.load_ip_adapter(files, [""] * count, [""] * count, image_encoder_folder=None, low_cpu_mem_usage=False)


@pytest.fixture(scope="module")
def shared():
    """A pair with a plain adapter, which tests leave as it is."""
    return Prompted("sd1", "plain")


@pytest.fixture
def pair(shared):
    yield shared
    shared.scale(1.0)


@pytest.mark.parametrize(
    ("kind", "adapter", "when"), product(["sd1", "sdxl"], ["plain", "plus"], ["before", "after"], together=1)
)
def test_latents_are_those_of_diffusers(kind, adapter, when):
    pair = Prompted(kind, *[adapter] * (when == "before"), accelerated=False)
    fastdiff.accelerate(pair.fast)
    if when == "after":
        plain = pair.check()
        pair.load_adapters(adapter)
        assert away(pair.check(), plain)
    first = pair.check()
    assert torch.equal(pair.check(), first)
    assert away(pair.check(ip_adapter_image=picture(7)), first)
    with pytest.raises(fastdiff.InputError, match="inference only"):  # ours runs
        pair.fast.unet(torch.zeros(1, 4, 8, 8, requires_grad=True), 1, torch.zeros(1, 4, 32))


def test_a_full_adapter():
    """It has a token for each patch, which diffusers' layers make."""
    pair = Prompted()
    tensors = ip_adapter(pair.plain.unet)
    for name in [name for name in tensors if name.startswith("image_proj.")]:
        del tensors[name]
    shapes = {"0.weight": (32, 32), "0.bias": (32,), "2.weight": (32, 32), "2.bias": (32,), "3.weight": (32,)}
    generator = torch.Generator().manual_seed(1)
    for name, shape in (shapes | {"3.bias": (32,)}).items():
        tensors[f"image_proj.proj.{name}"] = torch.randn(shape, generator=generator) / 5
    pair.both(lambda pipe: load(pipe, [nested(tensors)]))
    assert away(pair.check(ip_adapter_image=picture()), pair.check(ip_adapter_image=picture(1)))


class TestScales:
    def test_a_scale_makes_no_new_model_and_no_new_programs(self, pair):
        first, ours = pair.check(), pair.ours
        programs = [len(each._programs) for each in ours._graphs.values()]
        for scale in (0.3, {"down": {"block_0": [0.7]}, "up": {"block_1": [0.0, 1.2]}}, -0.5, 0):
            pair.scale(scale)
            latents = pair.check()
            assert away(latents, first)
        assert pair.ours is ours and [len(each._programs) for each in ours._graphs.values()] == programs
        pair.scale(1.0)
        assert torch.equal(pair.check(), first)

    def test_several_adapters(self):
        pair = Prompted("sdxl", "plain", "plus")
        first = pair.check()
        pair.scale([0.3, {"up": {"block_0": [0.0, 1.0]}}])
        mixed = pair.check(ip_adapter_image=[picture(0), [picture(1), picture(2)]])
        assert away(mixed, first)
        pair.scale([{"mid": 0.5}, 0.8])
        assert away(pair.check(ip_adapter_image=[picture(0), [picture(1), picture(2)]]), mixed)

    def test_a_scale_at_each_step(self, pair):
        def fade(pipe, step, timestep, tensors):
            pipe.set_ip_adapter_scale(0.5 - step)
            return tensors

        first = pair.check(num_inference_steps=4)
        assert away(pair.check(num_inference_steps=4, callback_on_step_end=fade), first)

    @pytest.mark.parametrize("scale", [[[0.5, 0.7]], float("nan"), None])
    def test_no_number(self, scale, pair):
        first = pair.check()
        for attention in pair.fast.unet.attn_processors.values():
            if hasattr(attention, "scale"):
                attention.scale = [scale]
        with pytest.raises(
            fastdiff.InputError, match=r"accelerate: the scale .* of an IP-Adapter is not a finite numb"
        ):
            draw(pair.fast, ip_adapter_image=picture())
        pair.fast.set_ip_adapter_scale(1.0)
        assert torch.equal(pair.check(), first)


def test_unload_after_accelerate():
    """Our model stays, and has the bits of the plain one again. So does the next adapter."""
    pair = Prompted("sd1")
    plain = pair.check()
    pair.load_adapters("plain")
    first, ours = pair.check(), pair.ours
    pair.unload()
    assert torch.equal(pair.check(), plain)
    assert pair.ours is ours and pair.reader is None
    pair.both(with_encoder)
    pair.load_adapters("plain")
    assert torch.equal(pair.check(), first)
    pair.load_adapters("plus")
    assert away(pair.check(), first)


CALLS = {
    "unguided": {"guidance_scale": 1.0},
    "batch": {"prompt": ["a cat", "riding"], "num_images_per_prompt": 2},
    "more-than-are-remembered": {"num_images_per_prompt": 5},
    "two-pictures": {"ip_adapter_image": [[picture(0), picture(1, 20, 70)]]},
    "embeds": {"ip_adapter_image": None, "ip_adapter_image_embeds": [EMBEDS]},
}


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_calls(options, pair):
    assert away(
        pair.check(**options), pair.check(**options | {"prompt": ["astronaut"] * len(options.get("prompt", "1"))})
    )


@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
def test_beside_a_controlnet(kind):
    pair = Prompted(kind, "plain", accelerated=False)
    net = tiny_controlnet(kind)
    plain, fast = (
        starts.of_same_parts(CONTROLLED["text"], kind, pipe, controlnet=net) for pipe in (pair.plain, pair.fast)
    )
    given = {"ip_adapter_image": picture(), "image": starts.picture(width=16, height=16)}
    expected = draw(plain, **given)
    fastdiff.accelerate(fast)
    for _ in range(2):
        assert (draw(fast, **given) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_beside_a_lora():
    pytest.importorskip("peft")
    pair = Prompted("sd1", "plus")
    first, ours = pair.check(), pair.ours
    pair.load("first")
    assert away(pair.check(), first)
    assert away(pair.check(cross_attention_kwargs={"scale": 0.5}), first)
    pair.both(lambda pipe: pipe.unload_lora_weights())
    assert torch.equal(pair.check(), first) and pair.ours is ours


def count_calls(pair, monkeypatch):
    calls = []
    (layer,) = pair.fast.unet.encoder_hid_proj.image_projection_layers
    run = type(layer).forward
    monkeypatch.setattr(type(layer), "forward", lambda self, x: calls.append(x) or run(self, x))
    return calls


class TestOncePerLoop:
    @pytest.mark.parametrize("pictures", [1, 5])
    def test_the_layers_run_once_for_each_row(self, pictures, pair, monkeypatch):
        calls = count_calls(pair, monkeypatch)
        draw(pair.fast, ip_adapter_image=picture(), num_images_per_prompt=pictures, num_inference_steps=4)
        assert len(calls) == 2 * pictures

    def test_a_row_has_the_same_bits_alone(self):
        pair = Prompted("sd1", "plain", "plus")
        pair.check()
        embeds = [torch.randn(3, 2, 24), torch.randn(3, 2, 10, 32)]

        def read(rows):
            check = PromptCheck(pair.ours.config, torch.float32, torch.device("cpu"), len(embeds[0][rows]))
            _, images = pair.reader(check, {"image_embeds": [each[rows] for each in embeds]})
            return images

        for i in range(3):
            alone, together = read(slice(i, i + 1)), read(slice(0, 3))
            assert all(torch.equal(one, each[i : i + 1]) for one, each in zip(alone, together, strict=True))

    def loop(self, pair, change=lambda unet, embeds: None, both=None):
        """Run a loop with two prompts at each step, and make a change after each step."""
        sample, texts = torch.randn(1, 4, 8, 8), [torch.randn(1, 5, 32) for _ in range(2)]
        both = both or [torch.randn(1, 1, 24) for _ in texts]
        with torch.no_grad():
            for t in TIMESTEPS:
                for text, embeds in zip(texts, both, strict=True):
                    given = sample, t, text
                    added = {"added_cond_kwargs": {"image_embeds": [embeds]}}
                    expected, ours = (pipe.unet(*given, **added).sample for pipe in (pair.plain, pair.fast))
                    assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max(), t
                pair.both(lambda pipe: change(pipe.unet, both if pipe is pair.fast else [torch.zeros(1)] * 2))

    def test_two_prompts_at_each_step(self, pair, monkeypatch):
        calls = count_calls(pair, monkeypatch)
        self.loop(pair)
        theirs = 6  # diffusers' own U-Net calls the layers at each step
        assert len(calls) == theirs + 2

    @pytest.mark.parametrize("part", ["encoder_hid_proj.image_projection_layers.0.norm.weight", "to_v_ip"])
    def test_a_write_to_a_weight_counts_at_the_next_step(self, part):
        def write(unet, embeds):
            processor = unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor
            (processor.to_v_ip[0].weight if part == "to_v_ip" else unet.get_parameter(part)).mul_(-1.5)

        self.loop(Prompted("sd1", "plain"), write)

    def test_a_write_to_the_embeddings_counts_at_the_next_step(self):
        self.loop(Prompted("sd1", "plain"), lambda unet, embeds: [each.mul_(-1.5) for each in embeds])

    def test_another_write_counts_when_the_loop_starts_again(self):
        pair, both = Prompted("sd1", "plain"), [torch.randn(1, 1, 24) for _ in range(2)]
        for _time in range(2):
            self.loop(pair, both=both)
            for pipe in (pair.plain, pair.fast):
                pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor.to_k_ip[0].weight.data.mul_(-3)


class TestParameters:
    def test_stay_where_they_are_and_are_restored(self):
        pair = Prompted("sd1", "plus", accelerated=False)
        expected, state = draw(pair.fast, ip_adapter_image=picture()), dict(pair.fast.unet.state_dict())
        before = {name: each.clone() for name, each in state.items()}
        parts = {name: each.data_ptr() for name, each in state.items() if "_ip." in name or "hid_proj" in name}
        fastdiff.accelerate(pair.fast)
        pair.check()
        after = pair.fast.unet.state_dict()
        assert len(parts) > 50 and all(after[name].data_ptr() == place for name, place in parts.items())
        assert after.keys() == before.keys() and all(torch.equal(after[name], each) for name, each in before.items())
        fastdiff.restore(pair.fast)
        assert torch.equal(draw(pair.fast, ip_adapter_image=picture()), expected)

    @pytest.mark.slow
    def test_another_dtype(self):
        pair = Prompted("sd1", "plain")
        first = pair.check(ip_adapter_image=None, ip_adapter_image_embeds=[EMBEDS])
        pair.both(lambda pipe: pipe.unet.to(torch.float64))
        given = torch.randn(2, 4, 8, 8).double(), 1, torch.randn(2, 4, 32).double()
        added = {"image_embeds": [EMBEDS.double()]}
        with torch.no_grad():
            found, expected = (pipe.unet(*given, added_cond_kwargs=added).sample for pipe in (pair.fast, pair.plain))
        assert found.dtype == torch.float64 and (found - expected).abs().max() <= 1e-6 * expected.abs().max()
        pair.both(lambda pipe: pipe.unet.to(torch.float32))
        assert torch.equal(pair.check(ip_adapter_image=None, ip_adapter_image_embeds=[EMBEDS]), first)

    def test_8_bits(self):
        """The layers of the IP-Adapter keep their values. An adapter cannot be loaded later."""
        pair = Prompted("sd1", "plain", accelerated=False)
        fastdiff.accelerate(pair.fast, precision="int8")
        assert (
            pair.fast.unet.mid_block.attentions[0]
            .transformer_blocks[0]
            .attn2.processor.to_k_ip[0]
            .weight.isfinite()
            .all()
        )
        found, expected = draw(pair.fast, ip_adapter_image=picture()), draw(pair.plain, ip_adapter_image=picture())
        assert 0 < (found - expected).norm() < 0.1 * expected.norm()
        pair.fast.set_ip_adapter_scale(0.2)
        assert away(draw(pair.fast, ip_adapter_image=picture()), found)
        with pytest.raises(fastdiff.InputError, match=r"a model in 8 bits cannot be moved; call fastdiff\.restore"):
            load(pair.fast, [nested(ip_adapter(pair.plain.unet))])


class TestRefused:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (None, "missing, but an IP-Adapter is loaded; give ip_adapter_image, or call unload_ip_adapter"),
            ({}, "missing, but an IP-Adapter is loaded"),
            ({"image_embeds": []}, "0 tensors for 1 IP-Adapters; give a list with one for each"),
            ({"image_embeds": 3}, "3 for 1 IP-Adapters"),
            ({"image_embeds": [EMBEDS[:1].numpy()]}, "is not a tensor"),
            ({"image_embeds": [EMBEDS]}, r"its shape is \(2, 1, 24\); it must be \(1, L, 24\)"),
            ({"image_embeds": [EMBEDS[:1, :, :8]]}, r"its shape is \(1, 1, 8\); it must be \(1, L, 24\)"),
            ({"image_embeds": [EMBEDS[:1]], "text_embeds": EMBEDS}, "this model takes no text_embeds"),
        ],
        ids=["none", "empty", "no-tensors", "number", "array", "rows", "width", "others"],
    )
    def test_embeddings(self, given, message, pair):
        unet = pair.fast.unet
        with pytest.raises(fastdiff.InputError, match=f"^added_cond_kwargs.*{message}"), torch.no_grad():
            unet(torch.zeros(1, 4, 8, 8), 1, torch.zeros(1, 4, 32), added_cond_kwargs=given)

    def test_a_single_tensor_is_for_the_only_adapter(self, pair):
        given = torch.randn(1, 4, 8, 8), 1, torch.randn(1, 4, 32)
        with torch.no_grad():
            found = pair.fast.unet(*given, added_cond_kwargs={"image_embeds": EMBEDS[:1, 0]}).sample
            expected = pair.plain.unet(*given, added_cond_kwargs={"image_embeds": [EMBEDS[:1]]}).sample
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    def test_masks(self, pair):
        first = pair.check()
        given = {
            "ip_adapter_image": picture(),
            "cross_attention_kwargs": {"ip_adapter_masks": [torch.ones(1, 1, 16, 16)]},
        }
        with pytest.raises(fastdiff.InputError, match=r"^cross_attention_kwargs: ip_adapter_masks are not supported"):
            draw(pair.fast, **given)
        assert torch.equal(pair.check(), first)
