"""accelerate and restore on live diffusers denoisers."""

import copy

import diffusers
import pytest
import torch

import fastdiff
from tests.support.planners import policy, value_function

CONFIG = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "num_class_embeds": 3,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
SAMPLE, LABELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])


@pytest.fixture
def model(randomise):
    return randomise(diffusers.UNet2DModel(**CONFIG))


@pytest.fixture
def expected(model):
    with torch.no_grad():
        return model(SAMPLE, 10, LABELS).sample


def runs_on_fastdiff(model) -> bool:
    """fastdiff refuses a sample that requires grad; diffusers accepts it."""
    try:
        model(SAMPLE.clone().requires_grad_(), 10, LABELS)
    except fastdiff.InputError:
        return True
    return False


def test_same_object_same_outputs(model, expected):
    assert not runs_on_fastdiff(model)
    assert fastdiff.accelerate(model) is model
    assert runs_on_fastdiff(model)
    output = model(SAMPLE, 10, class_labels=LABELS)
    assert isinstance(output, diffusers.models.unets.unet_2d.UNet2DOutput)
    torch.testing.assert_close(output.sample, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(model(SAMPLE, 10, LABELS, return_dict=False)[0], expected, rtol=0, atol=1e-4)


def test_parameters_keep_names_shapes_and_values(model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = fastdiff.accelerate(model).state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_memory_is_shared(model, expected):
    """An in-place change to a parameter, even one that we stack, changes the output: there is no second copy."""
    fastdiff.accelerate(model)
    for name in ("conv_in.weight", "mid_block.attentions.0.to_k.weight"):
        with torch.no_grad():
            model.get_parameter(name).mul_(1.5)
    changed = model(SAMPLE, 10, LABELS).sample
    assert not torch.allclose(changed, expected, atol=1e-3)
    torch.testing.assert_close(fastdiff.restore(model)(SAMPLE, 10, LABELS).sample, changed, rtol=0, atol=1e-4)


def test_restore(model, expected):
    fastdiff.restore(fastdiff.accelerate(model))
    assert not runs_on_fastdiff(model)
    torch.testing.assert_close(model(SAMPLE, 10, LABELS).sample, expected, rtol=0, atol=1e-5)
    with pytest.raises(fastdiff.InputError, match="not accelerated"):
        fastdiff.restore(model)


def test_accelerating_twice_is_accelerating_once(model, expected):
    fastdiff.accelerate(fastdiff.accelerate(model))
    torch.testing.assert_close(model(SAMPLE, 10, LABELS).sample, expected, rtol=0, atol=1e-4)
    fastdiff.restore(model)
    assert not runs_on_fastdiff(model)


def test_a_model_that_moves_afterwards(model, expected):
    fastdiff.accelerate(model).to(torch.bfloat16)
    output = model(SAMPLE.bfloat16(), 10, LABELS).sample
    assert output.dtype == torch.bfloat16
    assert (output - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("kind", ["DDPM", "DDIM"])
def test_pipelines_draw_the_same_pictures(kind, randomise):
    unet = randomise(diffusers.UNet2DModel(**CONFIG | {"num_class_embeds": None}))
    unet.conv_out.weight.data *= 0.02  # keeps the values small, as in parity/conftest.py
    pipe = getattr(diffusers, f"{kind}Pipeline")(unet, getattr(diffusers, f"{kind}Scheduler")())
    pipe.set_progress_bar_config(disable=True)

    def draw():
        return pipe(generator=torch.Generator().manual_seed(3), num_inference_steps=4, output_type="np").images

    expected = draw()
    assert fastdiff.accelerate(pipe) is pipe
    with pytest.raises(fastdiff.InputError, match="inference only"):
        pipe.unet(torch.zeros(1, 3, 8, 8, requires_grad=True), 0)
    assert abs(draw() - expected).max() <= 1e-4


POLICY, VALUE = policy(8, 16, 32), value_function(8, 16, 32)


class TestPrecision:
    def test_fp8_rounds_activations_too_and_restore_gives_back_what_its_weights_stand_for(self, model, expected):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        fastdiff.accelerate(model, precision="fp8")
        eight = model(SAMPLE, 10, class_labels=LABELS).sample
        assert 0 < (eight - expected).abs().max() < 0.5 * expected.abs().max()
        after = fastdiff.restore(model).state_dict()
        assert all((after[name] - tensor).abs().max() <= 0.07 * tensor.abs().max() for name, tensor in before.items())

    def test_predicts_with_what_8_bits_stand_for_and_restore_gives_that_back(self, model, expected):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert fastdiff.accelerate(model, precision="int8") is model
        eight = model(SAMPLE, 10, class_labels=LABELS).sample
        assert 0 < (eight - expected).abs().max() < 0.05 * expected.abs().max()
        held = sum(each.untyped_storage().nbytes() for each in model.parameters())
        assert held < 0.5 * sum(each.nbytes for each in before.values())
        assert {name: each.shape for name, each in model.named_parameters()} == {
            name: before[name].shape for name, _ in model.named_parameters()
        }
        fastdiff.restore(model)
        torch.testing.assert_close(model(SAMPLE, 10, LABELS).sample, eight, rtol=0, atol=1e-5)
        after = model.state_dict()
        assert all((after[name] - tensor).abs().max() <= 0.005 * tensor.abs().max() for name, tensor in before.items())
        assert all(after[name].stride() == tensor.stride() for name, tensor in before.items())

    def test_a_pipeline_keeps_its_vae_whole(self):
        from tests.support.text_pipelines import text_pipeline

        pipe = text_pipeline("sd1")
        fastdiff.accelerate(pipe, precision="int8")
        assert not any(each.isnan().any() for each in pipe.vae.parameters())
        assert any(each.isnan().any() for each in pipe.unet.parameters())
        picture = pipe("the cat", num_inference_steps=2, output_type="np", generator=torch.manual_seed(0)).images
        assert not torch.from_numpy(picture).isnan().any()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            pytest.param(lambda model: model.to(torch.float16), "cannot be moved", id="to"),
            pytest.param(lambda model: model.state_dict(), "cannot be saved", id="state_dict"),
            pytest.param(copy.deepcopy, "cannot be copied", id="copy"),
            pytest.param(fastdiff.accelerate, "already runs with int8; restore it first", id="accelerate"),
        ],
    )
    def test_what_would_read_the_weights_is_refused(self, model, change, message):
        fastdiff.accelerate(model, precision="int8")
        with pytest.raises(fastdiff.InputError, match=message):
            change(model)
        model(SAMPLE, 10, LABELS)
        fastdiff.restore(model).state_dict()

    def test_weights_that_change_are_refused(self, model):
        fastdiff.accelerate(model, precision="int8")
        parameter = model.get_parameter("mid_block.resnets.0.conv1.weight")
        with pytest.raises(RuntimeError, match="single memory location"):  # fusing a LoRA does this
            parameter.data += 1
        parameter.data = torch.zeros(parameter.shape)
        with pytest.raises(fastdiff.InputError, match=r"cannot be changed; call fastdiff\.restore on it first"):
            model(SAMPLE, 10, LABELS)

    def test_nothing_is_touched_where_the_model_is_refused(self, model, expected):
        with pytest.raises(fastdiff.InputError, match="precision: 'fp4' is not one of full, int8, fp8"):
            fastdiff.accelerate(model, precision="fp4")
        model.mid_block.extra = torch.nn.Linear(2, 2)
        with pytest.raises(fastdiff.InputError, match="config has no mid_block"):
            fastdiff.accelerate(model, precision="int8")
        del model.mid_block.extra
        with torch.no_grad():
            assert torch.equal(model(SAMPLE, 10, LABELS).sample, expected)


class TestPolicy:
    GIVEN = torch.randn(2, 14, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 99])

    @pytest.fixture
    def policy(self, randomise):
        return randomise(diffusers.UNet1DModel(**POLICY))

    @torch.no_grad()
    def test_same_object_same_outputs(self, policy):
        expected = policy(*self.GIVEN).sample
        before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        assert fastdiff.accelerate(policy) is policy
        output = policy(*self.GIVEN)
        assert isinstance(output, diffusers.models.unets.unet_1d.UNet1DOutput)
        torch.testing.assert_close(output.sample, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(policy(*self.GIVEN, return_dict=False)[0], expected, rtol=0, atol=1e-4)
        with pytest.raises(fastdiff.InputError, match="inference only"), torch.enable_grad():
            policy(self.GIVEN[0].clone().requires_grad_(), 3)
        after = policy.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)

    @pytest.mark.parametrize("change", ["in place", "through data", "moved"])
    def test_changed_parameters_change_the_output(self, policy, change):
        """This includes transposed convolutions, whose weights fastdiff stores in another form."""
        fastdiff.accelerate(policy)
        names = ("down_blocks.0.downsample.conv.weight", "up_blocks.0.upsample.conv.weight")
        names += ("up_blocks.1.upsample.conv.bias", "mid_block.resnets.0.time_emb.weight")
        given = self.GIVEN
        if change == "moved":
            policy.double()
            given = given[0].double(), given[1]
        for name in names:
            before = policy(*given).sample
            with torch.no_grad():
                parameter = policy.get_parameter(name)
                (parameter.data if change == "through data" else parameter).mul_(1.5)
            changed = policy(*given).sample
            assert not torch.allclose(changed, before, atol=1e-4), name
        expected = fastdiff.restore(policy)(*given).sample
        torch.testing.assert_close(changed, expected, rtol=0, atol=1e-4)

    def test_a_value_guided_pipeline_plans_the_same(self, save_value_guided):
        """The policy runs on fastdiff. The value function runs on diffusers, as the planner needs its gradient."""
        pipe, _ = save_value_guided()
        pipe.unet.out_block.final_conv1d_2.weight.data *= 0.02  # keeps the values small
        pipe.scheduler.set_timesteps(4)

        def plan():
            torch.manual_seed(3)
            x, values = pipe.run_diffusion(torch.randn(2, 16, 14), {0: torch.zeros(2, 11)}, n_guide_steps=1, scale=0.1)
            return x.detach(), values.detach()

        expected = plan()
        assert fastdiff.accelerate(pipe) is pipe
        assert "forward" in vars(pipe.unet) and "forward" not in vars(pipe.value_function)
        for ours, theirs in zip(plan(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)

    def test_a_value_function_stays_diffusers(self, randomise):
        value = randomise(diffusers.UNet1DModel(**VALUE))
        with pytest.raises(
            fastdiff.InputError, match="a value function is not accelerated, because planners different"
        ):
            fastdiff.accelerate(value)
        sample = self.GIVEN[0].clone().requires_grad_()
        value(sample, self.GIVEN[1]).sample.sum().backward()
        assert sample.grad is not None


DIT = {
    "sample_size": 8,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "out_channels": 8,
    "norm_elementwise_affine": True,
}


class TestDiT:
    GIVEN = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([7, 801]), LABELS

    @pytest.fixture
    def model(self, randomise):
        return randomise(diffusers.DiTTransformer2DModel(**DIT))

    @pytest.fixture
    def expected(self, model):
        with torch.no_grad():
            return model(*self.GIVEN).sample

    def test_same_object_same_outputs(self, model, expected):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert fastdiff.accelerate(model) is model
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[name], before[name]) for name in before)
        sample, timesteps, labels = self.GIVEN
        output = model(sample, timestep=timesteps, class_labels=labels)
        assert type(output) is diffusers.models.modeling_outputs.Transformer2DModelOutput
        torch.testing.assert_close(output.sample, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(model(*self.GIVEN, None, False)[0], expected, rtol=0, atol=1e-4)
        with pytest.raises(fastdiff.InputError, match="inference only"):
            model(sample.clone().requires_grad_(), timesteps, labels)

    def test_memory_is_shared(self, model, expected):
        fastdiff.accelerate(model)
        for name in ("norm1.linear.weight", "norm1.emb.timestep_embedder.linear_1.bias", "attn1.to_k.weight"):
            with torch.no_grad():
                model.get_parameter(f"transformer_blocks.1.{name}").mul_(1.5)
        changed = model(*self.GIVEN).sample
        assert not torch.allclose(changed, expected, atol=1e-3)
        torch.testing.assert_close(fastdiff.restore(model)(*self.GIVEN).sample, changed, rtol=0, atol=1e-4)

    def test_a_model_that_moves_afterwards(self, model, expected):
        fastdiff.accelerate(model).to(torch.bfloat16)
        sample, *condition = self.GIVEN
        output = model(sample.bfloat16(), *condition).sample
        assert output.dtype == torch.bfloat16
        assert (output - expected).norm() < 0.05 * expected.norm()

    def test_pipeline_draws_the_same_pictures(self, model, randomise):
        model.proj_out_2.weight.data *= 0.3
        blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
        vae = randomise(diffusers.AutoencoderKL(**blocks, block_out_channels=(8, 16), norm_num_groups=4))
        pipe = diffusers.DiTPipeline(model, vae, diffusers.DDIMScheduler())
        pipe.set_progress_bar_config(disable=True)

        def draw():
            generator = torch.Generator().manual_seed(3)
            return pipe([1, 7], generator=generator, num_inference_steps=4, output_type="np").images

        expected = draw()
        assert fastdiff.accelerate(pipe) is pipe and "forward" in vars(model)
        assert abs(draw() - expected).max() <= 1e-3
        assert fastdiff.restore(pipe) is pipe and "forward" not in vars(model)


def test_a_transformer_that_we_do_not_run():
    model = diffusers.DiTTransformer2DModel(**DIT | {"upcast_attention": True})
    with pytest.raises(fastdiff.InputError, match="upcast_attention True"):
        fastdiff.accelerate(model)


REFUSED = {
    "another-class": lambda: torch.nn.Linear(2, 2),
    "not-a-model": lambda: "unet",
    "our-own-model": lambda: fastdiff.UNet2DModel.from_config(CONFIG),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    with pytest.raises(fastdiff.InputError, match="cannot be accelerated"):
        fastdiff.accelerate(REFUSED[case]())


def test_several_dtypes(model):
    model.conv_out.half()
    with pytest.raises(fastdiff.InputError, match="several dtypes"):
        fastdiff.accelerate(model)


class TestTextUNet:
    """accelerate on a live UNet2DConditionModel."""

    GIVEN = torch.randn(2, 4, 8, 8), 10, torch.randn(2, 5, 12)

    @pytest.fixture
    def unet(self, randomise):
        config = CONFIG | {"num_class_embeds": None, "cross_attention_dim": 12, "attention_head_dim": 2}
        config["down_block_types"] = ("CrossAttnDownBlock2D", "DownBlock2D")
        config["up_block_types"] = ("UpBlock2D", "CrossAttnUpBlock2D")
        return randomise(diffusers.UNet2DConditionModel(**config | {"in_channels": 4, "out_channels": 4}))

    def test_same_outputs_and_names_and_shared_memory(self, unet):
        before = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
        with torch.no_grad():
            expected = unet(*self.GIVEN).sample
        output = fastdiff.accelerate(unet)(*self.GIVEN)
        assert isinstance(output, diffusers.models.unets.unet_2d_condition.UNet2DConditionOutput)
        torch.testing.assert_close(output.sample, expected, rtol=0, atol=1e-4)
        assert all(torch.equal(tensor, before[name]) for name, tensor in unet.state_dict().items())
        with torch.no_grad():
            unet.get_parameter("mid_block.attentions.0.transformer_blocks.0.attn2.to_v.weight").mul_(1.5)
        changed = unet(*self.GIVEN).sample
        assert not torch.allclose(changed, expected, atol=1e-3)
        with torch.no_grad():
            torch.testing.assert_close(fastdiff.restore(unet)(*self.GIVEN).sample, changed, rtol=0, atol=1e-4)

    def test_changes_that_it_would_not_follow_are_refused(self, unet):
        unet.enable_freeu(0.9, 0.2, 1.2, 1.4)
        with pytest.raises(fastdiff.InputError, match="FreeU is not supported"):
            fastdiff.accelerate(unet)
        unet.disable_freeu()
        unet.set_attention_slice("max")
        with pytest.raises(fastdiff.InputError, match="SlicedAttnProcessor is not supported"):
            fastdiff.accelerate(unet)
        unet.set_default_attn_processor()
        fastdiff.accelerate(unet)
