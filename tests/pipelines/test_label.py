"""LabelPipeline: a seed's picture does not depend on the batch; its arguments, and what it refuses."""

import diffusers
import numpy as np
import pytest
import torch

from fastdiff import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMScheduler,
    DiTTransformer2DModel,
    InputError,
    LabelPipeline,
    NonFiniteError,
    Pipeline,
    UNet2DModel,
)
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import Load
from fastdiff.checkpoints.model_card import ModelCard
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion import conditioning, pictures
from fastdiff.requests import request as settings
from tests.support.pairwise import product

TINY = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 16,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
TINY_DIT = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_embeds_ada_norm": 20,
}
LABELS = ModelInfo(labels=("cat", "dog"), null_label=2, guidance_scale=2.0, num_inference_steps=3)


@pytest.fixture
def make(randomise):
    def make(scheduler=None, info=None, **unet):
        model = randomise(UNet2DModel.from_config(TINY | unet))
        return LabelPipeline(model, scheduler or DDIMScheduler(), info)

    return make


@pytest.fixture
def labelled(make):
    return make(info=LABELS, num_class_embeds=3)


@pytest.fixture
def make_dit(randomise):
    def make(scheduler=None, info=None, vae=None, **options):
        model = randomise(DiTTransformer2DModel.from_config(TINY_DIT | options))
        return LabelPipeline(model, scheduler or DDIMScheduler(), info, vae=vae)

    return make


@pytest.fixture
def vae(randomise):
    """A tiny VAE with two pixels for each latent."""
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return randomise(AutoencoderKL.from_config(blocks | {"block_out_channels": (8, 16), "norm_num_groups": 4}))


@pytest.fixture(scope="module")
def emoji():
    return Pipeline.from_pretrained("emoji64", device="cpu")


COMPANY = {
    "ddim-guided": (DDIMScheduler, {"class_labels": "twemoji fruit", "guidance_scale": 2.0}),
    "ddim-eta": (DDIMScheduler, {"class_labels": "twemoji fruit", "eta": 0.8, "guidance_scale": 1.0}),
    "ddpm": (DDPMScheduler, {"class_labels": "twemoji fruit"}),
}


