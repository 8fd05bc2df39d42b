"""DenoiserConfig: the base of the config of each denoiser."""

from typing import ClassVar

from fastdiff.checkpoints.configs.model import ModelConfig
from fastdiff.errors import InputError


class DenoiserConfig(ModelConfig):
    """The questions that every denoiser's config answers. The options have diffusers' names and defaults."""

    AXES: ClassVar[tuple[str, ...]] = ("H", "W")  # of a sample, behind its pictures and channels
    sample_size: int | tuple[int, int] | None
    in_channels: int
    out_channels: int
    class_embed_type: str | None

    @property
    def is_value_function(self) -> bool:
        """Whether it gives each sample a number, which nothing denoises with."""
        return False

    @property
    def sample_channels(self) -> int:
        """The channels of a sample."""
        return self.in_channels

    @property
    def num_class_embeds(self) -> int | None:
        """The size of the table that labels are indices into, where there is one."""
        raise NotImplementedError

    @property
    def null_label(self) -> int | None:
        """The index that stands for "no label", where the architecture has one."""
        return None

    @property
    def label_table(self) -> int | None:
        """The size of the table that labels are indices into, where the model does not embed labels itself."""
        return self.num_class_embeds if self.class_embed_type is None else None

    @property
    def label_shape(self) -> tuple[int, ...]:
        """The shape of a picture's label; () is a number."""
        return ()

    @property
    def prompt_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape, of a picture's entry, of each further tensor that a call needs, of a text of the usual length."""
        return {}

    @property
    def num_timestep_embeds(self) -> int | None:
        """The size of the table that timesteps are indices into, where there is one."""
        return None

    @property
    def size_factor(self) -> int:
        """The number that height and width must be multiples of."""
        raise NotImplementedError

    @property
    def min_size(self) -> int:
        """The least height and width."""
        raise NotImplementedError

    @property
    def trained_size(self) -> tuple[int, int] | None:
        """Height and width of what it was trained to denoise, where the config says."""
        size = self.sample_size
        return size if isinstance(size, tuple) or size is None else (size, size)

    @property
    def usual_size(self) -> tuple[int, int]:
        """Height and width to try it with: the trained ones where the config says, else others that it can run."""
        return self.trained_size or (64, 64)

    @property
    def of_trajectories(self) -> bool:
        """Whether its samples are trajectories, of one axis, rather than pictures."""
        return len(self.AXES) == 1

    @property
    def takes_labels(self) -> bool:
        return self.num_class_embeds is not None or self.class_embed_type is not None

    def complete_size(self, height: int | None, width: int | None, scale: int = 1) -> tuple[int, int] | None:
        """Height and width in pixels, the open ones those that it was trained at; None where the config does not say.

        InputError for pixels that the model cannot draw, see `check_size`.
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
        """InputError unless the model can draw height x width pixels; a VAE makes `scale` x `scale` of them of one."""
        factor, least = scale * self.size_factor, scale * self.min_size
        if height < least or width < least or height % factor or width % factor:
            raise InputError(f"height {height}, width {width}: this model draws multiples of {factor}, from {least} on")
