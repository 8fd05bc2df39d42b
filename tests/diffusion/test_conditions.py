"""The conditions of pictures, and when pictures are guided."""

import pytest
import torch

from fastdiff.checkpoints.configs.unet2d import UNet2DConfig
from fastdiff.checkpoints.model_info import ModelInfo
from fastdiff.diffusion.conditions import choose_conditions
from fastdiff.errors import InputError

CPU = torch.device("cpu")
LABELLED = UNet2DConfig(num_class_embeds=5)
INFO = ModelInfo(labels=("cat", "dog", "cow", "hen"), null_label=4)


def choose(labels, scale=1.0, config=LABELLED, info=INFO):
    return choose_conditions(labels, range(len(labels)), scale, config, info, CPU)


def test_pictures_under_one_label_share_its_condition():
    found = choose(["cow", 0, 2, None, torch.tensor(0)])
    assert found.labels.tolist() == [0, 2, 4]
    assert found.of_pictures.tolist() == [1, 0, 1, 2, 0]
    assert found.guidance is None


def test_guidance_adds_the_null_label():
    found = choose(["cow", "cat"], scale=2)
    assert found.labels.tolist() == [0, 2, 4]
    assert (found.of_pictures.tolist(), found.guidance.scale) == ([1, 0], 2)
    assert found.guidance.null_conditions.tolist() == [2, 2]


def test_null_labels_alone_are_not_guided():
    found = choose([None, 4], scale=2.0)
    assert (found.labels.tolist(), found.of_pictures.tolist(), found.guidance) == ([4], [0, 0], None)


def test_a_model_without_labels_has_one_condition():
    found = choose([None, None], config=UNet2DConfig())
    assert found.labels is None
    assert found.of_pictures.tolist() == [0, 0]


def test_labels_that_are_numbers_are_a_condition_each():
    found = choose(
        [torch.ones(2), torch.ones(2)], config=UNet2DConfig(class_embed_type="identity", time_embedding_dim=2)
    )
    assert (found.labels.tolist(), found.of_pictures.tolist()) == ([[1, 1], [1, 1]], [0, 1])


REFUSED = {
    "label-for-none": (lambda: choose([1], config=UNet2DConfig()), "class_labels: this model is unconditional"),
    "name-for-numbers": (
        lambda: choose(["cat"], config=UNet2DConfig(class_embed_type="timestep")),
        "class_labels: this model takes numbers",
    ),
    "no-label": (lambda: choose([None], info=ModelInfo()), "no null label; give labels, 0 to 4"),
    "beyond-the-table": (lambda: choose([5]), "label 5 is out of range; this model has labels 0 to 4"),
    "guidance-without-labels": (lambda: choose([None], 2.0, UNet2DConfig()), "guidance_scale: 2.0 needs a model with"),
    "guidance-without-null": (lambda: choose([1], 2.0, info=ModelInfo()), "guidance_scale: 2.0 needs a null label"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_cannot_be_asked(case):
    call, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
