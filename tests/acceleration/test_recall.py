"""accelerate keeps the conditioning between the steps of a loop, and follows every change to what it was made of."""

import copy
import gc
import weakref

import diffusers
import pytest
import torch

import fastdiff
from tests.support.text_pipelines import text_pipeline, tiny_unet

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")  # diffusers
TIMESTEPS = torch.arange(980, 0, -20)  # 49, so two groups


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def unet():
    return fastdiff.accelerate(tiny_unet("sdxl"))


def inputs(count=2, seed=0, channels=4):
    """Return the sample and the conditions of a call of SDXL's tiny U-Net."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((channels, 8, 8), (5, 72), (24,))
    sample, text, embeds = (torch.randn(count, *shape, generator=generator) for shape in shapes)
    ids = torch.tensor([[16.0, 16, 0, 0, 16, 16]]).repeat(count, 1)
    return sample, {"encoder_hidden_states": text, "added_cond_kwargs": {"text_embeds": embeds, "time_ids": ids}}


def ours_of(model):
    return model.forward.__self__.ours()


def runs_of(model):
    return ours_of(model).recall._runs


def count_calls(ours, monkeypatch, *names):
    calls = dict.fromkeys(names, 0)

    def counted(name, function):
        def call(*args):
            calls[name] += 1
            return function(*args)

        return call

    for name in names:
        monkeypatch.setattr(ours, name, counted(name, getattr(ours, name)))
    return calls


def alone(model, *args, **kwargs):
    """Return the output of a call for which nothing is kept."""
    recall = ours_of(model).recall
    recall._runs, kept = [], recall._runs
    output = model(*args, **kwargs, return_dict=False)[0]
    recall._runs = kept
    return output


def test_a_loop_computes_its_conditioning_once(unet, monkeypatch):
    sample, given = inputs()
    calls = count_calls(ours_of(unet), monkeypatch, "project", "embed", "conditioning")
    for t in TIMESTEPS:
        unet(sample, t, **given)
    assert calls == {"project": 1, "embed": 2 * 2, "conditioning": 0}  # two pictures, two groups
    assert len(runs_of(unet)) == 1


def test_the_text_is_one_tensor_in_all_steps(unet, monkeypatch):
    """A CUDA graph need not copy an input that it has."""
    sample, given = inputs()
    ours, seen = ours_of(unet), []
    ours.use_graphs = False  # to see every call
    monkeypatch.setattr(ours, "predict", lambda x, conditioning, extras: seen.append(conditioning.text[0]) or x)
    for t in TIMESTEPS[:3]:
        unet(sample, t, **given)
    assert all(text is seen[0] for text in seen)


def test_a_step_predicts_what_a_single_call_does(unet):
    """A single call takes the timestep as a tensor or as a number."""
    sample, given = inputs()
    ours = ours_of(unet)
    for i, t in enumerate(TIMESTEPS):
        found = unet(sample, t, **given).sample
        if i % 16 in (0, 15):
            ours.recall, kept = None, ours.recall
            for timestep in (t, int(t)):
                torch.testing.assert_close(found, type(ours).forward(ours, sample, timestep, **given).sample)
            ours.recall = kept


def test_bits_do_not_depend_on_the_steps_before(unet):
    sample, given = inputs()
    outputs = [unet(sample, t, **given).sample for t in TIMESTEPS]
    later = inputs()[1]
    for i in (3, 31, 32, 40):  # as image-to-image starts midway
        assert torch.equal(unet(sample, TIMESTEPS[i:][0], **later).sample, outputs[i])
        assert torch.equal(alone(unet, sample, TIMESTEPS[i], **given), outputs[i])


def other_values(given):
    return {"encoder_hidden_states": given["encoder_hidden_states"].flip(0)} | {
        "added_cond_kwargs": {name: each.flip(0) for name, each in given["added_cond_kwargs"].items()}
    }


CHANGES = {
    "text in place": lambda given: given["encoder_hidden_states"].mul_(-1),
    "text in inference mode": torch.inference_mode()(lambda given: given["encoder_hidden_states"].mul_(-1)),
    "text by data": lambda given: setattr(
        given["encoder_hidden_states"], "data", -given["encoder_hidden_states"].clone()
    ),
    "text replaced": lambda given: given.update(encoder_hidden_states=-given["encoder_hidden_states"]),
    "text_embeds in place": lambda given: given["added_cond_kwargs"]["text_embeds"].mul_(-1),
    "time_ids in place": lambda given: given["added_cond_kwargs"]["time_ids"].add_(9),
    "time_ids replaced": lambda given: given["added_cond_kwargs"].update(time_ids=torch.ones(2, 6)),
    "all replaced": lambda given: given.update(other_values(given)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_conditions_count_at_the_next_step(unet, change):
    sample, given = inputs()
    before = alone(unet, sample, TIMESTEPS[1], **given)
    unet(sample, TIMESTEPS[0], **given)
    change(given)
    after = unet(sample, TIMESTEPS[1], **given).sample
    assert (after - before).abs().max() > 1e-4
    assert torch.equal(after, alone(unet, sample, TIMESTEPS[1], **given))


def test_timesteps_that_are_edited_in_place(unet):
    sample, given = inputs()
    timesteps = TIMESTEPS.clone()
    first, second, _ = (unet(sample, t, **given).sample for t in timesteps[:3])
    timesteps[2:] = timesteps[1]
    assert torch.equal(unet(sample, timesteps[3], **given).sample, second)
    assert not torch.equal(first, second)


# weights that no conditioning depends on, and blocks that are like the mid block
ELSEWHERE = (".conv", "norm", ".ff.", ".attn1.", ".to_q.", ".to_out.", "up_blocks", "down_blocks.1.resnets")


def test_every_weight_that_is_edited_in_place(unet):
    sample, given = inputs()
    names = [name for name, _ in unet.named_parameters() if not any(part in name for part in ELSEWHERE)]
    assert len(names) > 20
    timesteps = torch.arange(len(names) + 1)
    unet(sample, timesteps[0], **given)
    for name, t in zip(names, timesteps[1:], strict=True):
        unet.get_parameter(name).add_(0.1)
        assert torch.equal(unet(sample, t, **given).sample, alone(unet, sample, t, **given)), name
    assert runs_of(unet)[0].step == len(names)


def test_writes_that_torch_does_not_count_take_effect_when_the_loop_starts_again(unet):
    """peft fuses a LoRA through `.data`."""
    sample, given = inputs()
    before = [unet(sample, t, **given).sample for t in TIMESTEPS[:3]]
    weight = unet.get_parameter("mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight")
    weight.data += 0.5
    for i, t in enumerate(TIMESTEPS[:3]):
        after = unet(sample, t, **given).sample
        assert torch.equal(after, alone(unet, sample, t, **given)) and not torch.equal(after, before[i])


def test_two_prompts_in_each_step(unet, monkeypatch):
    sample, one = inputs()
    _, other = inputs(seed=1)
    expected = [alone(unet, sample, TIMESTEPS[20], **given) for given in (one, other)]
    calls = count_calls(ours_of(unet), monkeypatch, "project")
    for t in TIMESTEPS[:21]:
        found = [unet(sample, t, **given).sample for given in (one, other)]
    assert calls == {"project": 2}
    assert all(map(torch.equal, found, expected))


def test_few_runs_are_kept_and_none_of_dead_prompts(unet):
    sample, _ = inputs()
    alive = [inputs(seed=seed)[1] for seed in range(6)]
    for given in alive:
        unet(sample, TIMESTEPS[0], **given)
    assert len(runs_of(unet)) == 4
    del alive[:], given
    unet(sample, TIMESTEPS[0], **inputs()[1])
    assert len(runs_of(unet)) == 1


@torch.inference_mode()
def tensors_of_inference():
    return inputs()[1], TIMESTEPS.clone()


def kept_nothing(case):
    """Return the timesteps and conditions of calls that keep nothing, and the number of pictures."""
    count, timesteps = (9 if case == "many pictures" else 2), TIMESTEPS[:2]
    given = inputs(count)[1]
    if case == "inference tensors":
        given, timesteps = tensors_of_inference()
    if case == "numbers":
        timesteps = timesteps.tolist()
    if case == "a timestep for each picture":
        timesteps = [torch.tensor([980, 20]), torch.tensor([960, 0])]
    if case == "tensors of their own":
        timesteps = [torch.tensor(980), torch.tensor([960])]
    return count, timesteps, given


@pytest.mark.parametrize(
    "case", ["numbers", "a timestep for each picture", "tensors of their own", "inference tensors", "many pictures"]
)
def test_nothing_is_kept(unet, case):
    count, timesteps, given = kept_nothing(case)
    sample = inputs(count)[0]
    for t in timesteps[:2]:
        found = unet(sample, t, **given).sample
        torch.testing.assert_close(found, diffusers_output(unet, sample, t, given), rtol=0, atol=1e-4)
    assert not runs_of(unet)


def diffusers_output(model, sample, t, given):
    return fastdiff.restore(copy.deepcopy(model))(sample, t, **given).sample


def test_a_loop_in_inference_mode_over_normal_tensors(unet):
    sample, given = inputs()
    with torch.inference_mode():
        first = unet(sample, TIMESTEPS[0], **given).sample
    second = unet(sample, TIMESTEPS[1], **given).sample
    assert runs_of(unet)[0].step == 1
    for t, found in zip(TIMESTEPS[:2], (first, second), strict=True):
        torch.testing.assert_close(found, diffusers_output(unet, sample, t, given), rtol=0, atol=1e-4)


def test_a_mask_that_changes_from_step_to_step(unet):
    sample, given = inputs()
    for t, hidden in zip(TIMESTEPS[:3], (0, 1, 4), strict=True):
        mask = torch.ones(2, 5)
        mask[:, hidden] = 0
        found = unet(sample, t, **given, encoder_attention_mask=mask).sample
        torch.testing.assert_close(
            found, diffusers_output(unet, sample, t, given | {"encoder_attention_mask": mask}), rtol=0, atol=1e-4
        )
    assert runs_of(unet)[0].step == 2


class TestLabels:
    SAMPLE = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    @pytest.fixture
    def model(self, randomise):
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
        return fastdiff.accelerate(randomise(diffusers.UNet2DModel(**blocks, **sizes, num_class_embeds=4)))

    @pytest.mark.parametrize("labels", [[0, 2, 3], [1]], ids=["each", "one"])
    def test_are_followed(self, model, labels):
        labels = torch.tensor(labels)
        model(self.SAMPLE, TIMESTEPS[0], labels)
        for t in TIMESTEPS[1:3]:
            labels.sub_(1).abs_()
            found = model(self.SAMPLE, t, labels).sample
            torch.testing.assert_close(found, diffusers_labels(model, self.SAMPLE, t, labels), rtol=0, atol=1e-4)
        assert runs_of(model)[0].step == 2

    def test_a_model_without_labels_has_one_condition(self, randomise, monkeypatch):
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
        model = fastdiff.accelerate(randomise(diffusers.UNet2DModel(**blocks, **sizes)))
        calls = count_calls(ours_of(model), monkeypatch, "embed")
        sample = self.SAMPLE.repeat(4, 1, 1, 1)
        for t in TIMESTEPS[:5]:
            found = model(sample, t.expand(12)).sample
        assert calls == {"embed": 1}
        torch.testing.assert_close(found, diffusers_labels(model, sample, t), rtol=0, atol=1e-4)


def diffusers_labels(model, sample, t, *labels):
    return fastdiff.restore(copy.deepcopy(model))(sample, t, *labels).sample


def test_moving_the_model_frees_it_at_once(unet):
    sample, given = inputs()
    unet(sample, TIMESTEPS[0], **given)
    dead = weakref.ref(ours_of(unet))
    gc.disable()
    try:
        unet.to(torch.float64)
        assert dead() is None
    finally:
        gc.enable()


def test_a_model_that_takes_another_input_than_before(unet):
    """Our old model refuses the sample, and the new one takes it. An inpainting U-Net is made this way."""
    unet(inputs()[0], TIMESTEPS[0], **inputs()[1])
    unet.conv_in = torch.nn.Conv2d(9, 16, 3, padding=1)
    unet.register_to_config(in_channels=9)
    sample, given = inputs(channels=9)
    found = unet(sample, TIMESTEPS[1], **given).sample
    torch.testing.assert_close(found, diffusers_output(unet, sample, TIMESTEPS[1], given), rtol=0, atol=1e-4)
    with pytest.raises(fastdiff.InputError, match=r"sample: expected \(N, 9, "):
        unet(inputs()[0], TIMESTEPS[2], **given)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_a_pipeline_computes_its_conditioning_once(kind, monkeypatch):
    pipe = fastdiff.accelerate(text_pipeline(kind))
    calls = count_calls(ours_of(pipe.unet), monkeypatch, "project", "conditioning")
    for pictures in (1, 2):
        pipe("a photo", num_inference_steps=4, output_type="latent")
        assert calls == {"project": pictures, "conditioning": 0}
