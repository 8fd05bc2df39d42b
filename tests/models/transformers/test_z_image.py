"""ZImageTransformer2DModel: bits, errors, calls and folders. tests/parity compares it with diffusers."""

import inspect
import json
from dataclasses import fields

import diffusers
import pytest
import torch
from torch import Tensor, nn

from fastdiff import InputError, ZImageTransformer2DModel
from fastdiff.checkpoints.configs.z_image import ZImageTransformer2DConfig
from fastdiff.checkpoints.weights import diffusers_shapes
from fastdiff.execution.devices import on_meta
from fastdiff.models.blocks.conditioning import GROUP, Conditioning, Prompt
from fastdiff.models.z_image import ZImageTransformer2DModel as Model
from fastdiff.models.z_image import rounded_up

TINY = {
    "dim": 16,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "in_channels": 4,
    "cap_feat_dim": 8,
    "axes_dims": (4, 2, 2),
    "axes_lens": (128, 16, 32),
}
TURBO = {  # Tongyi-MAI/Z-Image-Turbo, from its config.json
    "_class_name": "ZImageTransformer2DModel",
    "_diffusers_version": "0.36.0.dev0",
    "all_f_patch_size": [1],
    "all_patch_size": [2],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-05,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
BAD_CONFIGS = {
    "unknown-option": ({"num_layers": 4}, "unknown option num_layers"),
    "omni": ({"siglip_feat_dim": 1152}, "siglip_feat_dim: 1152 is not null: Z-Image-Omni"),
    "no-layers": ({"n_layers": 0}, "n_layers: 0"),
    "heads-do-not-divide": ({"n_heads": 3}, "n_heads: 3 does not divide dim 16"),
    "two-axes": ({"axes_dims": [4, 4]}, "axes_dims"),
    "odd-axis": ({"axes_dims": [4, 3, 1]}, "axes_dims: (4, 3, 1); each must be even"),
    "axes-of-another-head": ({"axes_dims": [4, 4, 2]}, "axes_dims: (4, 4, 2) sum to 10, but a head is 8"),
    "no-positions": ({"axes_lens": [128, 0, 32]}, "axes_lens"),
    "patch-without-frames": ({"all_patch_size": [2, 4]}, "all_f_patch_size: 1 sizes for 2"),
    "equal-patches": ({"all_patch_size": [2, 2], "all_f_patch_size": [1, 1]}, "all_patch_size: two patches"),
    "no-patches": ({"all_patch_size": [], "all_f_patch_size": []}, "all_patch_size"),
}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    ours = ZImageTransformer2DModel.from_config(TINY)
    for token in (ours.x_pad_token, ours.cap_pad_token):
        token.normal_()
    return ours


def inputs(*calls: tuple[tuple[int, int], int]) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return random latents, times and captions for the sizes and lengths of `calls`."""
    generator = torch.Generator().manual_seed(1)
    latents = [torch.randn(4, 1, *size, generator=generator) for size, _ in calls]
    captions = [torch.randn(length, 8, generator=generator) for _, length in calls]
    return latents, torch.rand(len(calls), generator=generator), captions


MIXED = (((8, 12), 5), ((4, 20), 33), ((8, 12), 30), ((16, 8), 64), ((8, 12), 32), ((4, 20), 7))


def test_a_picture_has_the_same_bits_alone_and_in_any_batch(model):
    """Beside captions of other lengths and pictures of other sizes, at any place; run, recorded and replayed."""
    latents, times, captions = inputs(*MIXED)
    alone = [model([x], t[None], [c]).sample[0] for x, t, c in zip(latents, times, captions, strict=True)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0], [2, 0, 4], [1, 1, 1], [4, 5]):
        for _ in range(2):
            given = [latents[i] for i in order], times[order], [captions[i] for i in order]
            together = model(*given).sample
            assert all(torch.equal(each, alone[i]) for i, each in zip(order, together, strict=True))
    assert len({tuple(each.flatten()[:3].tolist()) for each in alone}) == len(alone)


def test_on_a_cpu_each_picture_is_computed_alone(monkeypatch):
    """torch's products of a batch may give a picture other bits."""
    sizes = []
    for name in ("_step", "_refine"):
        function = getattr(Model, name)

        def counted(self, *arguments, function=function):
            sizes.append(len(arguments[-1]))
            return function(self, *arguments)

        monkeypatch.setattr(Model, name, counted)
    ZImageTransformer2DModel.from_config(TINY)(*inputs(((8, 12), 5), ((8, 12), 9)))
    assert sizes == [1, 1, 1, 1]


def test_the_conditioning_of_a_time_is_its_own(model):
    """A time's bits do not depend on the number of others or its place in a group: a table relies on it."""
    times = torch.linspace(0, 1, 40)
    table = model.embed(times)
    assert table.shape == (40, model.conditioning_width)
    for places in (slice(0, 3), slice(0, GROUP), slice(GROUP, 40)):
        assert torch.equal(model.embed(times[places]), table[places])


def told(latents, captions):
    """Return what `project` takes."""
    lengths = torch.tensor([len(each) for each in captions])
    text = nn.utils.rnn.pad_sequence(captions, batch_first=True)
    return Prompt(text, added=(lengths, torch.tensor([latents[0].shape[2:]] * len(captions))))


@pytest.mark.parametrize("lengths", [(5, 20), (5, 40)])
def test_a_loop_computes_what_does_not_change_before_its_steps(model, lengths):
    """`predict` is minus `forward`. With captions of one padded length it has its bits."""
    latents, _, captions = inputs(*(((8, 12), length) for length in lengths))
    timesteps = torch.tensor([1000.0, 700.0, 100.0])
    table, conditions = model.embed(timesteps), model.project(told(latents, captions))
    x = torch.stack(latents)[:, :, 0].permute(0, 2, 3, 1)
    for i, t in enumerate(timesteps):
        expected = torch.stack(model(latents, (1000 - t) / 1000, captions).sample)[:, :, 0]
        for k in range(2):  # on the CPU, one by one
            own = tuple(each[k : k + 1] for each in conditions)
            made = -model.predict(x[k : k + 1], Conditioning(table[i : i + 1], t[None], own)).permute(0, 3, 1, 2)[0]
            if len(own) == 3:
                assert torch.equal(made, expected[k])
            torch.testing.assert_close(made, expected[k], rtol=1e-5, atol=1e-5)
    assert len(conditions) == (4 if max(lengths) > 32 else 3)  # only captions that are filled up have a bias


def test_positions_are_those_of_the_padded_caption(model):
    """Tokens of a caption count from 1. The first axis of a picture stands after the padded caption."""
    caption, side = rounded_up(5), 4
    cos, sin = model.positions(caption, 1, 2 * side, 2 * side)
    assert cos.shape == sin.shape == (1, side * side + 16 + caption, 4)  # 16 tokens of padding
    first = torch.atan2(sin, cos)[0, :, 0].remainder(2 * torch.pi)  # the first channel of the first axis turns by 1
    wanted = torch.cat([torch.full((16,), 33), torch.zeros(16), torch.arange(1, 33)]).remainder(2 * torch.pi)
    torch.testing.assert_close(first.cos(), wanted.cos())
    assert not sin[0, 16:32].any() and (cos[0, 16:32] == 1).all()


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config_is_one_line_that_names_the_option(case):
    options, named = BAD_CONFIGS[case]
    with pytest.raises(InputError) as error:
        ZImageTransformer2DModel.from_config(TINY | options, source="here/config.json")
    assert str(error.value).startswith("here/config.json: ")
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_config_defaults_are_diffusers():
    theirs = inspect.signature(diffusers.ZImageTransformer2DModel.__init__).parameters
    ours = {field.name: field.default for field in fields(ZImageTransformer2DConfig)}
    wanted = {name: each.default for name, each in theirs.items() if name != "self"}
    assert ours == {name: tuple(each) if isinstance(each, list) else each for name, each in wanted.items()}


def test_a_real_config_has_the_keys_and_shapes_of_diffusers():
    with on_meta():
        ours = ZImageTransformer2DModel.from_config(TURBO)
    with torch.device("meta"):
        theirs = diffusers.ZImageTransformer2DModel.from_config(TURBO)
    assert diffusers_shapes(ours) == {name: tensor.shape for name, tensor in theirs.state_dict().items()}
    assert sum(parameter.numel() for parameter in ours.parameters()) == 6_154_908_736


X, T, CAPTION = torch.zeros(4, 1, 8, 12), torch.zeros(1), torch.zeros(5, 8)
BAD_CALLS = {
    "no-list": ((X[0], T, [CAPTION]), {}, r"x\[0\]: expected \(4, F, H, W\), got \(8, 12\)"),
    "nothing": (([], T, [CAPTION]), {}, "x: .* is not a list of latents"),
    "number": ((3, T, [CAPTION]), {}, "x: 3 is not a list of latents"),
    "omni": (([[X]], T, [CAPTION]), {}, "x: a list of pictures for each prompt, but Z-Image-Omni"),
    "omni-captions": (([X], T, [[CAPTION]]), {}, "cap_feats: a list of captions for each picture, but Z-Image-Omni"),
    "siglip": (([X], T, [CAPTION]), {"siglip_feats": [[X]]}, "siglip_feats: Z-Image-Omni"),
    "noise-mask": (([X], T, [CAPTION]), {"image_noise_mask": [[1]]}, "image_noise_mask: Z-Image-Omni"),
    "controlnet": (([X], T, [CAPTION]), {"controlnet_block_samples": {0: X}}, "controlnet_block_samples: ControlNets"),
    "lora-scale": (([X], T, [CAPTION]), {"joint_attention_kwargs": {"scale": 0.5}}, "joint_attention_kwargs"),
    "patch": (([X], T, [CAPTION]), {"patch_size": 4}, r"patch_size, f_patch_size: \(4, 1\); the model has 2 and 1"),
    "no-frames": (([X[:, 0]], T, [CAPTION]), {}, r"x\[0\]: expected \(4, F, H, W\)"),
    "channels": (([X, X[:3]], T, [CAPTION] * 2), {}, r"x\[1\]: expected \(4, F, H, W\), got \(3, 1, 8, 12\)"),
    "no-whole-patches": (([X[..., :7]], T, [CAPTION]), {}, r"x\[0\]: 1 frames of 8 x 7"),
    "half": (([X.half()], T, [CAPTION]), {}, r"x\[0\]: torch.float16 on cpu, but the model is torch.float32"),
    "grad": (([X.clone().requires_grad_()], T, [CAPTION]), {}, r"x\[0\]: it requires grad"),
    "integers": (([X.int()], T, [CAPTION]), {}, r"x\[0\]: it is torch.int32"),
    "caption-width": (([X], T, [CAPTION[:, :7]]), {}, r"cap_feats\[0\]: expected \(L, 8\), got \(5, 7\)"),
    "empty-caption": (([X], T, [CAPTION[:0]]), {}, r"cap_feats\[0\]: expected \(L, 8\), got \(0, 8\)"),
    "two-captions": (([X], T, [CAPTION] * 2), {}, "cap_feats: 2 captions for 1 pictures"),
    "long-caption": (([X], T, [torch.zeros(97, 8)]), {}, r"cap_feats\[0\]: 97 tokens, beside 1 frames, go beyond"),
    "wide": (([torch.zeros(4, 1, 8, 66)], T, [CAPTION]), {}, r"x\[0\]: 8 x 66 is larger than 32 x 64"),
    "high": (([torch.zeros(4, 1, 34, 8)], T, [CAPTION]), {}, r"x\[0\]: 34 x 8 is larger than 32 x 64"),
    "times": (([X], torch.zeros(2), [CAPTION]), {}, r"t: its shape is \(2,\) for 1 pictures"),
    "no-time": (([X], "now", [CAPTION]), {}, "t: 'now' is not a tensor"),
    "return-dict": (([X], T, [CAPTION], 3), {}, "return_dict: 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call(model, case):
    arguments, options, message = BAD_CALLS[case]
    with pytest.raises(InputError, match=f"^{message}") as error:
        model(*arguments, **options)
    assert "\n" not in str(error.value)


def test_the_largest_caption_and_picture(model):
    """Theirs, too, have as many positions as axes_lens says."""
    theirs = diffusers.ZImageTransformer2DModel(**TINY).eval()
    frames, too_many = torch.zeros(4, 31, 4, 4), torch.zeros(4, 32, 4, 4)
    largest = torch.zeros(4, 1, 32, 64)
    for x, caption, fits in ((largest, 64, True), (X, 97, False), (frames, 96, True), (too_many, 96, False)):
        given = [x], T, [torch.zeros(caption, 8)]
        if fits:
            model(*given)
            theirs(*given)
            continue
        with pytest.raises(InputError):
            model(*given)
        with pytest.raises(IndexError):
            theirs(*given)


def test_batches_as_tensors_and_a_number_as_time(model):
    latents, _, captions = inputs(((8, 12), 5), ((8, 12), 5))
    expected = model(latents, torch.tensor([0.5, 0.5]), captions).sample
    for t in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
        made = model(torch.stack(latents), t, torch.stack(captions), joint_attention_kwargs={})
        assert all(map(torch.equal, made.sample, expected))


# Folders


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    return tmp_path


def test_a_folder_with_shards_of_a_variant(model, tmp_path):
    model.save_pretrained(tmp_path / "transformer", max_shard_size="10KB", variant="fp16")
    ours = ZImageTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer", variant="fp16")
    given = inputs(*MIXED)
    assert all(map(torch.equal, ours(*given).sample, model(*given).sample))


def test_a_missing_shard_is_one_line(folder):
    shard = sorted(folder.glob("*-00002-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(InputError, match=f"names {shard.name}, which does not exist") as error:
        ZImageTransformer2DModel.from_pretrained(folder)
    assert "\n" not in str(error.value)


def test_a_folder_of_another_class_is_refused(folder):
    config = json.loads((folder / "config.json").read_text()) | {"_class_name": "Lumina2Transformer2DModel"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="describes a Lumina2Transformer2DModel, but ZImageTransformer2DModel"):
        ZImageTransformer2DModel.from_pretrained(folder)


@pytest.mark.parametrize(("precision", "allowed"), [("int8", 0.05), ("fp8", 0.2)])
def test_weights_in_8_bits(precision, allowed, folder, model):
    ours = ZImageTransformer2DModel.from_pretrained(folder, precision=precision)
    given = inputs(*MIXED)
    for own, expected in zip(ours(*given).sample, model(*given).sample, strict=True):
        error = (own - expected).norm() / expected.norm()
        assert 0 < error < allowed
