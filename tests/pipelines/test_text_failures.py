"""TextToImagePipeline: wrong arguments, folders and parts are errors of one line, and so is NaN."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fastdiff import InputError, LabelPipeline, NonFiniteError, Pipeline, TextToImagePipeline, UNet2DModel
from tests.support import text_pipelines
from tests.support.text_pipelines import save_tokenizer, tiny_encoder, tiny_unet, tiny_vae

pytestmark = pytest.mark.usefixtures("one_thread")

NAN = float("nan")
XL = {"prompt_embeds": torch.ones(1, 24, 72), "pooled_prompt_embeds": torch.ones(1, 24)}


def embeds(*shape, **options):
    return torch.ones(shape, **options)


ANY = {  # for every kind
    "no-prompt": ({"prompt": None}, "prompt: this model needs a prompt; give prompt or prompt_embeds"),
    "number": ({"prompt": 3}, "prompt: 3 is not a text, or a list of 1 to 50000 of them"),
    "no-prompts": ({"prompt": []}, r"prompt: \[\] is not a text"),
    "bytes": ({"prompt": b"a"}, "prompt: b'a' is not a text"),
    "numbers": ({"prompt": ["a", 3]}, r"prompt: \['a', 3\] is not a text"),
    "half-a-character": ({"prompt": "\ud800"}, "prompt: it has half a surrogate pair"),
    "negatives": ({"negative_prompt": ["a", "b"]}, "negative_prompt: 2 given for 1 prompts; give one, or one for each"),
    "negative-number": ({"negative_prompt": 3}, "negative_prompt: 3 is not a text"),
    "odd-height": ({"height": 17}, "height 17, width 16: both must be multiples of 2"),
    "odd-width": ({"width": 17}, "height 16, width 17: both must be multiples of 2"),
    "no-width": ({"width": 0}, "width: 0 is not a whole number"),
    "text-height": ({"height": "16"}, "height: '16' is not a whole number"),
    "guidance": ({"guidance_scale": -1}, "guidance_scale: -1 is not a number of at least 0"),
    "nan-guidance": ({"guidance_scale": NAN}, "guidance_scale: nan is not a number"),
    "rescale": ({"guidance_rescale": 2}, "guidance_rescale: 2 is not a number from 0 to 1"),
    "guidance-start": ({"guidance_start": -0.5}, "guidance_start: -0.5 is not a number from 0 to 1"),
    "guidance-stop": ({"guidance_stop": 1.5}, "guidance_stop: 1.5 is not a number from 0 to 1"),
    "no-interval": ({"guidance_start": 0.6, "guidance_stop": 0.5}, "guidance_stop: 0.5 is before guidance_start, 0.6"),
    "steps": ({"num_inference_steps": 0}, "num_inference_steps is 0; it must be from 1"),
    "no-images": ({"num_images_per_prompt": 0}, "num_images_per_prompt: 0 is not a whole number"),
    "seed": ({"seed": -1}, "seed: -1 is out of range"),
    "output-type": ({"output_type": "jpg"}, "output_type: 'jpg' is not one of pil, np, pt, latent"),
    "counts": ({"prompt": ["a", "b"], "batch_size": 3}, "prompt: 2 given for 3 pictures"),
    "generators": ({"prompt": ["a", "b"], "generator": [torch.Generator()]}, "prompt: 2 given for 1 pictures"),
    "latents-count": ({"latents": embeds(2, 4, 8, 8), "batch_size": 3}, "batch_size and latents are for 3 and 2 pict"),
    "latents": ({"latents": embeds(1, 3, 8, 8)}, r"latents: expected \(N, 4, H, W\), got \(1, 3, 8, 8\)"),
    "latents-size": ({"latents": embeds(1, 4, 8, 8), "height": 20}, "latents: they make pictures of height 16, but"),
    "clip-skip": ({"clip_skip": 4}, "clip_skip: 4 is not a whole number from 0 to"),
    "clip-skip-negative": ({"clip_skip": -1}, "clip_skip: -1 is not a whole number"),
    "clip-skip-half": ({"clip_skip": 0.5}, "clip_skip: 0.5 is not a whole number"),
    "labels": ({"class_labels": 3}, "class_labels: this model takes prompts; leave it out"),
    "num-images": ({"num_images": 2}, "num_images: text-to-image pipelines use num_images_per_prompt"),
    "unknown": ({"temperature": 0.5}, "temperature: text-to-image pipelines have no such argument; leave it out"),
    "unknown-none": ({"temperature": None}, "temperature: text-to-image pipelines have no such argument"),
    "ip-adapter": ({"ip_adapter_image": 1}, "ip_adapter_image: no IP-Adapter is loaded; load one with load_ip_adapter"),
    "ip-embeds": ({"ip_adapter_image_embeds": []}, "ip_adapter_image_embeds: no IP-Adapter is loaded"),
    "ip-masks": (
        {"cross_attention_kwargs": {"ip_adapter_masks": []}},
        "cross_attention_kwargs: 'ip_adapter_masks' is not supported; give scale alone",
    ),
    "attention": (
        {"cross_attention_kwargs": {"gligen": 1}},
        "cross_attention_kwargs: 'gligen' is not supported; give scale alone",
    ),
    "callback": ({"callback": print}, "callback: callback_on_step_end replaces it"),
    "return-dict": ({"return_dict": 1}, "return_dict: 1 is not true or false"),
}
SD1 = {
    "prompt-2": ({"prompt_2": "a"}, "prompt_2: this model has no second text encoder"),
    "negative-2": ({"negative_prompt_2": "a"}, "negative_prompt_2: this model has no second text encoder"),
    "pooled": ({"pooled_prompt_embeds": embeds(1, 24)}, "pooled_prompt_embeds: this model takes none"),
    "sizes": ({"target_size": (8, 8)}, "target_size: only SDXL takes it; leave it out"),
    "both": ({"prompt_embeds": embeds(1, 24, 32)}, "prompt: prompt_embeds are also given; leave out one of the two"),
    "eta": ({"eta": 0.5}, "eta is an option of ddim and tcd, not of PNDMScheduler; leave it out"),
    "both-negative": (
        {"negative_prompt": "a", "negative_prompt_embeds": embeds(1, 24, 32)},
        "negative_prompt: negative_prompt_embeds are also given",
    ),
    "negative-length": (
        {"negative_prompt_embeds": embeds(1, 20, 32)},
        "prompt_embeds, negative_prompt_embeds: they have 20 and 24 tokens; give both the same length",
    ),
}
EMBEDS = {
    "width": (embeds(1, 24, 31), r"its shape is \(1, 24, 31\); give shape \(P, L, 32\)"),
    "axes": (embeds(24, 32), r"its shape is \(24, 32\); give shape \(P, L, 32\)"),
    "none": (embeds(0, 24, 32), r"its shape is \(0, 24, 32\); give shape"),
    "dtype": (embeds(1, 24, 32, dtype=torch.int64), "it is torch.int64; give a tensor of float32"),
    "list": ([[0.0]], r"\[\[0.0\]\] is not a tensor"),
    "meta": (embeds(1, 24, 32, device="meta"), "it is a .* tensor on meta"),
    "nan": (embeds(1, 24, 32) * NAN, "it has NaN or infinity; give finite numbers"),
    "count": (embeds(2, 24, 32), None),
}
SDXL = {
    "clip-skip": ({"clip_skip": 3}, "clip_skip: 3 is not a whole number from 0 to 2"),
    "pooled": (
        XL | {"prompt": None, "pooled_prompt_embeds": None},
        "pooled_prompt_embeds: prompt_embeds needs them too",
    ),
    "no-embeds": (XL | {"prompt": None, "prompt_embeds": None}, "prompt_embeds: pooled_prompt_embeds needs them"),
    "negative-pooled": ({"negative_prompt_embeds": embeds(1, 24, 72)}, "negative_pooled_prompt_embeds: negative_promp"),
    "pooled-width": (
        XL | {"prompt": None, "pooled_prompt_embeds": embeds(1, 23)},
        r"pooled_prompt_embeds: its shape is \(1, 23\); give shape \(1, 24\)",
    ),
    "pooled-nan": (
        XL | {"prompt": None, "pooled_prompt_embeds": embeds(1, 24) * NAN},
        "pooled_prompt_embeds: it has NaN or infinity",
    ),
    "second-prompts": ({"prompt_2": ["a", "b"]}, "prompt_2: 2 given for 1 prompts"),
    "second-with-embeds": (XL | {"prompt": None, "prompt_2": "a"}, "prompt_2: prompt_embeds are also given"),
    "size": ({"original_size": 8}, "original_size: 8 is not two whole numbers from 0 to 65536, the vertical fir"),
    "sizes": ({"negative_target_size": (8, 8, 8)}, r"negative_target_size: \(8, 8, 8\) is not two whole numbers"),
    "crop": ({"crops_coords_top_left": (-1, 0)}, r"crops_coords_top_left: \(-1, 0\) is not two whole numbers"),
}
BAD = [
    pytest.param(kind, *case, id=f"{kind}-{name}")
    for kind, cases in (("sd1", ANY | SD1), ("sdxl", ANY | SDXL))
    for name, case in cases.items()
]


def assert_one_line(error) -> None:
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "options", "line"), BAD)
def test_what_cannot_be_drawn_is_one_line(kind, options, line, text_pipes):
    """The error comes before anything is drawn."""
    _, pipe = text_pipes(kind)
    with pytest.raises(InputError, match=f"^{line}") as error:
        (pipe if "return_dict" in options else pipe.stream)(**{"prompt": "a cat"} | options)
    assert_one_line(error)


@pytest.mark.parametrize("name", ["prompt_embeds", "negative_prompt_embeds"])
@pytest.mark.parametrize("case", EMBEDS)
def test_embeddings_that_do_not_fit_are_one_line(case, name, text_pipes):
    value, line = EMBEDS[case]
    _, pipe = text_pipes("sd1")
    options = {name: value} if name == "prompt_embeds" else {"prompt": "a cat", name: value}
    if case == "count":
        line = "2 given for 3 prompts; give one, or one for each"
        options = {"prompt_embeds": embeds(3, 24, 32), "negative_prompt_embeds": value}
        name = "negative_prompt_embeds"
    with pytest.raises(InputError, match=f"^{name}: {line}") as error:
        pipe.stream(**options)
    assert_one_line(error)


def test_arguments_of_diffusers_that_are_left_open_are_taken(text_pipes):
    names = ("timesteps", "sigmas", "ip_adapter_image", "cross_attention_kwargs", "prompt_embeds", "clip_skip", "eta")
    text_pipes("sd1")[1]("a cat", num_inference_steps=1, **dict.fromkeys(names))


def test_a_prompt_for_a_model_of_labels_is_one_line():
    with pytest.raises(InputError, match=r"^prompt: this model has no text encoder; leave it out, or give a Stable Di"):
        Pipeline.from_pretrained("emoji64", device="cpu")(prompt="a cat")


@pytest.fixture
def folder(text_folder, tmp_path):
    """Return a function that copies a pipeline's folder and replaces or removes some of its parts."""

    def folder(kind, **parts):
        path = tmp_path / kind
        shutil.copytree(text_folder(kind), path)
        for name, part in parts.items():
            shutil.rmtree(path / name)
            if part is not None:
                part.save_pretrained(path / name)
        return path

    return folder


