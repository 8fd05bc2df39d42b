"""The updates of LyCORIS: LoCon, LoHa and LoKr, on linear layers and filters."""

import math

import pytest
import torch
from lycoris.modules.locon import LoConModule
from lycoris.modules.loha import LohaModule
from lycoris.modules.lokr import LokrModule
from torch import nn

from fastdiff.adapters.building import build

LAYERS = {"linear": nn.Linear(12, 20), "1x1": nn.Conv2d(12, 20, 1), "3x3": nn.Conv2d(12, 20, 3)}
ROLES = {"lora_down.weight": "down", "lora_up.weight": "up", "lora_mid.weight": "mid"}


def role(name):
    return ROLES.get(name, name if name.startswith("lokr_") or name == "alpha" else name.removeprefix("hada_"))


def randomised(module):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


MODULES = {
    "LoCon": (LoConModule, {}),
    "LoCon with a core": (LoConModule, {"use_tucker": True}),
    "LoHa": (LohaModule, {}),
    "LoHa with a core": (LohaModule, {"use_tucker": True}),
    "LoKr": (LokrModule, {"factor": 4}),
    "LoKr, both low-rank": (LokrModule, {"factor": 4, "decompose_both": True, "lora_dim": 1}),
    "LoKr, whole": (LokrModule, {"factor": 4, "full_matrix": True}),
    "LoKr with a core": (LokrModule, {"factor": 4, "use_tucker": True, "lora_dim": 2}),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("name", MODULES)
def test_updates_of_lycoris(name, kind):
    module, options = MODULES[name]
    layer = LAYERS[kind]
    theirs = randomised(module("layer", layer, **{"lora_dim": 3, "alpha": 2.0, **options}))
    tensors = {role(key): each for key, each in theirs.state_dict().items() if "org" not in key}
    tensors.pop("scalar", None)
    shape = tuple(layer.weight.shape)
    update = build("layer", tensors, shape, {}, "layer.weight")
    # LyCORIS's get_diff_weight scales twice, except for LoCon; its forward calls get_weight
    its_weight = theirs.get_diff_weight(1.0)[0] if module is LoConModule else theirs.get_weight(shape)
    wanted = its_weight.detach().double()
    total = torch.ones(shape[0], math.prod(shape[1:]))
    update.add_to(total, total.clone(), 0.5)
    torch.testing.assert_close(total.double(), 1 + 0.5 * wanted.reshape(shape[0], -1), rtol=1e-5, atol=1e-5)
    assert wanted.abs().max() > 0.1
