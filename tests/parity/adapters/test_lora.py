"""LoRA files of every format draw what diffusers draws with weights merged by hand; methods do as diffusers + peft."""

import peft
import pytest
import torch

import fastdiff
from tests.adapters.formats import (
    deltas_of,
    in_diffusers,
    in_kohya,
    in_ldm,
    in_old_diffusers,
    merge,
    random_loras,
    save,
)
from tests.support.pairwise import product
from tests.support.text_parity import assert_same, draw
from tests.support.text_pipelines import text_pipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),  # diffusers'
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),  # peft's, for a second adapter
    pytest.mark.filterwarnings("ignore:Adapter b was active which is now deleted"),  # peft then chooses another
]

FORMATS = {
    "diffusers": in_diffusers,
    "diffusers with processors": in_old_diffusers,
    "kohya": in_kohya,
    "kohya with LDM's names": in_ldm,
    "peft": lambda loras: {f"base_model.model.{k.partition('.')[2]}": v for k, v in in_diffusers(loras).items()},
}


# SD 2.x has the parts of the other two, so `make test` leaves it out.
KINDS = ["sdxl", pytest.param("sd2", marks=pytest.mark.slow, id="sd2"), "sd1"]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def ours(kind, text_folder):
    return fastdiff.Pipeline.from_pretrained(text_folder(kind))


@pytest.mark.parametrize(("name", "kind"), product(list(FORMATS), KINDS, together=1))
def test_every_format_draws_what_merging_by_hand_draws(name, kind, ours, tmp_path):
    loras = random_loras(text_pipeline(kind))
    if name == "peft":  # its files have one model
        loras = {place: pair for place, pair in loras.items() if place[0] == "unet"}
    file = save(tmp_path / "lora.safetensors", FORMATS[name](loras))
    before = draw(ours)
    ours.load_lora_weights(file)
    drawn = draw(ours)
    assert_same(drawn, draw(merge(text_pipeline(kind), deltas_of(loras))))
    assert (drawn[0][-1][1] - before[0][-1][1]).abs().max() > 0.1 * before[0][-1][1].abs().max()


def test_both_namings_in_one_file_and_the_layers_beside_the_blocks(kind, ours, tmp_path):
    pipe = text_pipeline(kind)
    ends = ("conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2", "downsamplers.0.conv")
    ends += ("upsamplers.0.conv", "add_embedding.linear_1", "add_embedding.linear_2", "mid_block.resnets.1.conv2")
    beside = random_loras(pipe, seed=1, ends=ends)
    usual = {place: pair for place, pair in random_loras(pipe).items() if place not in beside}
    if kind == "sdxl":
        beside |= random_loras(pipe, seed=2, ends=("text_projection",))
    file = save(tmp_path / "lora.safetensors", in_ldm(beside) | in_kohya(usual))
    ours.load_lora_weights(file)
    assert len(beside) >= 7
    assert_same(draw(ours), draw(merge(pipe, deltas_of(beside | usual))))


@pytest.mark.parametrize(("alpha", "kind"), product([8.0, None, 1.0], KINDS, together=1))
def test_alpha_of_each_module(alpha, kind, ours, tmp_path):
    """diffusers takes the commonest alpha for all attentions; kohya's files mean each module's own."""
    scale = 1.0 if alpha is None else alpha / 4
    loras = random_loras(text_pipeline(kind), rank=4)
    first = next(iter(loras))
    other = {first: loras.pop(first)}
    file = save(tmp_path / "lora.safetensors", in_kohya(loras, alpha) | in_kohya(other, 3.0))
    ours.load_lora_weights(file)
    pipe = merge(merge(text_pipeline(kind), deltas_of(loras), scale), deltas_of(other), 0.75)
    assert_same(draw(ours), draw(pipe))


def save_of_peft(kind, folder, **options):
    """Save a LoRA of diffusers + peft, with its config in the metadata, and return its file."""
    torch.manual_seed(0)
    pipe = text_pipeline(kind)
    targets = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "proj_in", "time_emb_proj"]
    pipe.unet.add_adapter(peft.LoraConfig(init_lora_weights=False, target_modules=targets, **options))
    pipe.text_encoder.add_adapter(
        peft.LoraConfig(r=2, lora_alpha=3, init_lora_weights=False, target_modules=["q_proj", "fc2"])
    )
    parts = {"unet": pipe.unet, "text_encoder": pipe.text_encoder}
    metadata = {name: part.peft_config["default"].to_dict() for name, part in parts.items()}
    type(pipe).save_lora_weights(
        folder,
        **{f"{name}_lora_layers": peft.get_peft_model_state_dict(part) for name, part in parts.items()},
        **{f"{name}_lora_adapter_metadata": each for name, each in metadata.items()},
    )
    return folder