def edit(path, **options):
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


CLIP, OPEN_CLIP = text_pipelines.CLIP, text_pipelines.OPEN_CLIP
PROJECTING = transformers.CLIPTextModelWithProjection
PARTS = {
    "editing": (
        "sd1",
        {"unet": lambda: tiny_unet("sd1", in_channels=8)},
        "unet: it has 8 input channels, so it is for image editing; give a text-to-image model, which has 4, or an",
    ),
    "labels": (
        "sd1",
        {"unet": lambda: tiny_unet("sd1", num_class_embeds=5)},
        "unet: it takes class labels and a prompt",
    ),
    "vae": (
        "sd1",
        {"vae": lambda: tiny_vae("sd1", latent_channels=16)},
        "vae: it decodes 16 channels, and the model den",
    ),
    "width": (
        "sd1",
        {"text_encoder": lambda: tiny_encoder(CLIP | {"hidden_size": 40})},
        "text_encoder: 40 channels of text, and the U-Net takes 32; give the text encoders",
    ),
    "widths": (
        "sdxl",
        {"text_encoder": lambda: tiny_encoder(CLIP | {"hidden_size": 40})},
        "text_encoder: 40 and 40 channels of text, and the U-Net takes 72",
    ),
    "projection": (
        "sdxl",
        {"text_encoder_2": lambda: tiny_encoder(OPEN_CLIP | {"hidden_size": 40, "projection_dim": 20}, PROJECTING)},
        "text_encoder_2: its projection has 20 channels, and the U-Net takes 24",
    ),
    "vocabulary": (
        "sd1",
        {"text_encoder": lambda: tiny_encoder(CLIP | {"vocab_size": 300})},
        "tokenizer: it makes prompts of 24 out of 548 tokens, and its text encoder has 24 positions and 300 tokens",
    ),
    "unet-of-sd": (
        "sdxl",
        {"unet": lambda: tiny_unet("sd1", cross_attention_dim=72)},
        "text_encoder_2: only an SDXL U-Net takes a second text encoder; leave it out",
    ),
    "unet-of-sdxl": (
        "sd1",
        {"unet": lambda: tiny_unet("sdxl", cross_attention_dim=32)},
        "text_encoder_2: this U-Net needs its text_embeds; give a CLIPTextModelWithProjection",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_are_one_line(case, folder):
    kind, parts, line = PARTS[case]
    path = folder(kind, **{name: make() for name, make in parts.items()})
    with pytest.raises(InputError, match=f"^{line}") as error:
        Pipeline.from_pretrained(path, device="cpu")
    assert_one_line(error)


@pytest.mark.parametrize(
    ("kind", "name", "length", "line"),
    [
        ("sdxl", "tokenizer_2", 20, "tokenizer_2: its length differs from the first tokenizer's"),
        ("sd1", "tokenizer", 30, "tokenizer: it makes prompts of 30 out of 548 tokens, and its text encoder has 24"),
    ],
)
def test_tokenizers_of_another_length_are_one_line(kind, name, length, line, folder):
    path = folder(kind, **{name: None})
    save_tokenizer(path / name, length=length)
    with pytest.raises(InputError, match=f"^{line}"):
        Pipeline.from_pretrained(path, device="cpu")


@pytest.mark.parametrize(
    ("kind", "missing", "line"),
    [
        ("sd1", "text_encoder", r"text_encoder/config\.json does not exist"),
        ("sd1", "text_encoder/model.safetensors", r"text_encoder has no model\.safetensors"),
        ("sd1", "tokenizer", r"tokenizer has neither tokenizer\.json nor vocab\.json"),
        ("sd1", "tokenizer/tokenizer.json", r"tokenizer has neither tokenizer\.json nor vocab\.json"),
        ("sd1", "vae", r"vae/config\.json does not exist"),
        ("sd1", "unet", r"config\.json does not exist"),
        ("sd1", "scheduler", r"scheduler_config\.json does not exist"),
        ("sdxl", "text_encoder_2", r"text_encoder_2/config\.json does not exist"),
        ("sdxl", "tokenizer_2", r"tokenizer_2 has neither tokenizer\.json nor vocab\.json"),
    ],
)
def test_what_is_missing_in_a_folder_is_one_line(kind, missing, line, folder):
    path = folder(kind)
    (shutil.rmtree if (path / missing).is_dir() else type(path).unlink)(path / missing)
    with pytest.raises(InputError, match=line) as error:
        Pipeline.from_pretrained(path, device="cpu")
    assert_one_line(error)


NO_TEXT = {name: [None, None] for name in ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")}


def test_sdxl_without_text_encoders_draws_from_embeddings_alone(folder):
    path = folder("sdxl")
    edit(path / "model_index.json", **NO_TEXT)
    pipe = Pipeline.from_pretrained(path, device="cpu")
    assert len(pipe(**XL, num_inference_steps=1).images) == 1
    with pytest.raises(InputError, match=r"^prompt: this pipeline has no text encoder; give prompt_embeds"):
        pipe.stream("a cat")
    with pytest.raises(
        InputError, match=r"^negative_prompt: this pipeline has no text encoder; give negative_prompt_em"
    ):
        pipe.stream(**XL, negative_prompt="a cat")
    pipe.zeros_for_no_prompt = False
    with pytest.raises(InputError, match=r"^negative_prompt_embeds: guidance needs them, as there is no text encoder"):
        pipe.stream(**XL)
    assert len(pipe(**XL, num_inference_steps=1, guidance_scale=1).images) == 1


@pytest.fixture
def parts(text_folder):
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    (encoder,), (tokenizer,) = pipe.encoders.models, pipe.encoders.tokenizers
    return {
        "unet": pipe.denoiser,
        "scheduler": pipe.scheduler,
        "vae": pipe.vae,
        "text_encoder": encoder,
        "tokenizer": tokenizer,
    }


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"unet": 3}, "unet: 3 has the wrong type; give a UNet2DConditionModel of fastdiff"),
        ({"unet": UNet2DModel}, "unet: .* has the wrong type; give a UNet2DConditionModel of fastdiff"),
        ({"vae": None}, "vae: None has the wrong type; give an AutoencoderKL or AutoencoderTiny of fastdiff"),
        ({"text_encoder": 3}, "text_encoder: 3 has the wrong type; give a CLIPTextModel of fastdiff"),
        ({"tokenizer": "a"}, "tokenizer: 'a' has the wrong type; give a CLIPTokenizer of fastdiff"),
        ({"tokenizer": None}, "text_encoder: it needs its tokenizer, .*; give both"),
        ({"text_encoder": None}, "text_encoder: it needs its tokenizer, .*; give both"),
        ({"scheduler": 3}, "scheduler: int is not a scheduler; give one"),
        ({"force_zeros_for_empty_prompt": 3}, "force_zeros_for_empty_prompt: 3 is not true or false"),
    ],
    ids=str,
)
def test_what_is_no_part_is_one_line(change, line, parts):
    with pytest.raises(InputError, match=f"^{line}"):
        TextToImagePipeline(**parts | change)


