"""The IP-Adapters of a run: their files, and their image encoder. Imports no torch."""

from collections.abc import Iterator
from pathlib import Path

from fastdiff.checkpoints.model_hash import begin_sha256, file_hash
from fastdiff.checkpoints.single_files.ip_adapters import find_image_encoder, find_ip_adapter, image_encoder_weights
from fastdiff.requests.png import Recorded
from fastdiff.requests.request import Request

IP_ADAPTER_HASHES = "ip_adapter_hashes"  # the setting with the hashes of the files in a PNG
ENCODER_HASH = "image_encoder_hash"  # the setting with the hash of the image encoder's weights


def check_ip_adapters(request: Request) -> None:
    """Raise InputError for an IP-Adapter or image encoder that is nowhere. Files of the hub are downloaded."""
    files_of_ip_adapters(request)


def ip_adapter_files(request: Request) -> list[Path]:
    """Return the file of each IP-Adapter of a request. Raises as `check_ip_adapters`."""
    return [find_ip_adapter(name) for name in request.ip_adapter]


def encoder_weights(request: Request) -> list[Path]:
    """Return the weights of the image encoder of a request with IP-Adapters. Raises as `check_ip_adapters`."""
    return image_encoder_weights(_encoder(request))


def files_of_ip_adapters(request: Request) -> list[Path]:
    """Return the files of a request's IP-Adapters, and the weights and the config of their image encoder."""
    if not request.ip_adapter:
        return []
    files = ip_adapter_files(request)
    return [*files, *encoder_weights(request), _encoder(request) / "config.json"]


def changed_ip_adapters(source: Recorded, request: Request) -> Iterator[str]:
    """Yield a line for each IP-Adapter of the PNG, and for the image encoder, if its hash is another one now."""
    names, digits = (source.settings.get(key) or () for key in ("ip_adapter", IP_ADAPTER_HASHES))
    known = dict(zip(names, digits, strict=False))
    now = {name: file_hash(file) for name, file in zip(request.ip_adapter, ip_adapter_files(request), strict=True)}
    for name, found in now.items():
        if found != known.get(name, found):
            yield _differs(f"{name} has the IP-Adapter", found, known[name], source)
    encoder = source.settings.get(ENCODER_HASH)
    if encoder and now and now.keys() <= known.keys():
        found = begin_sha256(encoder_weights(request)).result()
        if found != encoder:
            yield _differs("the image encoder has the", found, encoder, source)


def _encoder(request: Request) -> Path:
    return find_image_encoder(request.ip_adapter[0], request.image_encoder)


def _differs(what: str, now: str, known: str, source: Recorded) -> str:
    return f"{what} hash {now[:10]}, and {source.path} was drawn with {known[:10]}; the picture will differ"
