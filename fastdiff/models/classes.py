"""Our class of each model that diffusers has: the one table that whoever loads or wraps a model asks."""

from fastdiff.models.denoiser import Denoiser
from fastdiff.models.dit import DiTTransformer2DModel
from fastdiff.models.unet1d import UNet1DModel
from fastdiff.models.unet2d import UNet2DModel

# By diffusers' class name, today's: the first of the classes of a part in fastdiff.checkpoints.registry.
DENOISERS: dict[str, type[Denoiser]] = {
    kind.__name__: kind for kind in (UNet2DModel, UNet1DModel, DiTTransformer2DModel)
}
