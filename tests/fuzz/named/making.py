"""Helpers for named cases: each is a list of cases that once broke something, and how they must end."""

from tests.fuzz.cases import Case
from tests.fuzz.edits import Edit

DENOISER = "unet/config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
THREE = (("command", "sample"), ("library", "pipeline"), ("page", "generate"))
CONFIG = (*THREE, ("command", "models"), ("library", "config"))
PNG_DOORS = (("command", "from"), ("page", "upload"))
VALUES_CONFIG = "value_function/config.json"
VAE_CONFIG = "vae/config.json"
REFUSED, DONE, EITHER = "refused", "done", "either"

Named = dict[str, tuple[list[Case], str]]


def everywhere(kind: str, *edits: Edit, ends: str = REFUSED, doors: tuple = THREE) -> tuple[list[Case], str]:
    """Return cases of an edited folder, one for each of several doors."""
    return [Case(kind, edits, door, what) for door, what in doors], ends


def config(option: str, value: str, kind: str = "plain") -> tuple[list[Case], str]:
    """Return cases of a bad option in the denoiser's config, which the list of models must refuse as well."""
    file = "transformer/config.json" if kind.startswith("dit") else DENOISER
    return everywhere(kind, ("option", file, option, value), doors=CONFIG)


def scheduler(option: str, value: str) -> tuple[list[Case], str]:
    edit = ("option", "scheduler/scheduler_config.json", option, value)
    return everywhere("plain", edit, doors=(*THREE, ("library", "scheduler")))


def weights(kind: str, how: str, ends: str = REFUSED) -> tuple[list[Case], str]:
    return everywhere(kind, ("pickled", "unet/diffusion_pytorch_model.bin", how), ends=ends)


def call(door: str, what: str, ends: str = REFUSED, kind: str = "attention", **options: str) -> tuple[list[Case], str]:
    """Return a case of odd arguments with a sound folder."""
    return [Case(kind, (), door, what, tuple(options.items()))], ends


def flags(*pairs: tuple[str, str], what: str = "sample", ends: str = REFUSED) -> tuple[list[Case], str]:
    return [Case("attention", (), "command", what, pairs)], ends
