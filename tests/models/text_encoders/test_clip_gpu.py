"""CLIP's text encoders on a GPU: compared with float32 references on the CPU, in any batch, with and without graphs."""

import pytest
import torch

from fastdiff import CLIPTextModel, CLIPTextModelWithProjection
from fastdiff.kernels.plans.choices import references_only

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_matmuls"),
]

OLD = {"bos_token_id": 0, "eos_token_id": 2, "num_hidden_layers": 3}  # of 12, 23 and 32
MODELS = {
    "sd15": (
        CLIPTextModel,
        OLD | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "projection_dim": 768},
    ),
    "sd21": (
        CLIPTextModel,
        OLD | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "hidden_act": "gelu"},
    ),
    "sdxl-2": (
        CLIPTextModelWithProjection,
        OLD
        | {
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_attention_heads": 20,
            "projection_dim": 1280,
            "hidden_act": "gelu",
        },
    ),
    "odd": (
        CLIPTextModelWithProjection,
        {
            "vocab_size": 99,
            "hidden_size": 36,
            "intermediate_size": 50,
            "num_attention_heads": 3,
            "num_hidden_layers": 2,
            "projection_dim": 7,
            "eos_token_id": 98,
        },
    ),
}
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])


@pytest.fixture(params=MODELS)
def model(request, randomise):
    """A model with random weights. Sums are about 1, so that rounding errors neither vanish nor grow a thousandfold."""
    kind, config = MODELS[request.param]
    model = randomise(kind.from_config(config)).requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight *= min(1, 10 * layer.in_features**-0.5)
        if isinstance(layer, torch.nn.LayerNorm):
            layer.weight += 1
    return model


def prompts(model, n, length=77, seed=0):
    """Return token ids: a few words each, then the end token, which is the vocabulary's last."""
    end = model.config.vocab_size - 1
    ids = torch.randint(0, end, (n, length), generator=torch.Generator().manual_seed(seed))
    for i in range(n):
        ids[i, 5 + i :] = end
    return ids


def outputs(model, ids):
    """Return all outputs of the model, on the CPU in float32."""
    output = model(ids, output_hidden_states=True)
    return [each.float().cpu() for each in (*output[:2], *output.hidden_states)]


def test_float32_is_the_reference(model):
    for length in (77, 13):
        ids = prompts(model, 2, length)
        expected = outputs(model.cpu(), ids)
        model.cuda()
        for _ in range(3):  # eager, captured, replayed
            for ours, wanted in zip(outputs(model, ids.cuda()), expected, strict=True):
                assert (ours - wanted).abs().max() <= 1e-4
                assert (ours - wanted).abs().max() <= 2e-5 * wanted.abs().max()


@HALVES
def test_half_precision_errs_at_most_twice_as_much_as_torch(model, dtype):
    ids = prompts(model, 2)
    expected = outputs(model, ids)
    model.to("cuda", dtype)
    model.use_graphs = False
    ours = outputs(model, ids.cuda())
    with references_only():
        torchs = outputs(model, ids.cuda())
    for mine, reference, wanted in zip(ours, torchs, expected, strict=True):
        error, allowed = (mine - wanted).norm(), (reference - wanted).norm()
        assert error <= 2 * allowed, f"{error / wanted.norm():.2e} against torch's {allowed / wanted.norm():.2e}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_in_any_batch(model, dtype):
    ids = prompts(model, 8).cuda()
    model.to("cuda", dtype)
    alone = outputs(model, ids[2:3])
    for first, last in ((1, 4), (0, 8)):
        for one, together in zip(alone, outputs(model, ids[first:last]), strict=True):
            assert torch.equal(together[2 - first], one[0])


def test_graphs_change_no_bit_and_no_earlier_output(model):
    model.to("cuda", torch.bfloat16)
    first, second = (prompts(model, 2, seed=seed).cuda() for seed in (0, 1))
    model.use_graphs = False
    expected = [model(ids).last_hidden_state for ids in (first, second)]
    model.use_graphs = True
    made = [model(ids).last_hidden_state for ids in (first, second, first, second)]
    for output, wanted in zip(made, expected * 2, strict=True):
        assert torch.equal(output, wanted)


def test_clip_skip_has_the_bits_of_the_hidden_states(model):
    model.to("cuda", torch.bfloat16)
    ids = prompts(model, 2).cuda()
    states = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(model.prompt_embeds(ids), model(ids).last_hidden_state)
    assert torch.equal(model.penultimate_embeds(ids, 1)[0], states[-3])


def test_the_launches_of_a_layer(randomise):
    """A layer is seven launches, as its module says. Other launches do not grow with the number of layers."""
    counts = []
    for layers in (2, 5):
        kind, config = MODELS["sd15"]
        model = randomise(kind.from_config(config | {"num_hidden_layers": layers})).to("cuda", torch.bfloat16)
        model.use_graphs = False
        ids = prompts(model, 1).cuda()
        model(ids)
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            model(ids)
            torch.cuda.synchronize()
        on_device = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(sum("Memset" not in each.name for each in on_device))  # memsets are a library's, not kernels
    assert counts[1] - counts[0] <= 3 * 7
