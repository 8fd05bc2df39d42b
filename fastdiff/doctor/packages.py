"""The versions of fastdiff's optional and required packages. None is imported."""

import re
from importlib import metadata

from fastdiff.doctor.finding import Finding

# Package -> the oldest version that works, and the feature that needs it. pyproject.toml has the same versions.
OPTIONAL = {
    "gradio": ("6.20", "fastdiff ui"),
    "diffusers": ("0.38", "fastdiff verify, fastdiff bench, fastdiff.accelerate"),
    "transformers": ("4.50", "fastdiff verify"),
    "accelerate": ("1.0", "pipelines of diffusers"),
    "scipy": ("1.11", "beta sigmas"),
}
REQUIRED = ("safetensors", "tokenizers", "huggingface_hub", "numpy", "pydantic", "pillow", "tqdm")


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def findings() -> list[Finding]:
    """Return a finding for each optional package, and one for the required packages."""
    required = {name: version_of(name) for name in REQUIRED}
    text = ", ".join(f"{name} {version}" for name, version in required.items())
    return [*map(_optional, OPTIONAL), Finding("packages", text, values={"versions": required})]


def _optional(name: str) -> Finding:
    oldest, purpose = OPTIONAL[name]
    version = version_of(name)
    values = {"version": version}
    if version is None:
        return Finding(name, f"not installed; for {purpose}", values=values)
    if _numbers(version) < _numbers(oldest):
        return Finding(name, f"{version}; for {purpose}", f"pip install '{name}>={oldest}'", values)
    return Finding(name, f"{version}, for {purpose}", values=values)


def _numbers(version: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", version)[:2]]