OPTIONS = {
    "alpha": {"r": 4, "lora_alpha": 8},
    "patterns": {"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2, "up_blocks.0.resnets.0.conv1": 5}}
    | {"rank_pattern": {"to_k": 2, "mid_block.resnets.0.conv1": 3}},
    "rank-stabilised": {"r": 4, "lora_alpha": 4, "use_rslora": True},
    "DoRA": {"r": 4, "lora_alpha": 4, "use_dora": True},
}


@pytest.mark.parametrize(("options", "kind"), product(OPTIONS, KINDS, together=1))
def test_files_with_pefts_config(options, kind, ours, tmp_path):
    theirs, file = text_pipeline(kind), save_of_peft(kind, tmp_path, **options)
    for pipe in (theirs, ours):
        pipe.load_lora_weights(file)
    assert_same(draw(ours), draw(theirs))
    for pipe in (theirs, ours):
        pipe.load_lora_weights(file, adapter_name="b")
        pipe.set_adapters(["default_0", "b"], [0.4, 0.3])
    assert_same(draw(ours), draw(theirs))


def test_a_folder_that_peft_saved(kind, ours, tmp_path):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, target_modules=["to_q", "to_v"])
    changed = peft.get_peft_model(text_pipeline(kind).unet, config)
    changed.save_pretrained(tmp_path)
    ours.load_lora_weights(tmp_path)
    assert_same(draw(ours), draw(text_pipeline(kind, unet=changed.merge_and_unload())))


def test_every_method_does_as_diffusers(kind, ours, tmp_path):
    theirs, plain = text_pipeline(kind), draw(ours)
    files = [save(tmp_path / f"{i}.safetensors", in_diffusers(random_loras(theirs, 4 * i, i))) for i in (1, 2)]
    pipes = (theirs, ours)

    def compare(**options):
        assert_same(draw(ours, **options), draw(theirs, **options))
        assert ours.get_active_adapters() == theirs.get_active_adapters()
        assert ours.get_list_adapters() == theirs.get_list_adapters()

    for pipe in pipes:
        pipe.load_lora_weights(files[0])
        pipe.load_lora_weights(files[1], adapter_name="b")
    compare()
    one = [0.1] if kind == "sdxl" else [0.1, 0.9]
    blocks = {"unet": {"mid": 0.5, "down": 0.3, "up": {f"block_{int(kind != 'sdxl')}": one}}}
    for weights in (0.3, [0.2, None], [blocks, {"unet": 0.4, "text_encoder": 0.1}]):
        for pipe in pipes:
            pipe.set_adapters(["default_0", "b"], weights)
        compare()
    compare(cross_attention_kwargs={"scale": 0.5})
    for pipe in pipes:
        pipe.disable_lora()
    compare()
    assert all(torch.equal(ours, theirs) for (_, ours), (_, theirs) in zip(draw(ours)[0], plain[0], strict=True))
    for pipe in pipes:
        pipe.enable_lora()
        pipe.set_adapters("b", 0.7)
        pipe.fuse_lora(components=["unet", "text_encoder"])
    compare(cross_attention_kwargs={"scale": 0.5})
    assert ours.fused_loras == theirs.fused_loras
    for pipe in pipes:
        pipe.unfuse_lora(components=["unet", "text_encoder"])
    compare()
    for pipe in pipes:
        pipe.delete_adapters("b")
        pipe.set_adapters("default_0", 0.6)
        pipe.fuse_lora(components=["unet"])
        pipe.unload_lora_weights()
    compare()


def test_a_scale_of_zero_keeps_the_weights(ours, kind, tmp_path):
    """diffusers resets each weight to 1 after such a call."""
    ours.load_lora_weights(save(tmp_path / "lora.safetensors", in_diffusers(random_loras(text_pipeline(kind)))))
    ours.set_adapters("default_0", 0.3)
    before = draw(ours)
    draw(ours, cross_attention_kwargs={"scale": 0})
    assert_same(draw(ours), before)


def test_an_adapter_changed_between_steps_counts_at_the_next_step(kind, ours, tmp_path):
    theirs = text_pipeline(kind)
    file = save(tmp_path / "lora.safetensors", in_diffusers(random_loras(theirs)))

    def edit(pipe, step, timestep, tensors):
        pipe.set_adapters("default_0", [0.2, 0.9, 0.4, 0.6][step])
        return tensors

    for pipe in (theirs, ours):
        pipe.load_lora_weights(file)
    assert_same(draw(ours, edit), draw(theirs, edit))
