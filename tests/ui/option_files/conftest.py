"""A page that offers LoRAs and embeddings for tiny models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.hosting.models import Models
from fastdiff.ui.shared import Shared
from tests.adapters.formats import in_diffusers, in_kohya, random_loras, save
from tests.checkpoints.single_files import headers
from tests.support.text_pipelines import text_pipeline


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A folder of LoRAs and one of embeddings, each also with files of other kinds and of another width."""
    loras, embeddings = tmp_path_factory.mktemp("loras"), tmp_path_factory.mktemp("embeddings")
    first, second = (random_loras(text_pipeline("sd1"), seed=seed) for seed in (1, 2))
    (loras / "deep").mkdir()
    save(loras / "style.safetensors", in_diffusers(first))
    save(loras / "deep" / "detail.safetensors", in_kohya(second, alpha=2.0))
    broken = {key: each * torch.nan for key, each in in_diffusers(first).items()}
    save(loras / "broken.safetensors", broken)
    headers.write(loras / "wide.safetensors", {"unet.mid_block.attn2.to_k.lora_A.weight": (4, 768)})
    (loras / "damaged.safetensors").write_bytes(b"no header")
    generator = torch.Generator().manual_seed(0)
    for folder in (loras, embeddings):
        save_file({"emb_params": torch.randn(2, 32, generator=generator)}, folder / "blurb.safetensors")
    save_file({"<dog>": torch.randn(1, 32, generator=generator)}, embeddings / "dog.safetensors")
    save_file({"emb_params": torch.randn(1, 768, generator=generator)}, embeddings / "other.safetensors")
    save(embeddings / "style.safetensors", in_diffusers(first))
    return loras, embeddings


@pytest.fixture(scope="module")
def equipped(models_dir, folders) -> Iterator[Shared]:
    """A page that offers the files of `folders`."""
    yield Shared(Models(models_dir, device="cpu", files=OptionFiles(*folders)))
