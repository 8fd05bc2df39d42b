"""Make models of fastdiff from live models of diffusers and transformers."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from fastdiff.checkpoints.weight_files import own_keys
from fastdiff.checkpoints.weights import load_weights
from fastdiff.errors import InputError
from fastdiff.execution.devices import on_meta
from fastdiff.models.model import Model


def our_class(live: Any) -> type[Model] | None:
    """Return the fastdiff class that runs a live model of diffusers or transformers, or None."""
    for name, kind in Model.classes.items():
        part = getattr(kind, "part", None)
        theirs = None if part is None else getattr(sys.modules.get(part.library), name, None)
        if isinstance(theirs, type) and isinstance(live, theirs):
            return kind
    return None


def model_like(live: Any, name: str) -> Model:
    """Return our model of a live one: a copy of its weights, equal in bits, in its dtype and on its device.

    name: what to call the model in errors.

    Raises InputError for a class that fastdiff does not run, and for layers that the model's config does not name, such
    as LoRA that is not fused or an IP-Adapter; NonFiniteError for NaN in the weights.
    """
    kind = our_class(live)
    if kind is None:
        raise InputError(f"{name}: fastdiff does not run a {type(live).__name__}; it runs {', '.join(Model.classes)}")
    config = live.config if isinstance(live.config, Mapping) else live.config.to_diff_dict()
    options = kind.part.config.from_mapping(config, name)
    with on_meta():
        ours = kind.from_config(options, source=name)
    state = own_keys(dict(live.state_dict()), options)
    if any(".processor.to_k_ip." in key for key in state):
        raise InputError(
            f"{name}: it has an IP-Adapter; call unload_ip_adapter() first, then fastdiff's load_ip_adapter"
        )
    device: torch.device = live.device
    load_weights(ours, state, source=name, dtype=live.dtype, device=device)
    return ours
