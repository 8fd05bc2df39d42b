"""Load: how a folder's models are loaded, checked once and handed on as one value."""

from dataclasses import dataclass

import torch

from fastdiff.errors import InputError
from fastdiff.execution.devices import check_precision, resolve_device, resolve_dtype
from fastdiff.kinds import Precision
from fastdiff.sampler_names import SchedulerName
from fastdiff.schema import checked


@dataclass(frozen=True)
class Load:
    """How a folder's models are loaded. `of` makes one of what a caller gives."""

    device: torch.device  # where they work
    dtype: torch.dtype
    variant: str | None = None  # of the weights' files
    precision: Precision = "full"  # of the weights of the denoiser and of text encoders
    offload: bool = False  # whether each part is on the GPU only while it works
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
        """Return the choices as one value. auto takes a GPU if the machine has one, and the dtype that suits it.

        Raises InputError that names the one that cannot be. The variant is checked where its files are looked for.
        """
        device = resolve_device(device)
        dtype = resolve_dtype(dtype, device)
        checked("scheduler", scheduler, SchedulerName | None)
        checked("precision", precision, Precision)
        check_precision(precision, device)
        if checked("offload", offload, bool) and device.type == "cpu":
            raise InputError("offload: there is no GPU whose memory it would save; leave it out")
        return cls(device, dtype, variant, precision, offload, scheduler)

    @property
    def home(self) -> torch.device:
        """Where the weights stay."""
        return torch.device("cpu") if self.offload else self.device
