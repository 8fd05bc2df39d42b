"""Training of emoji-sd: U-Net and text encoder, the judge, and the evaluation."""

import io
import json
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # training/ is not installed

from fastdiff import TextToImagePipeline
from fastdiff.text.tokenizer import CLIPTokenizer
from training.diffusion import Diffusion
from training.emoji_sd import folder as model_folder
from training.emoji_sd.captions import plain_caption
from training.emoji_sd.data import SIZE, load
from training.emoji_sd.evaluation import compare_sampling, evaluate, judge, prompts
from training.emoji_sd.evaluation.drawing import SAMPLERS, draw, load_pipeline
from training.emoji_sd.evaluation.judge import Judge, NameJudge, candidate_names, contrastive_loss, varied
from training.emoji_sd.folder import save_pipeline
from training.emoji_sd.latents import encode, make_bank, spread
from training.emoji_sd.tokenizer import learned_merges, save_tokenizer
from training.emoji_sd.train_unet import Trainer, parse_arguments, run, v_losses
from training.emoji_sd.unet import Denoiser, build_text_encoder, build_unet
from training.emoji_sd.vae import Shape, build_vae, load_vae, save_vae

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers'

STYLES = ("fluent_3d", "fluent_flat", "noto", "twemoji")
NAMES = ("cat", "dog", "cow", "owl")


