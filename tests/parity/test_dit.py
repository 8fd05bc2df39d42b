"""DiTTransformer2DModel and DiTPipeline folders against diffusers' in float32, on tiny models without zero weights."""

import json
from pathlib import Path

import diffusers
import pytest
import torch

from fastdiff import DDPMScheduler, DiTTransformer2DModel, Pipeline, cli
from fastdiff.checkpoints.weights import load_weights

BASE = {
    "sample_size": 8,
    "patch_size": 2,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_embeds_ada_norm": 1000,  # diffusers' DiTPipeline uses null label 1000 for every model
}
CASES = {
    "plain": {},
    "head-width-8": {"attention_head_dim": 8},
    "head-width-72": {"attention_head_dim": 72},
    "patch-4": {"patch_size": 4},
    "patch-4-head-width-72": {"patch_size": 4, "attention_head_dim": 72, "num_attention_heads": 1},
    "patch-1": {"patch_size": 1},
    "learned-variance": {"out_channels": 8},
    "pixels": {"in_channels": 3, "out_channels": 3, "num_embeds_ada_norm": 5, "sample_size": 16, "patch_size": 4},
    "one-channel": {"in_channels": 1, "out_channels": 2},
    "three-heads": {"num_attention_heads": 3, "attention_head_dim": 12},
    "one-layer": {"num_layers": 1},
    "one-patch": {"sample_size": 2},
    "no-attention-bias": {"attention_bias": False},
    "norm-with-parameters": {"norm_elementwise_affine": True},
    "norm-eps": {"norm_eps": 0.1},
    "gelu": {"activation_fn": "gelu"},
    "silu": {"activation_fn": "linear-silu"},
    "dropout": {"dropout": 0.3},
}
VAE = {
    "block_out_channels": (8, 16),
    "norm_num_groups": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "scaling_factor": 0.5,
}
DDIM = {"clip_sample": False}


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max().item()
    assert error <= 1e-4
    assert error <= 2e-5 * theirs.abs().max().item()


@pytest.fixture
def pair(randomise):
    """Build diffusers' model with some options, and ours with the same weights."""

    def build(**options):
        theirs = randomise(diffusers.DiTTransformer2DModel(**BASE | options))
        with torch.device("meta"):
            ours = DiTTransformer2DModel.from_config(theirs.config)
        load_weights(ours, theirs.state_dict(), source="model", dtype=torch.float32, device="cpu")
        return theirs, ours

    return build


@pytest.mark.parametrize("case", CASES)
def test_option(case, pair):
    theirs, ours = pair(**CASES[case])
    side, null_label = ours.config.sample_size, ours.config.null_label
    sample = torch.randn(3, ours.config.in_channels, side, side)
    given = sample, torch.tensor([7, 801, 0]), torch.tensor([1, null_label, 4])
    with torch.no_grad():
        expected = theirs(*given).sample
    assert_close(ours(*given).sample, expected)


@pytest.mark.parametrize("side", [2, 4, 12, 18])
def test_other_sizes_than_the_trained(side, pair):
    theirs, ours = pair()
    given = torch.randn(2, 4, side, side), torch.tensor([500]), torch.tensor([3, 9])
    with torch.no_grad():
        expected = theirs(*given, return_dict=False)[0]
    assert_close(ours(*given, return_dict=False)[0], expected)


def test_more_rows_than_are_embedded_together(pair):
    theirs, ours = pair(num_layers=1)
    given = torch.randn(35, 4, 8, 8), torch.arange(35) * 25, torch.arange(35)
    with torch.no_grad():
        expected = theirs(*given).sample
    assert_close(ours(*given).sample, expected)


def test_the_older_name_of_the_class(tmp_path, pair):
    """facebook/DiT-XL-2-256 names Transformer2DModel, and has options of that class without effect."""
    theirs, _ = pair(out_channels=8)
    theirs.save_pretrained(tmp_path)
    older = {"cross_attention_dim": None, "num_vector_embeds": None, "use_linear_projection": False}
    config = json.loads((tmp_path / "config.json").read_text()) | older | {"_class_name": "Transformer2DModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = torch.randn(1, 4, 8, 8), torch.tensor([7]), torch.tensor([1])
    with torch.no_grad():
        expected = theirs(*given).sample
    assert_close(DiTTransformer2DModel.from_pretrained(tmp_path)(*given).sample, expected)


# Whole pipelines


@pytest.fixture
def save_dit(tmp_path, randomise):
    """Build a tiny DiTPipeline in diffusers, save it, and return it with its folder."""

    def save(scheduler, vae: dict | None = VAE, **options) -> tuple[diffusers.DiTPipeline, Path]:
        transformer = randomise(diffusers.DiTTransformer2DModel(**BASE | {"out_channels": 8} | options))
        with torch.no_grad():
            transformer.proj_out_2.weight.mul_(0.3)  # scaled down, as in conftest.py
        vae = vae and randomise(diffusers.AutoencoderKL(**vae, latent_channels=4))
        pipe = diffusers.DiTPipeline(transformer, vae, scheduler)
        pipe.set_progress_bar_config(disable=True)
        pipe.save_pretrained(tmp_path / "pipeline")
        return pipe, tmp_path / "pipeline"

    return save


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("out_channels", [8, 4], ids=["learned-variance", "no-variance"])
def test_ddim_pipeline_given_a_generator(guidance_scale, out_channels, save_dit):
    theirs, folder = save_dit(diffusers.DDIMScheduler(**DDIM), out_channels=out_channels)
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"class_labels": [7, 0, 999], "num_inference_steps": 6, "guidance_scale": guidance_scale}
    expected = theirs(generator=torch.Generator().manual_seed(5), output_type="pt", **options).images
    pictures = ours(
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
        **options | {"class_labels": torch.tensor([7, 0, 999])},
    ).images
    assert pictures.shape == expected.shape == (3, 3, 16, 16)
    assert expected.std() > 0.02  # a real picture, so the comparison can fail
    assert (pictures - expected).abs().max() <= 1e-3


