"""Textual inversion: what a load changes, what it leaves alone, and what it refuses."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff import InputError, NonFiniteError
from fastdiff.pipelines import Pipeline

PROMPTS = ["a photo of <cat>", "the cat riding", "<CAT> and <cat>"]

pytestmark = pytest.mark.usefixtures("one_thread")


def vectors(count=2, width=32, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def load(text_folder):
    return lambda kind="sd1", **options: Pipeline.from_pretrained(text_folder(kind), device="cpu", **options)


@pytest.fixture
def pipe(load):
    return load()


@pytest.fixture
def sdxl(load):
    return load("sdxl")


@pytest.fixture(scope="module")
def refusing(text_folder):
    """Return a pipeline with an embedding, which the refused loads share: each leaves it as it was."""
    pipe = Pipeline.from_pretrained(text_folder("sd1"), device="cpu")
    pipe.load_textual_inversion({"<old>": vectors(2, seed=1)})
    return pipe


def encoded(pipe, prompt=PROMPTS, **options):
    return [each for each in pipe.encode_prompt(prompt=prompt, **options) if each is not None]


def drawn(pipe, **options):
    return pipe(**{"prompt": PROMPTS, "num_inference_steps": 2, "output_type": "latent"} | options).images


def same(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_on_off_and_on_again_have_equal_bits(pipe):
    plain = encoded(pipe), drawn(pipe)
    pipe.load_textual_inversion({"<cat>": vectors()})
    loaded = encoded(pipe), drawn(pipe)
    assert not same(loaded[0], plain[0]) and not same(loaded[1], plain[1])
    assert torch.equal(loaded[0][0][1], plain[0][0][1]), "a prompt without the token is the same"
    pipe.unload_textual_inversion()
    for found, expected in zip((encoded(pipe), drawn(pipe)), plain, strict=True):
        assert same(found, expected)
    pipe.load_textual_inversion({"<cat>": vectors()})
    for found, expected in zip((encoded(pipe), drawn(pipe)), loaded, strict=True):
        assert same(found, expected)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_prompt_has_the_same_bits_in_any_batch(load, kind):
    pipe = load(kind)
    state = {"clip_l": vectors(3, 32), "clip_g": vectors(3, 40)} if kind == "sdxl" else vectors(3)
    pipe.load_textual_inversion(state, token="<cat>")
    together, pictures = encoded(pipe), drawn(pipe)
    for i, prompt in enumerate(PROMPTS):
        assert same([each[0] for each in encoded(pipe, prompt)], [each[i] for each in together])
        assert torch.equal(drawn(pipe, prompt=prompt)[0], pictures[i])


def test_the_denoiser_keeps_its_graphs_and_the_encoder_makes_its_own_anew(pipe):
    before = drawn(pipe)
    drawn(pipe)
    programs = dict(pipe.unet._graphs), dict(pipe.vae._graphs)
    assert programs[0] and pipe.text_encoder._graphs
    pipe.load_textual_inversion({"<cat>": vectors()})
    assert not pipe.text_encoder._graphs
    first = [drawn(pipe) for _ in range(3)]  # plainly, traced, replayed
    assert same(first[0], first[1]) and same(first[0], first[2]) and not same(first[0], before)
    assert (dict(pipe.unet._graphs), dict(pipe.vae._graphs)) == programs


def test_case_does_not_count_and_all_vectors_follow_their_token(pipe):
    pipe.load_textual_inversion({"MyCat": vectors(3)})
    tokenizer = pipe.tokenizer
    assert pipe.maybe_convert_prompt("a mycat.", tokenizer) == "a MyCat MyCat_1 MyCat_2."
    assert pipe.maybe_convert_prompt(["MYCAT", "a dog"], tokenizer) == ["MyCat MyCat_1 MyCat_2", "a dog"]
    assert tokenizer(tokenizer.expand("myCAT")).ids[1:4] == tuple(range(tokenizer.size, tokenizer.size + 3))
    assert same(encoded(pipe, "a mycat"), encoded(pipe, "a MyCat"))


def test_vectors_are_read_before_the_prompt_is_cut(pipe, caplog):
    pipe.load_textual_inversion({"<cat>": vectors(5)})
    caplog.clear()
    encoded(pipe, "the " * 19 + "<cat>")
    assert caplog.messages == ["prompt: longer than the 24 tokens that the model reads; cut: '<cat>_3 <cat>_4'"]


def test_saved_folders_and_states_do_not_have_them(pipe, tmp_path):
    state, config = pipe.text_encoder.state_dict(), pipe.text_encoder.config
    pipe.save_pretrained(tmp_path / "plain")
    pipe.load_textual_inversion({"<cat>": vectors()})
    assert pipe.text_encoder.state_dict().keys() == state.keys() and pipe.text_encoder.config == config
    pipe.save_pretrained(tmp_path / "loaded")
    for path in sorted((tmp_path / "plain").rglob("*.*")):
        assert path.read_bytes() == (tmp_path / "loaded" / path.relative_to(tmp_path / "plain")).read_bytes(), path
    assert pipe.text_encoder.num_parameters() == sum(each.numel() for each in state.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_vectors_have_the_encoders_dtype(load, dtype):
    pipe = load(dtype=dtype)
    pipe.load_textual_inversion({"<cat>": vectors()})
    assert torch.equal(pipe.text_encoder.added_tokens, vectors().to(dtype))
    pipe.text_encoder.to(torch.float32)
    assert torch.equal(pipe.text_encoder.added_tokens, vectors().to(dtype).float())


def test_the_callers_tensor_may_change_afterwards(pipe):
    mine = vectors()
    pipe.load_textual_inversion({"<cat>": mine})
    mine.zero_()
    assert torch.equal(pipe.text_encoder.added_tokens, vectors())


def test_remembered_texts_are_encoded_anew(pipe):
    pipe.encoders.remember(8)
    plain = encoded(pipe)
    pipe.load_textual_inversion({"<cat>": vectors()})
    loaded = encoded(pipe)
    assert not same(loaded, plain)
    pipe.unload_textual_inversion("<cat>")
    assert same(encoded(pipe), plain)
    pipe.load_textual_inversion({"<cat>": vectors(seed=1)})
    assert not same(encoded(pipe), loaded) and not same(encoded(pipe), plain)


def test_pipelines_that_share_an_encoder_share_its_embeddings(pipe):
    other = Pipeline.from_pipe(pipe)
    other.load_textual_inversion({"<cat>": vectors()})
    assert same(encoded(pipe), encoded(other))
    for alike in (copy.deepcopy(pipe.text_encoder), pickle.loads(pickle.dumps(pipe.text_encoder))):
        assert same(encoded(pipe.with_parts(text_encoder=alike)), encoded(pipe))


def test_another_encoder_or_tokenizer_needs_an_unload(pipe, load):
    other = load()
    pipe.load_textual_inversion({"<cat>": vectors()})
    for part in ("text_encoder", "tokenizer"):
        with pytest.raises(InputError, match="call unload_textual_inversion before you replace"):
            setattr(pipe, part, getattr(other, part))
    pipe.unload_textual_inversion()
    pipe.text_encoder = other.text_encoder


def test_folders_and_weight_names(pipe, tmp_path):
    save_file({"emb_params": vectors()}, tmp_path / "blurb.safetensors")
    pipe.load_textual_inversion(tmp_path)
    assert dict(pipe.tokenizer.embeddings) == {"blurb": 2}
    save_file({"emb_params": vectors(1)}, tmp_path / "second.safetensors")
    with pytest.raises(InputError, match="has 2 safetensors files; name the embedding's file with weight_name="):
        pipe.load_textual_inversion(tmp_path)
    pipe.load_textual_inversion(tmp_path.parent, subfolder=tmp_path.name, weight_name="second.safetensors", token="bb")
    save_file({"<named>": vectors(1)}, tmp_path / "learned_embeds.safetensors")
    pipe.load_textual_inversion(str(tmp_path))
    assert dict(pipe.tokenizer.embeddings) == {"blurb": 2, "bb": 1, "<named>": 1}


def test_sdxl_takes_a_pair_at_once_and_unloads_both(sdxl, tmp_path):
    plain = encoded(sdxl)
    save_file({"clip_l": vectors(2, 32), "clip_g": vectors(2, 40)}, tmp_path / "<cat>.safetensors")
    sdxl.load_textual_inversion(tmp_path)
    whole = encoded(sdxl)
    sdxl.unload_textual_inversion("<cat>", text_encoder=sdxl.text_encoder_2)
    assert (dict(sdxl.tokenizer.embeddings), dict(sdxl.tokenizer_2.embeddings)) == ({"<cat>": 2}, {})
    sdxl.load_textual_inversion(tmp_path, tokenizer=sdxl.tokenizer_2)
    assert same(encoded(sdxl), whole)
    sdxl.unload_textual_inversion()
    assert same(encoded(sdxl), plain)
    sdxl.load_textual_inversion(load_file(tmp_path / "<cat>.safetensors"), token=["<s0>", "<s1>"])
    assert dict(sdxl.tokenizer_2.embeddings) == {"<s0>": 1, "<s1>": 1}
    assert same(encoded(sdxl, "<s0> <s1>"), encoded_as(sdxl, tmp_path, "<cat>"))


def encoded_as(pipe, file, prompt):
    pipe.unload_textual_inversion()
    pipe.load_textual_inversion(file)
    return encoded(pipe, prompt)


def broken(value):
    return {"<new>": torch.cat([vectors(), torch.full((1, 32), value)])}


REFUSED = {
    "nan": (broken(float("nan")), {}, "NaN or infinity in its vectors"),
    "infinity": (broken(float("inf")), {}, "NaN or infinity in its vectors"),
    "width-of-sd1": ({"<new>": vectors(1, 768)}, {}, "768 channels, so it is for Stable Diffusion 1, and .* has 32"),
    "width-of-sd2": ({"<new>": vectors(1, 1024)}, {}, "1024 channels, so it is for Stable Diffusion 2, and"),
    "width-of-sdxl": ({"<new>": vectors(1, 1280)}, {}, "is for the second text encoder of Stable Diffusion XL, and"),
    "another-width": ({"<new>": vectors(1, 33)}, {}, "33 channels, so it is for a text encoder of width 33, and"),
    "a-pair": ({"clip_l": vectors(), "clip_g": vectors(2, 40)}, {"token": "<new>"}, "it is for Stable Diffusion XL"),
    "too-many": ({"<new>": vectors(23)}, {}, "token <new>: 23 vectors, and a prompt has room for 22"),
    "many-more": ({"<new>": torch.zeros(10**5, 32)}, {}, "100000 vectors, and a prompt has room for 22"),
    "none": ({"<new>": vectors(0)}, {}, r"is empty: '<new>' has the shape \(0, 32\)"),
    "no-dict-entry": ({}, {}, "is no embedding: its tensors are none"),
    "two-tensors": ({"<a>": vectors(), "<b>": vectors()}, {}, "is no embedding: its tensors are '<a>', '<b>'"),
    "three-dimensions": ({"<new>": vectors()[None]}, {}, r"has the shape \(1, 2, 32\); an embedding has"),
    "whole-numbers": ({"<new>": vectors().int()}, {}, "torch.int32; give a tensor of"),
    "not-a-tensor": ({"<new>": [1.0]}, {}, r"\[1.0\] is not a tensor"),
    "no-name": (vectors(), {}, "nothing names its token; give token="),
    "a-word": ({"a": vectors(1)}, {}, "token a: is already in the vocabulary of the tokenizer"),
    "end-token": ({"<|EndOfText|>": vectors(1)}, {}, "is already in the vocabulary"),
    "loaded": ({"<old>": vectors(1)}, {}, r"an embedding with this token is loaded; call .*\('<old>'\) first"),
    "loaded-in-another-case": ({"<OLD>": vectors(1)}, {}, "token <OLD>: is already in the vocabulary"),
    "a-vector-of-another": ({"<old>_1": vectors(1)}, {}, "token <old>_1: is already in the vocabulary"),
    "the-next-vector": ({"<old>_2": vectors(1)}, {}, "it would name a vector of the token <old>"),
    "space": ({"my cat": vectors()}, {}, "token: 'my cat' has a space"),
    "line-break": ({"my\ncat": vectors()}, {}, "is not a text of 1 to 256 letters"),
    "empty-token": (vectors(), {"token": ""}, "token: '' is not a text of 1 to 256 letters"),
    "long-token": (vectors(), {"token": "x" * 257}, "is not a text of 1 to 256 letters"),
    "number-as-token": (vectors(), {"token": 7}, "token: 7 is neither a text nor a list"),
    "twice": ([vectors(), vectors()], {"token": ["<new>", "<new>"]}, "has a token twice"),
    "same-names": ([{"<new>": vectors()}, {"<new>": vectors()}], {}, "token <new>: two embeddings have it"),
    "fewer-tokens": ([{"<a>": vectors()}, {"<b>": vectors()}], {"token": "<new>"}, "1 given for 2 embeddings"),
    "other-count": (vectors(3), {"token": ["<a>", "<new>"]}, "2 tokens for the 3 vectors"),
    "no-embedding": ([], {}, "an empty list; give an embedding"),
    "second-is-bad": ([{"<new>": vectors()}, {"<b>": vectors(1, 7)}], {}, "7 channels"),
    "misspelt": (vectors(), {"tokens": ["<new>"]}, "tokens: .* has no such argument; did you mean token"),
    "pickles": ("some/where", {"use_safetensors": False, "token": "<new>"}, "loading a pickle can run code"),
    "bad-subfolder": ("some/where", {"subfolder": 7}, "subfolder"),
    "no-file": ("nowhere.safetensors", {}, "nowhere.safetensors does not exist"),
    "foreign-tokenizer": (vectors(), {"tokenizer": object(), "token": "<new>"}, "tokenizer: .* is not this pipeline's"),
    "foreign-encoder": (vectors(), {"text_encoder": 7, "token": "<new>"}, "text_encoder: 7 is not this pipeline's"),
    "a1111-without-vectors": ({"string_to_param": {}, "name": "<new>"}, {}, "holds no vectors under '\\*'"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_load_leaves_everything_as_it_was(refusing, source, options, message):
    prompts = ["<old> photo", "<new> <a> <b>"]
    before, words = encoded(refusing, prompts), refusing.tokenizer.embeddings
    with pytest.raises(InputError, match=message) as error:
        refusing.load_textual_inversion(source, **options)
    assert "\n" not in str(error.value)
    assert refusing.tokenizer.embeddings == words and same(encoded(refusing, prompts), before)


def test_nan_is_also_a_non_finite_error_and_float16_has_a_range(pipe, load):
    with pytest.raises(NonFiniteError):
        pipe.load_textual_inversion(broken(float("nan")))
    with pytest.raises(InputError, match=r"values beyond the range of torch\.float16"):
        load(dtype=torch.float16).load_textual_inversion(broken(1e6))


def test_the_second_encoder_of_a_pair_may_be_what_is_wrong(sdxl):
    before = encoded(sdxl)
    for clip_g, message in ((vectors(2, 41), "41 channels"), (vectors(3, 40), "2 and 3 vectors"), (None, None)):
        state = {"clip_l": vectors(2, 32), "clip_g": broken(float("nan"))["<new>"] if clip_g is None else clip_g}
        with pytest.raises(InputError, match=message):
            sdxl.load_textual_inversion(state, token="<cat>")
        assert not sdxl.tokenizer.embeddings and same(encoded(sdxl), before)
    with pytest.raises(InputError, match=r"give text_encoder=pipe\.text_encoder_2 to load it there"):
        sdxl.load_textual_inversion({"<cat>": vectors(1, 40)})
    with pytest.raises(InputError, match="the tokenizer is the other text encoder's"):
        sdxl.load_textual_inversion({"<cat>": vectors()}, tokenizer=sdxl.tokenizer_2, text_encoder=sdxl.text_encoder)


def test_unload_names_what_is_not_loaded(pipe):
    with pytest.raises(InputError, match="'<cat>' is no token of a loaded embedding; none is loaded"):
        pipe.unload_textual_inversion("<cat>")
    pipe.unload_textual_inversion()
    pipe.load_textual_inversion([{"<cat>": vectors()}, {"<dog>": vectors(1)}])
    for tokens in ("<cat>_1", ["<dog>", "cat"], [7]):
        with pytest.raises(InputError, match="loaded are <cat>, <dog>"):
            pipe.unload_textual_inversion(tokens)
    assert dict(pipe.tokenizer.embeddings) == {"<cat>": 2, "<dog>": 1}
    pipe.unload_textual_inversion(["<cat>"])
    assert torch.equal(pipe.text_encoder.added_tokens, vectors(1))


def test_a_pipeline_without_a_text_encoder_and_one_without_prompts(load):
    pipe = load(text_encoder=None)
    with pytest.raises(InputError, match="this pipeline has no text encoder"):
        pipe.load_textual_inversion({"<cat>": vectors()})
    with pytest.raises(InputError, match=r"load_textual_inversion: .* this pipeline takes none"):
        Pipeline.from_pretrained("emoji64", device="cpu").load_textual_inversion({"<cat>": vectors()})


def test_ids_beyond_the_added_ones_are_refused(pipe):
    size = pipe.tokenizer.size
    pipe.load_textual_inversion({"<cat>": vectors()})
    pipe.text_encoder(torch.tensor([[size + 1]]))
    with pytest.raises(InputError, match=f"{size + 2} is out of range"):
        pipe.text_encoder(torch.tensor([[size + 2]]))
