"""Embeddings against diffusers: the same files, tokens and prompts give the same encodings and latents."""

import copy

import diffusers
import pytest
import torch
from safetensors.torch import save_file

from fastdiff import Pipeline
from fastdiff.checkpoints import hub
from tests.support.text_parity import assert_both_draw_the_same
from tests.support.text_pipelines import text_pipeline

ERROR = 1e-5  # relative to the largest value

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
]

PROMPTS = (
    *("a <cat-toy> photo", "<cat-toy>", "photo of<cat-toy>riding", "<cat-toy>, <cat-toy> and the <cat-toy>"),
    *("a photo of <dog>", "<dog> beside <cat-toy>", "the cat, without either"),
    "the photo of the astronaut riding the cat, " * 3 + "<cat-toy>",  # cut in the middle of the vectors, or before
    "<cat-toy> <dog>-" * 12,
)


def vectors(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def assert_encoded_alike(theirs, ours, prompt, **options):
    options |= {"prompt": prompt, "device": "cpu", "num_images_per_prompt": 1, "do_classifier_free_guidance": True}
    for found, wanted in zip(ours.encode_prompt(**options), theirs.encode_prompt(**options), strict=True):
        assert (found - wanted).abs().max() <= ERROR * wanted.abs().max(), prompt


@pytest.fixture(scope="module")
def saved_emoji_sd():
    folder = hub.bundled_models()["emoji-sd"]
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture
def emoji_sd(saved_emoji_sd):
    """Return diffusers' pipeline of the bundled model and ours, which a test may change."""
    return copy.deepcopy(saved_emoji_sd), Pipeline.from_pretrained("emoji-sd", device="cpu")


@pytest.fixture
def sdxl(text_folder):
    return text_pipeline("sdxl"), Pipeline.from_pretrained(text_folder("sdxl"), device="cpu")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(5, marks=pytest.mark.slow)])
def test_a_file_of_diffusers(emoji_sd, tmp_path, count):
    theirs, ours = emoji_sd
    save_file({"<cat-toy>": vectors(count, 160)}, tmp_path / "learned_embeds.safetensors")
    save_file({"<other>": vectors(2, 160, seed=1)}, tmp_path / "dog.safetensors")
    for pipe in emoji_sd:
        pipe.load_textual_inversion(str(tmp_path))
        pipe.load_textual_inversion(str(tmp_path / "dog.safetensors"), token="<dog>")
    for prompt in PROMPTS:
        assert ours.maybe_convert_prompt(prompt, ours.tokenizer) == theirs.maybe_convert_prompt(
            prompt, theirs.tokenizer
        )
        assert_encoded_alike(theirs, ours, prompt)
    assert_encoded_alike(theirs, ours, [*PROMPTS], negative_prompt=[*PROMPTS[::-1]])


@pytest.mark.parametrize("count", [1, 3])
def test_a_vector_of_one_dimension_and_a_dict(emoji_sd, count):
    theirs, ours = emoji_sd
    for pipe in emoji_sd:
        pipe.load_textual_inversion([{"<cat-toy>": vectors(1, 160)[0]}, {"<dog>": vectors(count, 160, seed=1)}])
    for prompt in PROMPTS:
        assert_encoded_alike(theirs, ours, prompt)


def test_a_tensor_of_several_tokens_and_the_dict_of_a_pickle(emoji_sd):
    theirs, ours = emoji_sd
    of_a1111 = {"string_to_token": {"*": 265}, "string_to_param": {"*": vectors(2, 160, seed=1)}, "name": "<dog>"}
    for pipe in emoji_sd:
        pipe.load_textual_inversion(vectors(3, 160), token=["<s0>", "<s1>", "<cat-toy>"])
        pipe.load_textual_inversion(of_a1111)
    for prompt in (*PROMPTS, "<s1><s0> <s0>"):
        assert_encoded_alike(theirs, ours, prompt)


def test_after_some_are_unloaded(emoji_sd):
    theirs, ours = emoji_sd
    for pipe in emoji_sd:
        for i, name in enumerate(("<a>", "<cat-toy>", "<b>", "<dog>")):
            pipe.load_textual_inversion({name: vectors(1, 160, seed=i)})
        pipe.unload_textual_inversion(["<a>", "<b>"])
    for prompt in (*PROMPTS, "<a> and <b>"):
        assert_encoded_alike(theirs, ours, prompt)


def test_both_encoders_of_sdxl(sdxl, tmp_path):
    """diffusers loads each encoder's tensor with a call of its own."""
    theirs, ours = sdxl
    state = {"clip_l": vectors(2, 32), "clip_g": vectors(2, 40, seed=1)}
    save_file(state, tmp_path / "cat-toy.safetensors")
    first = {"tokenizer": theirs.tokenizer, "text_encoder": theirs.text_encoder}
    second = {"tokenizer": theirs.tokenizer_2, "text_encoder": theirs.text_encoder_2}
    theirs.load_textual_inversion(state["clip_l"], token="cat-toy", **first)
    theirs.load_textual_inversion(state["clip_g"], token="cat-toy", **second)
    ours.load_textual_inversion(tmp_path / "cat-toy.safetensors")
    theirs.load_textual_inversion({"<dog>": vectors(1, 40)}, **second)
    ours.load_textual_inversion({"<dog>": vectors(1, 40)}, tokenizer=ours.tokenizer_2, text_encoder=ours.text_encoder_2)
    prompts = [prompt.replace("<cat-toy>", "cat-toy") for prompt in PROMPTS]
    for prompt in prompts:
        assert_encoded_alike(theirs, ours, prompt, prompt_2="the cat-toy", negative_prompt="a cat-toy")
    options = {"prompt": prompts[0], "negative_prompt": prompts[1]}
    assert_both_draw_the_same(theirs, ours, **options)


def test_a_folder_that_diffusers_saved_with_embeddings(emoji_sd, tmp_path):
    """diffusers saves the tokens and the larger table, and expands the tokens of the folder too."""
    theirs, _ = emoji_sd
    theirs.load_textual_inversion({"<cat-toy>": vectors(3, 160)})
    theirs.save_pretrained(tmp_path)
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path)
    ours = Pipeline.from_pretrained(tmp_path, device="cpu")
    for pipe in (again, ours):
        pipe.load_textual_inversion({"<dog>": vectors(2, 160, seed=1)})
    for prompt in PROMPTS:
        assert_encoded_alike(again, ours, prompt)