@pytest.mark.parametrize("model", ["small", pytest.param("emoji64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", COMPANY)
def test_same_seed_same_bits_in_any_company(emoji, make, model, case):
    """A seed gives the same bits alone and at any place of a batch of four, in float32."""
    scheduler, options = COMPANY[case]
    options = {"num_inference_steps": 2, "output_type": "pt"} | options
    pipe = make(info=emoji.info, num_class_embeds=217, sample_size=16) if model == "small" else emoji
    if scheduler is DDPMScheduler:
        pipe = LabelPipeline(
            pipe.denoiser,
            DDPMScheduler.from_config(emoji.scheduler.config),
            ModelInfo(emoji.info.labels, null_label=216),
        )
    alone = pipe(seed=11, **options).images[0]
    for place, seeds in enumerate([[11, 3, 4, 5], [2, 11, 4, 5], [2, 3, 4, 11]]):
        batch = pipe(seed=seeds, **options).images
        assert torch.equal(batch[[0, 1, 3][place]], alone)
        assert not torch.equal(batch[2], alone)


def test_other_labels_in_the_batch_change_nothing(labelled):
    options = {"num_inference_steps": 3, "output_type": "pt", "batch_size": 3}
    alone = labelled(seed=5, class_labels="cat", output_type="pt", num_inference_steps=3).images[0]
    mixed = labelled(seed=[4, 5, 6], class_labels=["dog", "cat", None], **options).images
    assert torch.equal(mixed[1], alone)


def test_the_bits_do_not_depend_on_the_callers_threads(emoji):
    options = {"num_inference_steps": 2, "class_labels": 3, "output_type": "pt"}
    before = torch.get_num_threads()
    expected = emoji(**options).images
    try:
        torch.set_num_threads(1)
        assert torch.equal(emoji(**options).images, expected)
    finally:
        torch.set_num_threads(before)


def test_a_call_leaves_the_thread_settings_alone(emoji):
    before = torch.get_num_threads()
    emoji(num_inference_steps=1, class_labels=3)
    assert torch.get_num_threads() == before


DIT_COMPANY = {
    "ddim-guided": (DDIMScheduler(), {"guidance_scale": 2.0}),
    "ddim-eta": (DDIMScheduler(), {"eta": 0.8}),
    "ddpm-learned-variance": (DDPMScheduler(variance_type="learned_range"), {"guidance_scale": 2.0}),
}


@pytest.mark.parametrize(("case", "chunk"), product(list(DIT_COMPANY), [1, 3, 6], together=1))
def test_same_bits_of_a_transformer_in_any_company(make_dit, vae, monkeypatch, case, chunk):
    """A picture's bits depend neither on the other labels and seeds nor on the chunks of the conditioning table."""
    scheduler, options = DIT_COMPANY[case]
    pipe = make_dit(scheduler, vae=vae, in_channels=4, out_channels=8)
    options = {"num_inference_steps": 8, "output_type": "pt"} | options
    alone = pipe(seed=11, class_labels=7, **options).images[0]
    assert alone.isfinite().all() and alone.std() > 0
    entry = 4 * pipe.denoiser.conditioning_width
    monkeypatch.setattr(conditioning, "TABLE_BYTES", chunk * 4 * entry)
    for place, labels in enumerate([[7, 3, 4], [2, 7, None], [9, 9, 7]]):
        seeds = [1, 2, 3]
        seeds[place] = 11
        batch = pipe(seed=seeds, class_labels=labels, batch_size=3, **options).images
        assert torch.equal(batch[place], alone)


def test_pictures_are_labels_times_seeds(labelled):
    options = {"output_type": "pt", "num_inference_steps": 2}
    images = labelled(class_labels=["cat", "dog"], num_images=2, seed=7, **options).images
    one_by_one = [labelled(class_labels=label, seed=seed, **options).images[0] for label in (0, 1) for seed in (7, 8)]
    assert torch.equal(images, torch.stack(one_by_one))


def test_diffusers_label_tensor_is_one_label_per_picture(labelled):
    images = labelled(class_labels=torch.tensor([0, 1, 1]), num_inference_steps=1, output_type="pt").images
    assert len(images) == 3
    assert not torch.equal(images[1], images[2])  # their seeds differ


def test_identity_labels(make):
    pipe = make(class_embed_type="identity")
    rows = torch.randn(2, 64)
    assert pipe(class_labels=rows, num_inference_steps=2, output_type="np").images.shape == (2, 8, 8, 3)


def test_starting_noise_is_the_cpu_generators_of_the_seed(make):
    pipe = make()
    latents = torch.randn(1, 3, 8, 8, generator=torch.Generator("cpu").manual_seed(9))
    options = {"num_inference_steps": 2, "output_type": "pt"}
    assert torch.equal(pipe(seed=9, **options).images, pipe(latents=latents, **options).images)


def test_guidance_scale_1_is_the_plain_model(labelled):
    options = {"class_labels": "cat", "num_inference_steps": 2, "output_type": "pt"}
    plain = labelled(guidance_scale=1.0, **options).images
    assert not torch.equal(labelled(**options).images, plain)
    assert torch.equal(labelled(guidance_scale=1, **options).images, plain)


def test_model_info_gives_the_defaults(labelled):
    assert [step.num_steps for step in labelled.stream(class_labels=0)] == [3, 3, 3]


def test_ddpm_takes_all_training_steps_by_default(make):
    pipe = make(scheduler=DDPMScheduler(num_train_timesteps=7))
    assert len(list(pipe.stream())) == 7


def test_stream_shows_every_step_and_ends_with_the_pictures(make):
    pipe = make()
    steps = list(pipe.stream(num_inference_steps=4, num_images=2))
    assert [step.index for step in steps] == [0, 1, 2, 3]
    assert [step.timestep for step in steps] == [750, 500, 250, 0]
    assert [step.images is None for step in steps] == [True, True, True, False]
    assert [picture.size for picture in steps[1].preview()] == [(8, 8), (8, 8)]
    assert [picture.tobytes() for picture in steps[1].preview()] == [
        picture.tobytes() for picture in pipe.decode(steps[1].x0, "pil")
    ]


def test_output_types(make):
    pipe = make()
    options = {"num_inference_steps": 2, "num_images": 2}
    as_pt, as_np = (pipe(output_type=kind, **options).images for kind in ("pt", "np"))
    (as_pil,) = pipe(return_dict=False, **options)
    np.testing.assert_array_equal(as_pt.permute(0, 2, 3, 1), as_np)
    np.testing.assert_array_equal(np.stack(as_pil), (as_np * 255).round().astype(np.uint8))


def test_grey_pictures(make):
    (image,) = make(in_channels=1, out_channels=1)(num_inference_steps=1).images
    assert image.mode == "L"


def test_other_sizes(make):
    assert make()(num_inference_steps=1, height=4, width=12).images[0].size == (12, 4)


def test_a_transformers_null_label_is_its_own(make_dit):
    pipe = make_dit()
    options = {"num_inference_steps": 2, "output_type": "pt"}
    assert torch.equal(pipe(**options).images, pipe(class_labels=20, **options).images)
    guided = pipe(class_labels=3, guidance_scale=2.0, **options).images
    assert not torch.equal(guided, pipe(class_labels=3, **options).images)


def test_latents_become_pictures_of_the_vaes_size(make_dit, vae):
    pipe = make_dit(vae=vae, in_channels=4, out_channels=4)
    options = {"num_inference_steps": 2, "class_labels": 3}
    assert [picture.size for picture in pipe(num_images=2, **options).images] == [(16, 16)] * 2
    steps = list(pipe.stream(height=24, width=24, output_type="pt", **options))
    assert steps[0].x_t.shape == (1, 12, 12, 4)
    assert steps[0].preview()[0].size == (24, 24)
    with torch.no_grad():
        expected = vae.decode(steps[-1].x_t.permute(0, 3, 1, 2) / vae.config.scaling_factor).sample
    torch.testing.assert_close(steps[-1].images, (expected / 2 + 0.5).clamp(0, 1), rtol=0, atol=1e-5)


def test_a_vae_of_other_latents_is_refused(make_dit, vae):
    with pytest.raises(InputError, match="decodes 4 channels, and the model denoises 3"):
        make_dit(vae=vae)


def test_a_vae_of_another_class_is_refused(make_dit):
    with pytest.raises(
        InputError, match=r"^vae: .* has the wrong type; give an AutoencoderKL or AutoencoderTiny of fastdiff"
    ):
        make_dit(vae=torch.nn.Identity())


@pytest.mark.parametrize(
    ("size", "message"),
    [({"height": 18, "width": 18}, "multiples of 4"), ({"height": 16, "width": 24}, "draws squares")],
    ids=["multiple", "square"],
)
def test_sizes_that_a_transformer_of_latents_cannot_draw(make_dit, vae, size, message):
    pipe = make_dit(vae=vae, in_channels=4, out_channels=4)
    with pytest.raises(InputError, match=message):
        pipe.stream(class_labels=3, num_inference_steps=1, **size)


def test_to_moves_the_vae_too(make_dit, vae):
    pipe = make_dit(vae=vae, in_channels=4, out_channels=4).to(torch.bfloat16)
    assert (pipe.dtype, vae.dtype) == (torch.bfloat16, torch.bfloat16)
    assert pipe(num_inference_steps=2, class_labels=3, output_type="pt").images.dtype == torch.float32


def test_diffusers_scheduler_is_taken_over(make):
    pipe = make()
    pipe.scheduler = diffusers.DDPMScheduler(variance_type="fixed_large")
    assert isinstance(pipe.scheduler, DDPMScheduler)
    assert pipe.scheduler.config.variance_type == "fixed_large"


def test_seeds_have_one_range_everywhere():
    assert pictures.MAX_SEED == settings.MAX_SEED


REFUSED = {
    "steps-0": ({"num_inference_steps": 0}, "num_inference_steps"),
    "steps-beyond-training": ({"num_inference_steps": 1001}, "num_inference_steps"),
    "num-images-0": ({"num_images": 0}, "num_images: 0"),
    "num-images-not-whole": ({"num_images": 1.5}, "num_images: 1.5"),
    "seed-negative": ({"seed": -1}, "seed: -1"),
    "seed-too-large": ({"seed": 2**32}, "seed: 4294967296"),
    "seed-runs-over": ({"seed": 2**32 - 1, "num_images": 2}, "seed: 4294967296"),
    "seed-not-a-number": ({"seed": "x"}, "seed: 'x'"),
    "no-seeds": ({"seed": []}, "seed"),
    "label-unknown": ({"class_labels": "bird"}, "bird"),
    "label-out-of-range": ({"class_labels": 3}, "label 3"),
    "labels-for-another-batch": ({"class_labels": [0, 1], "batch_size": 3}, "class_labels: 2 given for 3"),
    "counts-disagree": ({"batch_size": 2, "latents": torch.zeros(3, 3, 8, 8)}, "batch_size and latents"),
    "latents-channels": ({"latents": torch.zeros(1, 4, 8, 8)}, "latents"),
    "size": ({"height": 7}, "height 7, width 8"),
    "guidance-nan": ({"guidance_scale": float("nan")}, "guidance_scale"),
    "output-type": ({"output_type": "jpg"}, "output_type: 'jpg'"),
    "eta": ({"eta": 2.0}, "eta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_work(labelled, case):
    options, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        labelled.stream(**{"class_labels": 0} | options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_labels_for_an_unconditional_model(make):
    with pytest.raises(InputError, match="unconditional"):
        make().stream(class_labels=1)


def test_guidance_without_a_null_label(make):
    with pytest.raises(InputError, match="null label"):
        make(num_class_embeds=3).stream(class_labels=1, guidance_scale=2)


def test_no_label_without_a_null_label(make):
    with pytest.raises(InputError, match="give labels, 0 to 2"):
        make(num_class_embeds=3).stream()


def test_eta_for_ddpm(make):
    with pytest.raises(InputError, match="eta"):
        make(scheduler=DDPMScheduler()).stream(eta=0.5, num_inference_steps=2)


def test_learned_variance_without_its_channels(make):
    with pytest.raises(InputError, match="learned_range"):
        make(scheduler=DDPMScheduler(variance_type="learned_range")).stream(num_inference_steps=2)


def test_nan_is_an_error_not_a_black_picture(make):
    pipe = make()
    pipe.denoiser.conv_out.bias.data[1] = float("nan")
    with pytest.raises(NonFiniteError, match="at step 1 of 2"):
        pipe(num_inference_steps=2)


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "mps", "meta"])
def test_device_that_is_not_there(device):
    with pytest.raises(InputError, match="device"):
        Pipeline.from_pretrained("emoji64", device=device)


def test_unknown_dtype():
    with pytest.raises(InputError, match="dtype: 'int8'"):
        Pipeline.from_pretrained("emoji64", device="cpu", dtype="int8")


def test_plain_model_folder_has_no_scheduler(tmp_path):
    diffusers.UNet2DModel(**TINY).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="scheduler"):
        Pipeline.from_pretrained(tmp_path)


def test_a_name_is_resolved_once_and_a_card_never(monkeypatch):
    card, resolved = ModelCard.read("emoji64", hub.resolve("emoji64")), []
    resolve = hub.resolve
    monkeypatch.setattr(hub, "resolve", lambda name, **options: resolved.append(name) or resolve(name, **options))
    by_name = Pipeline.from_pretrained("emoji64", device="cpu")
    assert resolved == ["emoji64"]
    by_card = Pipeline.from_card(card, Load.of(device="cpu"))
    assert resolved == ["emoji64"]
    assert by_card.name == by_name.name == "emoji64" and by_card.info == by_name.info == card.info
    assert by_card.scheduler.config == by_name.scheduler.config