def save_data(side: int, folder: Path) -> Path:
    """Save a file of tiles on white: four names in four styles, the last for validation."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(16):
        image = np.full((side, side, 3), 255, np.uint8)
        image[side // 6 : -side // 6, side // 6 : -side // 6] = rng.integers(0, 256, 3)
        file = io.BytesIO()
        Image.fromarray(image).save(file, "WEBP", lossless=True)
        files.append(file.getvalue())
    path = folder / "emoji128.npz"
    np.savez(
        path,
        webp=np.frombuffer(b"".join(files), np.uint8),
        offsets=np.cumsum([0, *map(len, files)]),
        style=np.arange(16, dtype=np.uint8) % 4,
        style_names=np.array(STYLES),
        group=np.zeros(16, np.uint8),
        group_names=np.array(["Animals & Nature"]),
        name=np.repeat(np.array(NAMES), 4),
        keywords=np.array(["pet, animal"] * 16),
        validation=np.arange(16) >= 12,
    )
    return path


@pytest.fixture(scope="module")
def small_data(tmp_path_factory) -> Path:
    return save_data(64, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole_data(tmp_path_factory) -> Path:
    return save_data(SIZE, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(learned_merges(["cat dog cow owl pet animal flat emoji"] * 4, 530), folder)
    return folder


@pytest.fixture(scope="module")
def vae(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vae")
    torch.manual_seed(0)
    save_vae(build_vae(Shape((16, 16, 16, 16), 4)), 2.0, folder)
    return folder


@pytest.fixture
def arguments(small_data, vae, tokenizer):
    def make(out: Path, *more: str):
        folders = ["--data", str(small_data), "--vae", str(vae), "--tokenizer", str(tokenizer), "--out", str(out)]
        small = ["--channels", "32", "32", "--text-width", "32", "--text-layers", "1", "--batch", "2", "--steps", "4"]
        small += ["--copies", "2", "--captions", "2"]
        return parse_arguments([*folders, *small, "--device", "cpu", "--no-compile", *more])

    return make


def small_denoiser(tokenizer: Path) -> Denoiser:
    """A denoiser with random weights that does not predict zero."""
    torch.manual_seed(0)
    denoiser = Denoiser(build_unet((32, 32), 4, 16, 32), build_text_encoder(CLIPTokenizer(tokenizer), 32, 1))
    torch.nn.init.normal_(denoiser.unet.conv_out.weight, std=0.05)
    return denoiser.eval()


@pytest.fixture(scope="module")
def model(vae, tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_pipeline(small_denoiser(tokenizer), load_vae(vae, "cpu"), tokenizer, folder)
    return folder


def trainer_of(args) -> Trainer:
    tokenizer, splits = CLIPTokenizer(args.tokenizer), load(args.data, "cpu")
    bank = make_bank(load_vae(args.vae, "cpu"), tokenizer, splits.train, copies=2, captions=2, seed=0)
    return Trainer(args, bank, tokenizer)


@pytest.mark.slow
def test_a_resumed_run_makes_the_same_steps(arguments, tmp_path):
    whole = run(arguments(tmp_path / "whole"))
    halted = trainer_of(arguments(tmp_path / "halted"))
    (tmp_path / "halted").mkdir()
    halted.train_step()
    halted.train_step()
    halted.weights.save(tmp_path / "halted" / "checkpoint.pt")
    resumed = run(arguments(tmp_path / "halted"))
    assert resumed.weights.step == whole.weights.step == 4
    for kind in ("model", "ema"):
        expected, actual = (getattr(each.weights, kind).state_dict() for each in (whole, resumed))
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_minutes_end_a_run_with_a_checkpoint_and_a_model(arguments, tmp_path):
    trainer = run(arguments(tmp_path / "out", "--minutes", "0"))
    assert trainer.weights.step == 0
    assert (tmp_path / "out" / "checkpoint.pt").exists()
    assert (tmp_path / "out" / "model" / "model_index.json").exists()


@pytest.mark.slow
def test_training_brings_the_loss_down_of_unet_and_text_encoder(arguments, tmp_path):
    trainer = trainer_of(arguments(tmp_path, "--steps", "400", "--batch", "4", "--learning-rate", "4e-3"))
    before = {name: p.clone() for name, p in trainer.weights.model.named_parameters()}
    losses = torch.stack([trainer.train_step() for _ in range(50)])
    assert losses[-10:].mean() < 0.9 * losses[:10].mean()
    unmoved = [name for name, p in trainer.weights.model.named_parameters() if torch.equal(p, before[name])]
    assert not unmoved


def test_a_new_unet_predicts_zero_and_the_loss_is_that_of_v(tokenizer):
    torch.manual_seed(0)
    denoiser = Denoiser(build_unet((32, 32), 4, 16, 32), build_text_encoder(CLIPTokenizer(tokenizer), 32, 1))
    x_0, eps = torch.randn(2, 3, 4, 16, 16)
    t, tokens = torch.tensor([0, 500, 999]), torch.zeros(3, 32, dtype=torch.int64)
    losses = v_losses(denoiser, Diffusion("cpu"), x_0, tokens, t, eps)
    alpha_bar = diffusers.DDIMScheduler(beta_schedule="squaredcos_cap_v2").alphas_cumprod[t][:, None, None, None]
    v = alpha_bar.sqrt() * eps - (1 - alpha_bar).sqrt() * x_0
    torch.testing.assert_close(losses, v.square().mean(dim=(1, 2, 3)))


def test_the_bank_draws_a_pictures_own_latents(small_data, vae, tokenizer):
    splits, encoder = load(small_data, "cpu"), load_vae(vae, "cpu")
    bank = make_bank(encoder, CLIPTokenizer(tokenizer), splits.train, copies=3, captions=2, seed=0)
    assert bank.latents.shape == (3, len(splits.train), 4, 8, 8)
    with torch.no_grad():
        mean = encoder.encode(splits.train.images[:1].float() / 127.5 - 1).latent_dist.mean
    torch.testing.assert_close(encode(encoder, splits.train.images[:1]), 2 * mean)
    latents, tokens = bank.draw(200)
    known = {row.tobytes() for row in bank.latents.flatten(0, 1).numpy()}
    assert {row.tobytes() for row in latents.numpy()} <= known
    empty = (tokens == bank.empty.long()).all(dim=1).float().mean()
    assert empty == pytest.approx(0.1, abs=0.07)


def test_fastdiff_draws_what_diffusers_draws_from_the_folder(model):
    options = {"guidance_scale": 3.0, "num_inference_steps": 4}
    theirs = load_pipeline(model, "cpu")
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    expected = theirs("cat, flat emoji", latents=latents, output_type="pt", **options).images
    ours = TextToImagePipeline.from_pretrained(model, device="cpu")
    actual = ours("cat, flat emoji", latents=latents, output_type="pt", **options).images
    torch.testing.assert_close(torch.as_tensor(actual), expected, atol=1e-3, rtol=0)


def test_both_transformers_find_the_text_encoders_weights(model, tokenizer):
    assert all(key.startswith("text_model.") for key in load_file(model / "text_encoder" / "model.safetensors"))
    loaded, info = transformers.CLIPTextModel.from_pretrained(model / "text_encoder", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = small_denoiser(tokenizer).text_encoder.half().float().state_dict()
    loaded = loaded.float().state_dict()
    assert all(torch.equal(loaded[key], expected[key]) for key in expected)
    assert {"vocab.json", "merges.txt"} <= {path.name for path in (model / "tokenizer").iterdir()}


def test_a_folder_that_is_too_large_warns(vae, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "MOST_BYTES", 2**10)
    with pytest.warns(UserWarning, match="more than"):
        save_pipeline(small_denoiser(tokenizer), load_vae(vae, "cpu"), tokenizer, tmp_path)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_picture_depends_on_its_prompt_and_seed_alone(model, sampler):
    pipeline = load_pipeline(model, "cpu")
    options = {"guidance_scale": 2.0, "num_inference_steps": 2, "sampler": sampler}
    batch = draw(pipeline, ["cat", "dog", "cat"], [0, 1, 1], **options)
    alone = draw(pipeline, ["dog"], [1], **options)
    assert batch.shape == (3, 3, SIZE, SIZE) and batch.dtype == torch.uint8
    assert (batch[1].int() - alone[0].int()).abs().max() <= 1
    assert not torch.equal(batch[0], batch[2])


@pytest.fixture
def small_judge(small_data, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "WIDTHS", (8, 8, 16, 16, 16))
    for name, small in {"TEXT_WIDTH": 32, "TEXT_LAYERS": 1, "TEXT_HEADS": 2}.items():
        monkeypatch.setattr(judge, name, small)

    def make(*more: str):
        folders = ["--data", str(small_data), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "judge")]
        small = ["--batch", "8", "--steps", "4", "--report-every", "100", "--device", "cpu"]
        return judge.parse_arguments([*folders, *small, *more])

    return make


@pytest.mark.slow
def test_a_resumed_judge_makes_the_same_steps(small_judge, tmp_path):
    whole = judge.run(small_judge("--out", str(tmp_path / "whole")))
    args = small_judge()
    halted = judge.JudgeTrainer(args, load(args.data, "cpu"), CLIPTokenizer(args.tokenizer))
    args.out.mkdir()
    halted.train_step()
    halted.save(args.out / "judge.pt")
    resumed = judge.run(args)
    expected, actual = whole.judge.state_dict(), resumed.judge.state_dict()
    assert resumed.step == whole.step == 4
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_minutes_end_a_judges_run_with_its_scores(small_judge):
    args = small_judge("--minutes", "0")
    assert judge.run(args).step == 1
    (line,) = (args.out / "log.jsonl").read_text().splitlines()
    assert {"step", "batch_loss", "train", "held_out", "validation"} <= json.loads(line).keys()


def test_pictures_of_one_name_are_right_for_each_others_captions():
    images, log_scale = torch.eye(3), torch.tensor(100.0).log()
    exchanged = images[[1, 0, 2]]
    loss = contrastive_loss(images, exchanged, torch.tensor([7, 7, 8]), log_scale)
    assert loss.item() == pytest.approx(100 / 3, rel=1e-4)  # half of the target of two pictures is at similarity 0
    loss = contrastive_loss(images, exchanged, torch.tensor([6, 7, 8]), log_scale)
    assert loss.item() == pytest.approx(200 / 3, rel=1e-4)


def test_texts_are_read_up_to_their_end(tokenizer):
    torch.manual_seed(0)
    reader = CLIPTokenizer(tokenizer)
    net = Judge(reader.size, reader.length, reader.end).eval()
    tokens = torch.tensor([reader("cat").ids])
    changed = tokens.clone()
    changed[0, -1] = 7
    torch.testing.assert_close(net.embed_texts(tokens), net.embed_texts(changed))
    assert not torch.allclose(net.embed_texts(tokens), net.embed_texts(torch.tensor([reader("dog").ids])))


def test_varied_pictures_keep_their_white_and_their_ink():
    torch.manual_seed(0)
    images = torch.full((32, 3, SIZE, SIZE), 255, dtype=torch.uint8)
    images[:, :, 40:90, 40:90] = 0
    made = varied(images)
    corners = made[:, :, ::127, ::127]
    assert (corners == 255).all()
    share = (made < 128).float().mean(dim=(1, 2, 3))
    assert (share > 0.06).all() and (share < 0.21).all()
    assert len({row.numpy().tobytes() for row in made}) == 32


def test_ranks_count_the_names_that_suit_better(monkeypatch):
    by_name = object.__new__(NameJudge)
    by_name.index = {"cat": 0, "dog": 1, "cow": 2}
    by_name.texts = torch.eye(3)

    class Fixed:
        def embed_images(self, images):
            return torch.tensor([[0.9, 0.5, 0.1], [0.9, 0.5, 0.1], [0.9, 0.5, 0.1]])

    by_name.judge = Fixed()
    pictures = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    assert by_name.ranks(pictures, ["cat", "dog", "cow"]).tolist() == [0, 1, 2]
    assert by_name.score(pictures, ["cat", "dog", "cow"]) == {
        "first": pytest.approx(1 / 3),
        "first_5": 1.0,
        "pictures": 3,
    }


def test_candidates_hold_every_name_that_is_asked_for(small_data, monkeypatch):
    splits = load(small_data, "cpu")
    monkeypatch.setattr(judge, "CANDIDATES", 3)
    names = candidate_names(splits)
    assert len(names) == 3
    assert {"owl", splits.held_out.words[0].name} <= set(names)
    asked = prompts.asked_sets(splits, names)
    assert asked["new_words"].names == ("owl",) * 4 and "known_words" not in asked
    assert torch.equal(asked["new_words"].images, splits.validation.images)
    assert set(asked["train"].names) <= set(names)
    assert asked["held_out"].prompts == (plain_caption(splits.held_out.words[0]),)


def test_indices_are_spread_over_all():
    assert spread(3, 11, "cpu").tolist() == [0, 5, 10]
    assert spread(5, 3, "cpu").tolist() == [0, 1, 2]


@pytest.fixture
def judged_folder(small_judge, whole_data, model):
    """The flags for the data, a trained judge and a model folder."""
    args = small_judge()
    judge.run(args)
    paths = {"--data": whole_data, "--judge": args.out / "judge.pt", "--model": model}
    return [*(str(each) for pair in paths.items() for each in pair), "--device", "cpu"]


@pytest.mark.slow
def test_the_evaluation_measures_a_folder_and_draws_its_sheets(judged_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "GRID", ("cat",))
    monkeypatch.setattr(evaluate, "NEW", ("green dog",))
    out = ["--out", str(tmp_path / "evaluation"), "--steps", "2", "--per-prompt", "1"]
    results = evaluate.run(evaluate.parse_arguments([*judged_folder, *out]))
    assert results["scores"].keys() == {"train", "held_out", "new_words"}
    assert results["device"] == "cpu" and results["seeds"] == [1000, 1001]
    assert results["scores"]["train"]["drawn"]["pictures"] == results["scores"]["train"]["real"]["pictures"] == 11
    written = {path.name for path in (tmp_path / "evaluation").iterdir()}
    sheets = {f"{name}.{end}" for name in ("unpicked", "grid", "new") for end in ("png", "txt")}
    assert written == sheets | {"nearest.png", "evaluation.json"}


@pytest.mark.slow
def test_the_sweep_judges_the_best_by_other_seeds(judged_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(compare_sampling, "GUIDANCE", (1.5, 3.0))
    monkeypatch.setattr(compare_sampling, "STEPS", (2,))
    more = ["--out", str(tmp_path / "sampling.json"), "--prompts", "2", "--per-prompt", "1"]
    results = compare_sampling.run(compare_sampling.parse_arguments([*judged_folder, *more]))
    assert len(results["chosen_by"]) == 2 * len(SAMPLERS)
    best = max(results["chosen_by"], key=lambda row: row["first"])
    assert all(results["judged"][key] == best[key] for key in ("sampler", "num_inference_steps", "guidance_scale"))
    assert results["judged"]["seeds"] == [1000, 1001]
    assert {tuple(row["seeds"]) for row in results["chosen_by"]} == {(0, 1)}