def test_the_pipelines_own_guidance_scale(save_dit):
    theirs, folder = save_dit(diffusers.DDIMScheduler(**DDIM))
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"num_inference_steps": 3, "output_type": "np"}
    expected = theirs([3], generator=torch.Generator().manual_seed(5), **options).images
    pictures = ours(class_labels=3, generator=torch.Generator().manual_seed(5), **options).images
    assert abs(pictures - expected).max() <= 1e-3


@pytest.fixture
def step_by_step():
    """A loop over diffusers' transformer and scheduler. Its pipeline would drop the learned variance."""

    @torch.no_grad()
    def loop(transformer, scheduler, x, labels, guidance_scale, steps, generator):
        learned = str(scheduler.config.get("variance_type")).startswith("learned")
        scheduler.set_timesteps(steps)
        null = torch.full_like(labels, transformer.config.num_embeds_ada_norm)
        for t in scheduler.timesteps:
            output, unguided = transformer(torch.cat([x, x]), t[None], torch.cat([labels, null])).sample.chunk(2)
            eps, variance = output.split(x.shape[1], dim=1)
            unguided = unguided[:, : x.shape[1]]
            eps = unguided + guidance_scale * (eps - unguided)
            output = torch.cat([eps, variance], dim=1) if learned else eps
            x = scheduler.step(output, t, x, generator=generator).prev_sample
            yield x

    return loop


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
@pytest.mark.parametrize("variance_type", ["learned_range", "fixed_small"])
def test_ddpm(variance_type, guidance_scale, save_dit, step_by_step):
    theirs, folder = save_dit(diffusers.DDPMScheduler(variance_type=variance_type, clip_sample=False))
    ours = Pipeline.from_pretrained(folder, device="cpu")
    assert isinstance(ours.scheduler, DDPMScheduler)
    latents, labels = torch.randn(2, 4, 8, 8), torch.tensor([4, 400])
    expected = step_by_step(
        theirs.transformer, theirs.scheduler, latents, labels, guidance_scale, 5, torch.Generator().manual_seed(3)
    )
    steps = ours.stream(
        latents=latents, class_labels=labels, num_inference_steps=5, guidance_scale=guidance_scale,
        generator=torch.Generator().manual_seed(3), output_type="pt",
    )  # fmt: skip
    for step, x in zip(steps, expected, strict=True):
        assert (step.x_t.permute(0, 3, 1, 2) - x).abs().max() <= 1e-4 * x.abs().max()
    with torch.no_grad():
        pictures = theirs.vae.decode(x / theirs.vae.config.scaling_factor).sample
    assert (step.images - (pictures / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-3


def test_pixels(save_dit, step_by_step):
    """A folder without a VAE, guided with a null label that only the architecture defines."""
    options = {"in_channels": 3, "out_channels": 6, "patch_size": 4, "sample_size": 16, "num_embeds_ada_norm": 5}
    theirs, folder = save_dit(diffusers.DDIMScheduler(), vae=None, **options)
    ours = Pipeline.from_pretrained(folder, device="cpu")
    latents, labels = torch.randn(2, 3, 16, 16), torch.tensor([4, 0])
    expected = step_by_step(theirs.transformer, theirs.scheduler, latents, labels, 2.0, 4, None)
    steps = ours.stream(
        latents=latents, class_labels=labels, num_inference_steps=4, guidance_scale=2.0, output_type="pt"
    )
    for step, x in zip(steps, expected, strict=True):
        assert (step.x_t.permute(0, 3, 1, 2) - x).abs().max() <= 1e-4 * x.abs().max()
    assert (step.images - (x / 2 + 0.5).clamp(0, 1)).abs().max() <= 1e-4


def test_a_folder_that_names_some_labels_only(save_dit, capsys):
    """diffusers accepts any names, so such folders exist. Every label can still be drawn and is listed."""
    theirs, folder = save_dit(diffusers.DDIMScheduler(**DDIM))
    index = json.loads((folder / "model_index.json").read_text())
    index["id2label"] = {"0": "tench, Tinca tinca", "7": "cock", "999": "toilet tissue"}
    (folder / "model_index.json").write_text(json.dumps(index))
    theirs = diffusers.DiTPipeline.from_pretrained(folder)
    theirs.set_progress_bar_config(disable=True)
    ours = Pipeline.from_pretrained(folder, device="cpu")
    options = {"num_inference_steps": 3, "output_type": "np"}
    expected = theirs(
        [*theirs.get_label_ids(["Tinca tinca", "cock"]), 8], generator=torch.Generator().manual_seed(5), **options
    ).images
    pictures = ours(
        class_labels=["Tinca tinca", "cock", 8], generator=torch.Generator().manual_seed(5), **options
    ).images
    assert abs(pictures - expected).max() <= 1e-3
    assert cli.main(["models", str(folder)]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[-1000:]]
    names = {"0": "tench, Tinca tinca", "7": "cock", "999": "toilet tissue"}
    assert listed == [[str(label), names.get(str(label), str(label))] for label in range(1000)]
