"""Training of the ControlNet: control pictures, augmented copies, the bank, resuming, measurements and the folder."""

import json
import sys
from pathlib import Path

import pytest
import torch
from diffusers import ControlNetModel
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))  # training/ is not installed

from fastdiff.edges import canny
from fastdiff.text.tokenizer import CLIPTokenizer
from tests.training.test_training_emoji_sd import save_data
from training.emoji_control import bank as banks
from training.emoji_control import bundle, controls, evaluate
from training.emoji_control.controlnet import Frozen, build_controlnet, controlled_pipeline, load_controlnet
from training.emoji_control.train import Clock, Trainer, parse_arguments, run
from training.emoji_sd.data import MARGIN, load
from training.emoji_sd.evaluation.drawing import draw, load_pipeline
from training.emoji_sd.folder import save_pipeline
from training.emoji_sd.tokenizer import learned_merges, save_tokenizer
from training.emoji_sd.unet import Denoiser, build_text_encoder, build_unet
from training.emoji_sd.vae import Shape, build_vae

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers'

SIDE = 32  # pixels


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return save_data(SIDE, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A pipeline folder with a U-Net that does not predict zero, and a VAE that shrinks by 4."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(learned_merges(["cat dog cow owl pet animal flat emoji"] * 4, 530), tokenizer)
    torch.manual_seed(0)
    denoiser = Denoiser(build_unet((32, 32), 4, 16, 32), build_text_encoder(CLIPTokenizer(tokenizer), 32, 1))
    torch.nn.init.normal_(denoiser.unet.conv_out.weight, std=0.05)
    save_pipeline(denoiser.eval(), build_vae(Shape((16, 16, 16), 4)).eval(), tokenizer, folder)
    return folder


@pytest.fixture
def arguments(data, model):
    def make(out: Path, *more: str):
        small = ["--batch", "2", "--steps", "4", "--copies", "2", "--captions", "2", "--device", "cpu"]
        return parse_arguments(["--data", str(data), "--model", str(model), "--out", str(out), *small, *more])

    return make


def tiles(count: int, side: int = 128) -> torch.Tensor:
    """White pictures with a black tile that leaves a margin, and a grey column at its left."""
    images = torch.full((count, 3, side, side), 255, dtype=torch.uint8)
    images[:, :, MARGIN:-MARGIN, MARGIN:-MARGIN] = 0
    images[:, :, MARGIN:-MARGIN, MARGIN : side // 4] = 100
    return images


def test_each_picture_gets_its_own_edges(monkeypatch):
    monkeypatch.setattr(controls, "PART", 2)
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    edges = controls.edges_of(images, 300, 600)
    assert edges.shape == (5, 1, 16, 16)
    for image, found in zip(images, edges, strict=True):
        assert torch.equal(found[0], torch.from_numpy(canny(image.permute(1, 2, 0).numpy(), 300, 600)))
    white = controls.control_pictures(edges)
    assert white.shape == (5, 3, 16, 16) and torch.equal(white[:, :1] == 255, edges)


@pytest.mark.parametrize("scaled", [False, True])
def test_copies_are_whole_and_half_of_them_mirrored(scaled):
    torch.manual_seed(0)
    copies = controls.augmented(tiles(200), scaled=scaled)[:, 0]
    dark = copies < 200
    sides = dark.any(dim=1).sum(dim=1)
    for axis in (1, 2):
        is_dark = dark.any(dim=axis)
        ends = is_dark.int().diff(dim=1).abs().sum(dim=1) + is_dark[:, 0].int() + is_dark[:, -1].int()
        assert (ends == 2).all(), "a picture is cut in two"
        assert (is_dark.sum(dim=1) - sides).abs().max() <= 1
    if scaled:
        assert 60 <= sides.min() < 80 and 100 < sides.max() < 118
    else:
        assert (sides == 128 - 2 * MARGIN).all()
        assert set(dark.any(dim=2).int().argmax(dim=1).tolist()) == set(range(2 * MARGIN + 1))
    middle = copies[:, 64].long()
    grey = ((middle > 60) & (middle < 140)).float()
    right = (grey * torch.arange(128)).sum(1) / grey.sum(1) > (dark[:, 64] * torch.arange(128)).sum(1) / sides
    assert 0.35 < right.float().mean() < 0.65


def test_agreement_has_a_tolerance_of_one_pixel():
    wanted = torch.zeros(1, 1, 9, 9, dtype=torch.bool)
    wanted[..., 4] = True
    assert controls.agreement(wanted.roll((1, 1), (2, 3)), wanted)["f1"] == 1
    assert controls.agreement(wanted.roll(2, 3), wanted)["f1"] == 0
    more = wanted.clone()
    more[..., 0] = True
    found = controls.agreement(more, wanted)
    assert (found["precision"], found["recall"]) == (0.5, 1.0) and found["f1"] == pytest.approx(2 / 3)
    assert controls.agreement(torch.zeros_like(wanted), wanted) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


def test_the_bank_keeps_pictures_with_their_edges(data, model, monkeypatch):
    monkeypatch.setattr(banks, "encode", lambda _, images: images.float())
    train, tokenizer = load(data, "cpu").train, CLIPTokenizer(model / "tokenizer")
    bank = banks.make_bank(None, tokenizer, train, copies=6, captions=2, seed=0)
    for copy, (low, high) in enumerate([(100, 200)] * 4 + [(50, 100)] * 2):
        assert torch.equal(bank.edges[copy], controls.edges_of(bank.latents[copy].byte(), low, high))
    assert not torch.equal(bank.latents[0], bank.latents[1])
    bank = banks.make_bank(None, tokenizer, train, copies=2, captions=2, seed=0)
    batch = bank.draw(400)
    assert torch.equal(batch.control == 1, controls.edges_of(batch.latents.byte()).expand(-1, 3, -1, -1))
    empty = (batch.tokens == bank.empty.long()).all(dim=1).float().mean()
    assert empty == pytest.approx(0.5, abs=0.1)


def test_a_new_controlnet_changes_nothing_and_has_an_entry_for_each_level_of_the_vae(model):
    pipeline = load_pipeline(model, "cpu")
    controlnet = build_controlnet(pipeline)
    assert tuple(controlnet.config.conditioning_embedding_out_channels) == (16, 32, 96)
    predict = Frozen(pipeline.unet, pipeline.text_encoder)
    torch.manual_seed(0)
    x_t, control = torch.randn(2, 4, 8, 8), torch.rand(2, 3, SIDE, SIDE)
    t, tokens = torch.tensor([1, 900]), torch.zeros(2, 32, dtype=torch.int64)
    with torch.no_grad():
        alone = pipeline.unet(x_t, t, pipeline.text_encoder(tokens).last_hidden_state).sample
        torch.testing.assert_close(predict(controlnet, x_t, t, tokens, control), alone)
        torch.nn.init.normal_(controlnet.controlnet_down_blocks[0].weight)
        assert not torch.allclose(predict(controlnet, x_t, t, tokens, control), alone)


def trainer_of(args) -> Trainer:
    pipeline, tokenizer = load_pipeline(args.model, "cpu"), CLIPTokenizer(args.model / "tokenizer")
    train = load(args.data, "cpu").train
    bank = banks.make_bank(pipeline.vae, tokenizer, train, copies=args.copies, captions=args.captions, seed=args.seed)
    return Trainer(args, pipeline, bank)


def test_training_moves_the_controlnet_alone(arguments, tmp_path):
    trainer = trainer_of(arguments(tmp_path, "--learning-rate", "1e-2"))
    frozen = {name: p.clone() for name, p in trainer.predict.named_parameters()}
    before = {name: p.clone() for name, p in trainer.weights.model.named_parameters()}
    for _ in range(3):
        trainer.train_step(4)
    assert all(torch.equal(p, frozen[name]) for name, p in trainer.predict.named_parameters())
    assert not [name for name, p in trainer.weights.model.named_parameters() if torch.equal(p, before[name])]
    trainer.save()
    written = load_controlnet(tmp_path / "model", "cpu").state_dict()
    average, last = trainer.weights.ema.state_dict(), trainer.weights.model.state_dict()
    assert all(torch.equal(value, average[key].half().float()) for key, value in written.items())
    assert not all(torch.equal(value, last[key].half().float()) for key, value in written.items())


@pytest.mark.slow
def test_a_resumed_run_makes_the_same_steps(arguments, tmp_path):
    whole = run(arguments(tmp_path / "whole"))
    halted = trainer_of(arguments(tmp_path / "halted"))
    (tmp_path / "halted").mkdir()
    halted.train_step(4)
    halted.train_step(4)
    halted.save()
    resumed = run(arguments(tmp_path / "halted"))
    assert resumed.weights.step == whole.weights.step == 4
    for kind in ("model", "ema"):
        expected, actual = (getattr(each.weights, kind).state_dict() for each in (whole, resumed))
        assert all(torch.equal(actual[key], expected[key]) for key in expected)


def test_minutes_end_a_run_with_a_folder_to_start_from(arguments, tmp_path):
    out = tmp_path / "out"
    trainer = run(arguments(out, "--minutes", "0"))
    assert trainer.weights.step == 0 and (out / "checkpoint.pt").exists()
    (line,) = (out / "log.jsonl").read_text().splitlines()
    assert {"train_loss", "held_out_loss", "validation_loss", "seconds"} <= json.loads(line).keys()
    config = json.loads((out / "model" / "config.json").read_text())
    assert config["_class_name"] == "ControlNetModel" and "_name_or_path" not in config
    weights = ControlNetModel.from_pretrained(out / "model", low_cpu_mem_usage=False, dtype=torch.float16)
    expected = trainer.weights.ema.state_dict()
    assert all(torch.equal(value, expected[key].half()) for key, value in weights.state_dict().items())
    started = trainer_of(arguments(tmp_path / "second", "--start", str(out / "model")))
    assert all(p.requires_grad for p in started.weights.model.parameters())
    assert all(torch.equal(p, expected[key].half().float()) for key, p in started.weights.model.named_parameters())


def test_the_clock_extrapolates_the_steps_of_a_run(arguments, tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    clock = Clock(arguments(tmp_path, "--steps", "1000", "--minutes", "1"), 80.0, 50)
    assert clock.most_steps(60) == 1000
    now[0] = 110.0  # 30 of 60 s are over, 10 of them in training
    assert clock.most_steps(90) == 90 + 4 * 30
    assert clock.most_steps(950) == 1000
    assert not clock.is_over(999) and clock.is_over(1000)
    now[0] = 140.0
    assert clock.is_over(90)


def test_the_control_scale_and_the_control_picture_reach_the_pipeline(model):
    pipeline = load_pipeline(model, "cpu")
    controlnet = build_controlnet(pipeline)
    torch.manual_seed(0)
    for layer in (controlnet.controlnet_cond_embedding, controlnet.controlnet_down_blocks):
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    controlled = controlled_pipeline(pipeline, controlnet)
    options = {"guidance_scale": 2.0, "num_inference_steps": 2}
    control = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    control[1, :, 20:40] = 255
    drawn = draw(controlled, ["cat", "cat"], [0, 0], control=control, **options)
    off = draw(controlled, ["cat", "cat"], [0, 0], control=control, control_scale=0.0, **options)
    alone = draw(pipeline, ["cat"], [0], **options)
    assert (off[0].int() - off[1].int()).abs().max() <= 1 and (off[0].int() - alone[0].int()).abs().max() <= 1
    assert (drawn[0].int() - drawn[1].int()).abs().max() > 5


EVALUATED = {
    "device": "a card",
    "torch": "2.11.0+cu130",
    "sampling": {"guidance_scale": 5.0, "num_inference_steps": 30, "sampler": "dpm++2m"},
    "first_seed": 1000,
    "sheets": {"held_out": ["cat"], "styles": ["dog"], "other": ["red apple"]},
    "sets": {
        "held_out": {
            way: {"pictures": 7, "precision": 0.5, "recall": 0.25, "f1": 0.375, "first": 0.8125, "first_5": 1.0}
            for way in ("controlled", "edges_alone", "prompt_alone", "decoded")
        }
    },
    "scales": {"0.5": {"precision": 0.5, "recall": 0.25, "f1": 0.1875, "first": 0.0625}},
}


def make_run(folder: Path) -> None:
    """Write a run with small weights and invented results."""
    (folder / "evaluation").mkdir(parents=True)
    controlnet = ControlNetModel(
        block_out_channels=(16,), down_block_types=("DownBlock2D",), layers_per_block=1, norm_num_groups=4,
        cross_attention_dim=8, conditioning_embedding_out_channels=(4, 4, 4),
    )  # fmt: skip
    controlnet.half().save_pretrained(folder / "model")
    (folder / "evaluation" / "evaluation.json").write_text(json.dumps(EVALUATED))
    losses = {f"{name}_loss": 0.0512 for name in ("train", "held_out", "validation")}
    lines = [{"step": step, "seconds": 60.0 * step, **losses} for step in (0, 7)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in EVALUATED["sheets"]:
        Image.new("RGB", (8, 8)).save(folder / "evaluation" / f"{name}.png")


@pytest.fixture
def bundled(tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "licences").mkdir()
    (tmp_path / "licences" / "a.txt").write_text("a licence")
    (tmp_path / "notes.md").write_text("## What to expect\n\nIt is small.\n")
    flags = ["--run", "run", "--licences", "licences", "--notes", "notes.md", "--out", "out", "--results", "results"]
    return bundle.parse_arguments([str(tmp_path / each) if i % 2 else each for i, each in enumerate(flags)])


def test_the_bundled_folder_has_its_card_and_results(bundled):
    bundle.run(bundled)
    assert {path.name for path in bundled.out.iterdir()} == {
        *bundle.MODEL, "README.md", "licenses", "held_out.png", "styles.png", "other.png",
    }  # fmt: skip
    card = (bundled.out / "README.md").read_text()
    for text in (
        "It is small.",
        "81.2 %",
        "| 0.5 | 18.8 % | 6.2 % |",
        "7 steps in 7 minutes",
        "(4, 4, 4)",
        '"red apple"',
        "- [a.txt](licenses/a.txt)",
    ):
        assert text in card
    assert {path.name for path in bundled.results.iterdir()} == set(bundle.KEPT.values())
    assert load_controlnet(bundled.out, "cpu").dtype == torch.float32


def test_a_folder_that_is_too_large_is_not_bundled(bundled, monkeypatch):
    monkeypatch.setattr(bundle, "MOST_BYTES", 2**10)
    with pytest.raises(ValueError, match="more than"):
        bundle.run(bundled)


@pytest.mark.slow
def test_the_evaluation_measures_a_folder_and_draws_its_sheets(data, model, arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "OTHER", {"cat": "dog"})
    monkeypatch.setattr(evaluate, "SCALES", (1.0,))
    monkeypatch.setattr(evaluate, "STYLE_ROWS", 1)
    trained = tmp_path / "run"
    run(arguments(trained, "--minutes", "0"))
    flags = {"--data": data, "--model": model, "--controlnet": trained / "model", "--out": tmp_path / "evaluation"}
    flags |= {"--steps": 2, "--most": 2, "--device": "cpu"}
    results = evaluate.run(evaluate.parse_arguments([str(each) for pair in flags.items() for each in pair]))
    assert results["sets"].keys() == {"train", "held_out", "new_words"} and results["scales"].keys() == {"1"}
    figures = results["sets"]["train"]
    assert figures["controlled"] == figures["prompt_alone"], "a new ControlNet changes nothing"
    assert figures["controlled"]["pictures"] == 2
    names = {path.name for path in (tmp_path / "evaluation").iterdir()}
    assert names == {"evaluation.json", "held_out.png", "styles.png", "other.png"}