@pytest.mark.parametrize(
    ("part", "key", "line"),
    [
        ("text_encoder", "text_model.embeddings.position_embedding.weight", "text_encoder: NaN or infinity in embedd"),
        ("unet", "conv_in.bias", "unet: NaN or infinity in conv_in.bias"),
        ("vae", "decoder.conv_in.bias", r"vae: NaN or infinity in decoder\.conv_in\.bias"),
    ],
)
def test_nan_in_the_weights_names_the_part(part, key, line, folder):
    path = folder("sd1")
    (file,) = (path / part).glob("*.safetensors")
    state = load_file(file)
    state[next(name for name in state if key.endswith(name))].flatten()[0] = NAN
    save_file(state, file)
    with pytest.raises(NonFiniteError, match=line) as error:
        Pipeline.from_pretrained(path, device="cpu")
    assert_one_line(error)


@pytest.mark.parametrize(
    ("name", "key", "line"),
    [
        ("text_encoder", "final_layer_norm.bias", "the text encoder's output is NaN or infinite; try"),
        ("unet", "conv_in.bias", r"the model's output is NaN or infinite at step 1 of 3 \(timestep 501\); try"),
        ("vae", "post_quant_conv.bias", "the VAE's output is NaN or infinite; try"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_nan_while_drawing_names_the_part(name, key, line, parts):
    with torch.no_grad():
        parts[name].get_parameter(key).fill_(NAN)
    with pytest.raises(NonFiniteError, match=f"^{line}") as error:
        TextToImagePipeline(**parts)("a cat", num_inference_steps=2)
    assert_one_line(error)


def test_the_pipeline_of_labels_takes_no_unet_that_reads_text(text_pipes):
    _, ours = text_pipes("sd1")
    with pytest.raises(InputError, match="denoiser: a UNet2DConditionModel takes prompts; use it in a TextToImagePip"):
        LabelPipeline(ours.denoiser, ours.scheduler)
