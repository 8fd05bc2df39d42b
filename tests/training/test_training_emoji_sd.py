"""Training of emoji-sd: its splits, captions, tokenizer and VAE."""

import io
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))  # training/ is not installed

from fastdiff.models.autoencoder import AutoencoderKL
from fastdiff.text.tokenizer import CLIPTokenizer
from training.emoji_sd import vae as shapes
from training.emoji_sd.captions import DROPPED, caption_table, drawn_prompts, folded, plain_caption, varied_caption
from training.emoji_sd.data import (
    HELD_OUT_NAMES,
    MARGIN,
    SIZE,
    Sampler,
    Words,
    held_out_rows,
    load,
    plain_names,
    shifted,
)
from training.emoji_sd.features import make_features
from training.emoji_sd.sheets import COLUMNS, save_pairs
from training.emoji_sd.tokenizer import LENGTH, learned_merges, lengths, save_tokenizer, token_ids
from training.emoji_sd.train_vae import Trainer, edge_loss, finish, parse_arguments, run
from training.emoji_sd.vae import Shape, brought_back, build_vae, load_vae, quality, save_vae, scaling_factor

SIDE = 32  # pixels; with 128, a CPU without bfloat16 would train for minutes
STYLES = ("fluent_3d", "fluent_flat", "noto", "twemoji")
GROUP = "Animals & Nature"


def words(name: str, style: str = "noto", keywords: tuple[str, ...] = ("pet", "animal")) -> Words:
    return Words(name, style, GROUP, keywords)


def file_of(image: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "WEBP", lossless=True)
    return file.getvalue()


