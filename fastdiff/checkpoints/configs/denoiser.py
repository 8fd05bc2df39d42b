"""DenoiserConfig: the base class of the denoisers' configs."""

from typing import ClassVar

from fastdiff.checkpoints.configs.model import ModelConfig
from fastdiff.errors import InputError


class DenoiserConfig(ModelConfig):
    """The base class of the denoisers' configs. Options have diffusers' names and defaults."""

    AXES: ClassVar[tuple[str, ...]] = ("H", "W")  # of a sample, after N and C
    sample_size: int | tuple[int, int] | None
    in_channels: int
    out_channels: int
    class_embed_type: str | None

    @property
    def is_value_function(self) -> bool:
        """Whether the model maps each sample to one number. Such a model does not denoise."""
        return False

    @property
    def sample_channels(self) -> int:
        """The channels of a sample."""
        return self.in_channels

    @property
    def state_channels(self) -> int:
        """The channels of x_t. A sample of an inpainting model has constant channels after them."""
        return self.sample_channels

    @property
    def inpaints(self) -> bool:
        """Whether a sample has a mask and a masked picture after x_t."""
        return self.state_channels < self.sample_channels

    @property
    def prediction_channels(self) -> int:
        """The channels of a prediction."""
        return self.out_channels

    @property
    def num_class_embeds(self) -> int | None:
        """The number of rows in the label table, or None if there is no table."""
        raise NotImplementedError

    @property
    def null_label(self) -> int | None:
        """The label that means "no label", or None if the architecture has none."""
        return None

    @property
    def label_table(self) -> int | None:
        """The number of rows in the label table, or None if `class_embed_type` embeds labels without a table."""
        return self.num_class_embeds if self.class_embed_type is None else None

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of one picture's label; () for a number."""
        return ()

    @property
    def prompt_shapes(self) -> dict[str, tuple[int, ...]]:
        """The other tensors that a call needs: name to shape for one picture, with a text of the usual length."""
        return {}

    @property
    def num_timestep_embeds(self) -> int | None:
        """The number of rows in the timestep table, or None if there is no table."""
        return None

    @property
    def size_factor(self) -> int:
        """Height and width must be multiples of this number."""
        raise NotImplementedError

    @property
    def min_size(self) -> int:
        """The smallest height and width."""
        raise NotImplementedError

    @property
    def trained_size(self) -> tuple[int, int] | None:
        """The (height, width) of training samples, or None if the config does not say."""
        size = self.sample_size
        return size if isinstance(size, tuple) or size is None else (size, size)

    @property
    def usual_size(self) -> tuple[int, int]:
        """The (height, width) to try the model with: `trained_size`, or another size that it can run."""
        return self.trained_size or (64, 64)

    @property
    def of_trajectories(self) -> bool:
        """Whether samples are trajectories, which have one axis, rather than pictures."""
        return len(self.AXES) == 1

    @property
    def takes_labels(self) -> bool:
        return self.num_class_embeds is not None or self.class_embed_type is not None

    def complete_size(self, height: int | None, width: int | None, scale: int = 1) -> tuple[int, int] | None:
        """Return (height, width) in pixels, with each None replaced by the size that the model was trained at.

        Return None if the config does not say that size. Raise InputError for a size that the model cannot draw;
        see `check_size`, also for `scale`.
        """
        trained = self.trained_size or (None, None)
        height, width = (
            pixels if pixels is not None or side is None else side * scale
            for pixels, side in zip((height, width), trained, strict=True)
        )
        if height is None or width is None:
            return None
        self.check_size(height, width, scale)
        return height, width

    def check_size(self, height: int, width: int, scale: int = 1) -> None:
        """Raise InputError unless the model can draw height x width pixels.

        `scale` is the VAE's: it decodes one latent to `scale` x `scale` pixels. It is 1 without a VAE.
        """
        factor, least = scale * self.size_factor, scale * self.min_size
        if height < least or width < least or height % factor or width % factor:
            raise InputError(f"height {height}, width {width}: both must be multiples of {factor}, at least {least}")
