"""Load: the options of loading a model folder, checked once and passed on as one value."""

from dataclasses import dataclass

import torch

from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, resolve_device, resolve_dtype
from fastdiff.kinds import Precision
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import checked


@dataclass(frozen=True)
class Load:
    """The options of loading a model folder. Make one with `Load.of`, which checks them."""

    device: torch.device  # where the models run
    dtype: torch.dtype
    variant: str | None = None  # of the weight files
    precision: Precision = "full"  # of the weights of the denoiser and the text encoders
    offload: bool = False  # whether each part is on the GPU only while it runs
    scheduler: str | None = None  # None: the folder's

    @classmethod
    def of(
        cls,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        variant: str | None = None,
        precision: Precision = "full",
        offload: bool = False,
        scheduler: str | None = None,
    ) -> "Load":
        """Check the options and return them as one value.

        Device auto is a GPU if the machine has one; dtype auto is the one that suits the device. The variant is checked
        later, when the files are looked for. Raises InputError that names the bad option.
        """
        device = resolve_device(device)
        dtype = resolve_dtype(dtype, device)
        checked("scheduler", scheduler, SchedulerName | None)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        if checked("offload", offload, bool) and device.type == "cpu":
            raise InputError("offload: it saves GPU memory, but the device is the CPU; leave it out")
        return cls(device, dtype, variant, precision, offload, scheduler)

    @property
    def home(self) -> torch.device:
        """Where the weights stay."""
        return torch.device("cpu") if self.offload else self.device