def save_data(side: int, folder: Path) -> Path:
    """Save tiles on white: four names in four styles, the last for validation, and one name in a single style."""
    rng = np.random.default_rng(0)
    images = np.full((17, side, side, 3), 255, np.uint8)
    for image in images:
        image[side // 6 : -side // 6, side // 6 : -side // 6] = rng.integers(0, 256, 3)
    files = [file_of(image) for image in images]
    path = folder / "emoji128.npz"
    np.savez(
        path,
        webp=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        style=np.array([0, 1, 2, 3] * 4 + [0], np.uint8),
        style_names=np.array(STYLES),
        group=np.zeros(17, np.uint8),
        group_names=np.array([GROUP]),
        name=np.repeat(np.array(["cat", "dog", "cow", "owl", "ant"]), [4, 4, 4, 4, 1]),
        keywords=np.array(["pet, animal"] * 17),
        validation=np.arange(17) // 4 == 3,
    )
    return path


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    return save_data(SIDE, tmp_path_factory.mktemp("data"))


def test_the_splits_hold_every_picture_once(small_data):
    splits = load(small_data, "cpu")
    assert [len(split) for split in (splits.train, splits.held_out, splits.validation)] == [12, 1, 4]
    assert {word.name for word in splits.validation.words} == {"owl"}
    (held_out,) = splits.held_out.words
    seen = {word.style for word in splits.train.words if word.name == held_out.name}
    assert seen == set(STYLES) - {held_out.style}
    with np.load(small_data) as data:
        first = Image.open(io.BytesIO(data["webp"][: data["offsets"][1]].tobytes()))
    row = splits.train.words.index(words("cat", "fluent_3d"))
    assert torch.equal(splits.train.images[row], torch.from_numpy(np.array(first)).permute(2, 0, 1))


def test_names_are_held_out_in_one_style_each_and_in_each_style_as_often():
    many = [words(f"animal {i}", style) for i in range(400) for style in STYLES]
    rows = held_out_rows(many, [False] * len(many))
    assert rows == held_out_rows(many, [False] * len(many))
    assert len({many[row].name for row in rows}) == len(rows) == HELD_OUT_NAMES
    assert all(sum(many[row].style == style for row in rows) == HELD_OUT_NAMES // 4 for style in STYLES)


def test_nothing_is_held_out_that_a_toned_variant_a_missing_style_or_validation_gives_away():
    toned = [words(name, style) for name in ("hand", "hand: dark skin tone") for style in STYLES]
    rare = [words("flag: Chad", style) for style in STYLES[:3]]
    unseen = [words("owl", style) for style in STYLES]
    assert held_out_rows(toned + rare + unseen, [False] * 11 + [True] * 4) == set()


def test_plain_names_have_no_tones():
    assert plain_names([words("dog"), words("cat"), words("dog"), words("hand: dark skin tone")]) == ["cat", "dog"]


def test_shifted_pictures_are_whole():
    torch.manual_seed(0)
    side = SIZE - 2 * MARGIN
    tile = torch.nn.functional.pad(torch.zeros(256, 3, side, side, dtype=torch.uint8), (MARGIN,) * 4, value=255)
    dark = shifted(tile)[:, 0] == 0
    assert (dark.sum(dim=(1, 2)) == side**2).all()
    tops = dark.any(dim=2).int().argmax(dim=1)
    lefts = dark.any(dim=1).int().argmax(dim=1)
    assert set(tops.tolist()) == set(lefts.tolist()) == set(range(2 * MARGIN + 1))
    assert not torch.equal(tops, lefts)


def test_a_batch_is_the_pictures_of_its_indices(small_data):
    torch.manual_seed(0)
    train = load(small_data, "cpu").train
    indices, images = Sampler(train)(8)
    assert torch.equal(images.amin(dim=(2, 3)), train.images[indices].amin(dim=(2, 3)))


@pytest.mark.parametrize(
    ("name", "plain"),
    [("piñata", "pinata"), ("man’s “shoe”", 'man\'s "shoe"'), ("Côte d’Ivoire", "Cote d'Ivoire"), ("dog", "dog")],
)
def test_captions_are_folded_to_what_is_typed(name, plain):
    assert folded(name) == plain
    assert plain_caption(words(name)) == f"{plain}, Noto emoji"


def test_captions_vary_and_are_the_same_for_the_same_seed():
    pictures = [words("flag: Chad"), words("piñata", keywords=("party",))]
    table = caption_table(pictures, 64, seed=3)
    assert table == caption_table(pictures, 64, seed=3) != caption_table(pictures, 64, seed=4)
    assert table[1] == caption_table(pictures + pictures, 64, seed=3)[1]
    assert {"flag: Chad", "Chad flag", "flag of Chad"} <= {caption.split(", ")[0] for caption in table[0]}
    assert any(caption.startswith("Noto") for caption in table[0])
    assert any("Chad" not in caption for caption in table[0])  # only keywords
    joined = " ".join(table[1])
    assert "piñata" in joined
    assert "pinata" in joined


def test_a_toned_name_is_never_left_to_its_keywords():
    rng = random.Random(0)
    captions = [varied_caption(words("hand: dark skin tone"), rng) for _ in range(300)]
    assert all("dark skin tone" in caption for caption in captions)


def test_prompts_are_drawn_among_a_pictures_own_and_some_are_dropped():
    torch.manual_seed(0)
    ids = torch.arange(2 * 3 * 4, dtype=torch.int16).view(2, 3, 4)
    empty = torch.full((4,), -1)
    drawn = drawn_prompts(ids, empty, torch.ones(4000, dtype=torch.int64))
    assert drawn.dtype == torch.int64
    dropped = (drawn == -1).all(dim=1)
    assert dropped.float().mean().item() == pytest.approx(DROPPED, abs=0.02)
    assert drawn[~dropped].unique(dim=0).tolist() == ids[1].tolist()


CAPTIONS = ["a dog", "green dog, Noto emoji", "flag: Chad", "pizza with sunglasses"] * 3


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(learned_merges(CAPTIONS, 560), folder)
    return folder


PROMPTS = [*CAPTIONS[:4], "", "Piñata  Côte d’Ivoire 12", "woman's BOOT <|endoftext|>!?", "🍕 ж", "dog " * 40]


def test_transformers_reads_the_same_ids(tokenizer_folder):
    from transformers import CLIPTokenizer as Theirs

    ours, theirs = CLIPTokenizer(tokenizer_folder), Theirs.from_pretrained(tokenizer_folder)
    assert theirs.model_max_length == ours.length == LENGTH
    expected = theirs(PROMPTS, padding="max_length", max_length=LENGTH, truncation=True).input_ids
    assert [list(ours(prompt).ids) for prompt in PROMPTS] == expected


def test_the_vocabulary_has_every_byte_and_its_size(tokenizer_folder):
    tokenizer = CLIPTokenizer(tokenizer_folder)
    assert tokenizer.size <= 560
    assert tokenizer.end == tokenizer.size - 1 == tokenizer.pad
    for prompt in PROMPTS[:6] + PROMPTS[7:8]:
        ids = tokenizer(prompt).ids
        assert set(ids[ids.index(tokenizer.end) :]) == {tokenizer.end}  # an unknown token would be in the middle


def test_words_of_the_captions_are_few_tokens(tokenizer_folder):
    tokenizer = CLIPTokenizer(tokenizer_folder)
    taken = lengths(tokenizer, ["dog", "zyx", "dog " * 40])
    assert taken.tolist() == [3, 5, float("inf")]
    ids = token_ids(tokenizer, [["dog", "zyx"], ["", "dog"]])
    assert ids.shape == (2, 2, LENGTH)
    assert ids[1, 1].tolist() == list(tokenizer("dog").ids)


def test_quality_knows_blur_ripples_and_grey_white():
    torch.manual_seed(0)
    real = torch.full((2, 3, SIZE, SIZE), 255, dtype=torch.uint8)
    real[:, :, :, ::8] = 0
    same = quality(real, real)
    assert same == {"psnr": same["psnr"], "psnr_mean": same["psnr"], "sharpness": 1, "flatness": 0, "white": 0}
    blurred = torch.nn.functional.avg_pool2d(real.float(), 3, 1, 1).byte()
    assert quality(real, blurred)["sharpness"] < 0.8
    grey = quality(real, real.clamp(max=250))
    assert grey["white"] == 5
    assert grey["psnr"] == pytest.approx(10 * np.log10(255**2 / (25 * 7 / 8)), abs=1e-3)
    assert quality(real, real - torch.randint(0, 9, real.shape) * (real > 0))["flatness"] > 1


def test_edges_and_features_tell_a_blur_from_a_shade():
    torch.manual_seed(0)
    x = torch.rand(2, 3, 32, 32).round() * 2 - 1
    assert edge_loss(x, x * 1.0) == 0
    assert edge_loss(x + 0.1, x) < 1e-6
    assert edge_loss(torch.nn.functional.avg_pool2d(x, 3, 1, 1), x) > 0.3


@pytest.fixture(scope="session")
def eye(small_data, tmp_path_factory) -> Path:
    """The weights of a small classifier after one training step."""
    path = tmp_path_factory.mktemp("features") / "features.pt"
    make_features(load(small_data, "cpu").train, path, steps=1, batch=4, widths=(8, 8, 16, 16))
    return path


def test_features_have_fixed_weights_and_see_no_distance_of_a_picture_to_itself(small_data, eye):
    features = make_features(load(small_data, "cpu").train, eye, steps=0)
    x = torch.rand(2, 3, 32, 32, requires_grad=True)
    assert features(x, x) == 0
    distance = features(x, -x.detach())
    assert distance > 0
    distance.backward()
    assert x.grad.abs().sum() > 0
    assert not any(parameter.requires_grad for parameter in features.parameters())


@pytest.fixture
def small_shape(monkeypatch) -> Shape:
    shape = Shape((16, 16, 16), 4)
    monkeypatch.setitem(shapes.SHAPES, "f4c4", shape)
    return shape


def arguments(data: Path, eye: Path, out: Path, *more: str):
    small = ["--shape", "f4c4", "--batch", "2", "--steps", "4", "--device", "cpu"]
    return parse_arguments(["--data", str(data), "--features", str(eye), "--out", str(out), *small, *more])


def test_a_resumed_run_makes_the_same_steps(small_data, small_shape, eye, tmp_path):
    whole = run(arguments(small_data, eye, tmp_path / "whole"))
    splits = load(small_data, "cpu")
    halted = Trainer(arguments(small_data, eye, tmp_path / "halted"), splits.train, whole.features)
    (tmp_path / "halted").mkdir()
    halted.train_step()
    halted.train_step()
    finish(halted, splits)
    resumed = run(arguments(small_data, eye, tmp_path / "halted"))
    assert resumed.weights.step == whole.weights.step == 4
    for kind in ("model", "ema"):
        expected, actual = (getattr(each.weights, kind).state_dict() for each in (whole, resumed))
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_minutes_end_a_run_with_checkpoint_model_and_sheet(small_data, small_shape, eye, tmp_path):
    trainer = run(arguments(small_data, eye, tmp_path, "--minutes", "0"))
    assert trainer.weights.step == 0
    assert (tmp_path / "checkpoint.pt").exists()
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.width == COLUMNS * (SIDE + 4) + 4
    written, kept = load_vae(tmp_path / "model", "cpu").state_dict(), trainer.weights.ema.state_dict()
    assert all(torch.equal(written[key], kept[key].half().float()) for key in kept)


@pytest.mark.slow
def test_training_brings_the_loss_down(small_data, small_shape, eye, tmp_path):
    args = arguments(small_data, eye, tmp_path, "--steps", "2000", "--learning-rate", "0.05")
    splits = load(small_data, "cpu")
    trainer = Trainer(args, splits.train, make_features(splits.train, eye, steps=0))
    l1 = [trainer.train_step()[0].item() for _ in range(40)]
    assert np.mean(l1[-5:]) < 0.6 * np.mean(l1[:5])


def test_the_scaling_factor_gives_latents_a_deviation_of_one_and_fastdiff_reads_the_folder(small_shape, tmp_path):
    torch.manual_seed(0)
    vae = build_vae(small_shape).eval()
    images = torch.randint(0, 256, (4, 3, SIZE, SIZE), dtype=torch.uint8)
    factor = scaling_factor(vae, images)
    save_vae(vae, factor, tmp_path)
    read, ours = load_vae(tmp_path, "cpu"), AutoencoderKL.from_pretrained(tmp_path)
    assert read.config.scaling_factor == factor
    latents = read.encode(images / 127.5 - 1).latent_dist.sample() * factor
    assert latents.std().item() == pytest.approx(1, abs=0.05)
    z = torch.randn(1, 4, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours.decode(z).sample, read.decode(z).sample, atol=1e-4, rtol=0)
    assert brought_back(read, images).shape == images.shape


def test_a_sheet_shows_each_picture_above_what_was_made_of_it(tmp_path):
    real, made = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.full((2, 3, 8, 8), 128, dtype=torch.uint8)
    save_pairs(real, made, tmp_path / "sheet.png")
    sheet = np.array(Image.open(tmp_path / "sheet.png"))
    assert (sheet[4:12, 4:12] == 0).all()
    assert (sheet[12:20, 4:12] == 128).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_step_has_the_losses_of_a_plain_one(tmp_path):
    torch.backends.cudnn.benchmark = False
    data = save_data(SIZE, tmp_path)
    splits = load(data, "cuda")
    features = make_features(splits.train, tmp_path / "features.pt", steps=2)
    options = ("--data", str(data), "--out", str(tmp_path), "--batch", "4", "--device", "cuda")
    plain, compiled = (
        Trainer(parse_arguments([*options, *more]), splits.train, features) for more in ((), ("--compile",))
    )
    torch.testing.assert_close(compiled.train_step(), plain.train_step(), rtol=0.02, atol=1e-3)
