"""Find the folder of a model by its name: a local folder, a bundled model or a hub id, in diffusers' layout.

Nothing in a model folder is imported or executed. JSON is parsed, and weights are loaded as tensors.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fastdiff.arguments import did_you_mean, optional
from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints.configs.model import Library
from fastdiff.checkpoints.names import Revision, Variant, extensions_of, weight_names
from fastdiff.checkpoints.registry import (
    CONTROLNET,
    PIPELINES,
    ModelPart,
    TokenizerPart,
    check_one_controlnet,
    control_folders,
    denoisers,
    read_denoiser_part,
    read_model_index,
    shortened,
)
from fastdiff.errors import InputError
from fastdiff.schema import checked

BUNDLED = Path(__file__).parents[1] / "bundled"
LORA_NAME = "pytorch_lora_weights.safetensors"  # as diffusers saves a LoRA

CACHED = "models--"  # prefix of a model's folder in huggingface_hub's cache
CONFIGS = ("model_index.json", "config.json")  # of a pipeline, of a single model
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json"),  # of older tokenizers
)
_SAFETENSORS = re.compile(r"\.safetensors$", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    variant: str | None = None,
    local_files_only: bool | None = False,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
    use_safetensors: bool | None = None,
    without: Collection[str] = (),
) -> Path:
    """Return the local folder of a model.

    The name is that of a local model folder, of a bundled model, or a hub id `org/name`, tried in this order. A hub
    model is downloaded into huggingface_hub's cache, or into `cache_dir`; weights in safetensors are preferred. With
    HF_HUB_OFFLINE or `local_files_only` only files in the cache are used. `force_download` downloads files again that
    are in the cache. Parts in `without` are not downloaded. `revision`, `token`, `variant` and `use_safetensors` are as
    in diffusers.

    Raises InputError for a name that is none of the three, for a malformed variant or revision, and for any error of
    the hub.
    """
    name = _checked_name(name_or_path)
    checked("variant", variant, Variant | None)
    checked("revision", revision, Revision | None)
    snapshot = _client(name, token, local_files_only, cache_dir, force_download)
    extensions = extensions_of(use_safetensors)
    _check_permission(name)
    if is_hub_id(name):
        return _download(name, snapshot, revision, variant, extensions, without)
    if revision is not None:
        raise InputError(
            f"revision {revision!r} is given for {name}, but only a hub id org/name has revisions; leave it out"
        )
    bundled = bundled_models() | bundled_controlnets()
    if name in bundled and not _is_model(name):
        return bundled[name]
    if _is_model(name):
        return Path(name)
    if os.path.isdir(name):
        raise InputError(f"{name} holds neither {' nor '.join(CONFIGS)}; give a model folder in diffusers' layout")
    if os.path.isfile(name):
        raise InputError(f"{name} is a file; give a model folder, or in Python load it with from_single_file")
    hint = did_you_mean(name, bundled)
    raise InputError(f"no model {name!r}; {hint} {_on_offer()}" if hint else f"no model {name!r}; {_on_offer()}")


def resolve_part(
    name_or_path: str | Path | None,
    part: ModelPart,
    subfolder: str | None = None,
    *,
    revision: str | None = None,
    variant: str | None = None,
    use_safetensors: bool | None = None,
    **client: Any,
) -> Path:
    """Return the local folder of one model. Arguments and errors are as in `resolve`.

    It is the `subfolder`, else the part's own folder in a pipeline's, else the whole folder. A ControlNet may also be
    named as NAME:FOLDER. Of a hub model only this part is downloaded.
    """
    name = _checked_name(name_or_path)
    if part is CONTROLNET and not subfolder:
        name, subfolder = parts_of(name)
    if subfolder and os.path.isdir(os.path.join(name, subfolder)):  # of a folder that is no model itself
        name, subfolder = os.path.join(name, subfolder), None
    is_open = part is CONTROLNET and not subfolder
    if not is_hub_id(name):
        if is_open:
            check_one_controlnet(Path(name), name)
        root = resolve(name, revision=revision, variant=variant, use_safetensors=use_safetensors, **client)
        return part_folder(root, part.name, subfolder)
    checked("variant", variant, Variant | None)
    extensions = extensions_of(use_safetensors)
    places = (subfolder,) if subfolder else (part.name, "")
    configs = [f"{place}/config.json".lstrip("/") for place in places]
    # a pipeline with several has controlnet_1, and other repositories a folder of any name for each
    configs += [f"{CONTROLNET.name}_1/config.json"] if is_open else []
    root = folder_with(name, configs, revision=revision, **client)
    if is_open and not any((root / config).is_file() for config in configs):
        with contextlib.suppress(InputError):  # the client refuses a pattern offline
            root = folder_with(name, ["*/config.json"], revision=revision, **client)
    if is_open:
        check_one_controlnet(root, name)
    folder = part_folder(root, part.name, subfolder)
    fetch = partial(_fetch, partial(_client(name, **client), revision=root.name), root)
    if not any(fetch(folder, weight_names(extension, variant, part.library)) for extension in extensions):
        raise InputError(_nothing_there(name, revision, root, folder, variant))
    return folder


def folder_with(name_or_path: str | Path, files: list[str], *, revision: str | None = None, **client: Any) -> Path:
    """Return the local folder of a model, with these files if it has them. Errors are as in `resolve`.

    Of a hub model only these files are downloaded. Any local folder is returned as it is.
    """
    name = _checked_name(name_or_path)
    checked("revision", revision, Revision | None)
    snapshot = _client(name, **client)
    if is_hub_id(name):
        return snapshot(files, revision=revision)
    bundled = bundled_models() | bundled_controlnets()
    return Path(name) if os.path.isdir(name) else bundled.get(name, Path(name))


def hub_file(name: str, inside: str, **client: Any) -> Path:
    """Return the local file `inside` of a hub model. Only this file is downloaded. Errors are as in `resolve`."""
    folder = folder_with(name, [inside], **client)
    if not (folder / inside).is_file():
        raise InputError(f"hub model {name} has no {inside}; name the file with weight_name=, or give a local file")
    return folder / inside


def lora_file(name: str, subfolder: str | None = None, **client: Any) -> Path:
    """Return the local file of a LoRA of a hub model: LORA_NAME, or else its only safetensors file.

    Only this file is downloaded. Raises InputError if there is none or several, else as `resolve`.
    """
    inside = "/".join(filter(None, [subfolder, LORA_NAME]))
    folder = folder_with(name, [inside], **client)
    if (folder / inside).is_file():
        return folder / inside
    start = f"{subfolder}/" if subfolder else ""
    found = [each for each in _listed(name, folder, client) if each.startswith(start) and _SAFETENSORS.search(each)]
    if len(found) == 1:
        return hub_file(name, found[0], **{**client, "revision": folder.name})
    there = f", and {len(found)} others: {shortened(found)}" if found else ""
    raise InputError(f"hub model {name} has no {inside}{there}; name the file with weight_name=, or give a local file")


def _listed(name: str, folder: Path, client: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the files of a hub model. Offline, list its snapshot `folder`."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError

    with contextlib.suppress(OSError, ValueError, HTTPError):
        if not client.get("local_files_only"):
            return sorted(huggingface_hub.list_repo_files(name, revision=folder.name, token=client.get("token")))
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def parts_of(name: str) -> tuple[str, str]:
    """Return the folder or hub id of NAME:PLACE, and the place in it, which is empty without a colon."""
    root, _, inside = name.partition(":") if not os.path.exists(name) else (name, "", "")
    return root, inside


def names_hub_file(name: str) -> bool:
    """Return whether `name` is a hub id of an adapter or embedding: no path that exists, and no file's name."""
    return is_hub_id(name) and Path(name).suffix.lower() not in (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")


def _client(
    name: str,
    token: str | bool | None = None,
    local_files_only: bool | None = False,
    cache_dir: str | Path | None = None,
    force_download: bool = False,
) -> Callable[..., Path]:
    """Return the function that downloads files of a hub model into a folder, and returns it. The options are checked.

    It takes patterns of the files' names, and `revision`.
    """
    if not isinstance(token, str | bool | None):
        raise InputError("token: it must be a string or a bool; give the token, or leave it out")
    checked("local_files_only", local_files_only, bool | None)
    checked("force_download", force_download, bool)
    optional(checked_path, "cache_dir", cache_dir)
    options: dict[str, Any] = {"token": token, "cache_dir": cache_dir, "force_download": force_download}
    return partial(_snapshot, name, local_files_only=bool(local_files_only), **options)


def _checked_name(name_or_path: object) -> str:
    try:
        return str(checked_path("pretrained_model_name_or_path", name_or_path))
    except InputError as error:
        raise InputError(f"{error}; {_on_offer()}") from None


def _on_offer() -> str:
    return f"bundled: {', '.join(bundled_models())}; a model folder and a hub id org/name also work"


def _check_permission(name: str) -> None:
    """Raise InputError if the folder cannot be read for lack of permission."""
    try:
        os.stat(os.path.join(name, CONFIGS[0]))
    except PermissionError:
        raise InputError(f"{name} cannot be read (permission denied); ask its owner, or give another model") from None
    except (OSError, ValueError):  # `resolve` reports it
        pass


def bundled_models() -> dict[str, Path]:
    """Return the folders of the pipelines in the package, by name."""
    return {folder.name: folder for folder in sorted(BUNDLED.iterdir()) if (folder / CONFIGS[0]).is_file()}


def bundled_controlnets() -> dict[str, Path]:
    """Return the folders of the ControlNets in the package, by name."""
    return {folder.name: folder for folder in sorted(BUNDLED.iterdir()) if (folder / CONFIGS[1]).is_file()}


def part_folder(root: Path, name: str, subfolder: str | None) -> Path:
    """Return the `subfolder` of a model's folder, or else the `component_folder`."""
    return root / subfolder if subfolder else component_folder(root, name)


def component_folder(root: str | Path, name: str) -> Path:
    """Return `root`/`name` if it exists, else `root`: old hub repositories have all components' files at the top."""
    folder = Path(root) / name
    return folder if folder.is_dir() else Path(root)


def _is_model(folder: str | Path) -> bool:
    return os.path.isdir(folder) and any(os.path.isfile(os.path.join(folder, config)) for config in CONFIGS)


class Needed(NamedTuple):
    """The folders of a model whose weights or vocabularies are needed."""

    models: dict[Path, Library]  # folders with weights, and the library that names the files
    tokenizers: list[Path]


def needed_folders(root: Path, without: Collection[str] = ()) -> Needed:
    """Return the folders of the pipeline in `root`, or `root` itself if it holds a single model.

    Parts in `without` are not needed.

    Raises InputError for a pipeline or model that fastdiff does not run.
    """
    if not (root / "model_index.json").is_file():
        return Needed({root: read_denoiser_part(root / "config.json").library}, [])
    classes = read_model_index(root, without)
    pipeline = PIPELINES[classes["pipeline"]]
    parts = [part for part in pipeline.companions if part.name in classes]
    denoiser = {component_folder(root, part.name): part.library for part in [pipeline.denoiser] if part.name in classes}
    companions = {root / part.name: part.library for part in parts if isinstance(part, ModelPart)}
    if CONTROLNET in parts:
        companions |= dict.fromkeys(control_folders(root), CONTROLNET.library)
    return Needed(denoiser | companions, [root / part.name for part in parts if isinstance(part, TokenizerPart)])


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form org/name and is not an existing path."""
    return bool(_HUB_ID.fullmatch(name)) and not os.path.exists(name)


def _download(
    repo_id: str,
    snapshot: Callable[..., Path],
    revision: str | None,
    variant: str | None,
    extensions: Sequence[str],
    without: Collection[str],
) -> Path:
    """Download the configs, then the files that the pipeline needs. Return the snapshot's folder.

    With configs first, an unsupported pipeline costs no gigabytes. Later requests name the commit of the first one, so
    a push in between cannot mix two versions.
    """
    root = snapshot(_json_files(), revision=revision)
    if not _is_model(root):
        raise InputError(f"hub model {repo_id} holds neither {' nor '.join(CONFIGS)}; give one in diffusers' layout")
    needed = needed_folders(root, without)

    fetch = partial(_fetch, partial(snapshot, revision=root.name), root)
    for folder in needed.tokenizers:
        if not fetch(folder, _TOKENIZER_FILES):
            raise InputError(f"hub model {repo_id} has no {folder.name} {_where(repo_id, revision)}")
    for folder, library in needed.models.items():
        if not any(fetch(folder, weight_names(extension, variant, library)) for extension in extensions):
            raise InputError(_nothing_there(repo_id, revision, root, folder, variant))
    return root


def _fetch(snapshot: Callable[[list[str]], Path], root: Path, folder: Path, names: Collection[str]) -> bool:
    """Download a folder's config and these files. Return whether any of the files exist."""
    snapshot([(folder / name).relative_to(root).as_posix() for name in ("config.json", *names)])
    return any(any(folder.glob(name)) for name in names)


def _nothing_there(repo_id: str, revision: str | None, root: Path, folder: Path, variant: str | None) -> str:
    """Return the message for a folder without weights."""
    of_part = "" if folder == root else f" of its {folder.name}"
    wanted = "weights" if variant is None else f"weights of variant {variant!r}"
    return f"hub model {repo_id} has no {wanted}{of_part} {_where(repo_id, revision)}"


def _where(repo_id: str, revision: str | None) -> str:
    return f"in diffusers' layout; see https://huggingface.co/{repo_id}/tree/{revision or 'main'}"


def _json_files() -> list[str]:
    """Return the names of the JSON files that say what else a model needs.

    They are names, not `*.json`: offline, the client refuses a snapshot that lacks any file of a request.
    """
    return [
        *CONFIGS,
        *dict.fromkeys(f"{part.name}/config.json" for part in denoisers()),
        "scheduler_config.json",
        "scheduler/scheduler_config.json",
        "fastdiff.json",
    ]


def _snapshot(
    repo_id: str, patterns: list[str], *, revision: str | None, local_files_only: bool, **options: Any
) -> Path:
    import huggingface_hub  # slow to import, and only needed for hub ids
    from huggingface_hub.errors import HTTPError

    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=patterns, revision=revision, local_files_only=local_files_only, **options
        )
    except (OSError, ValueError, HTTPError) as error:  # errors of the disk, the client and its transport
        raise InputError(f"hub model {repo_id}: {_refusal(error, repo_id, revision)}") from None
    return Path(folder)


def _refusal(error: Exception, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    reasons = {  # the first match counts: GatedRepoError is a RepositoryNotFoundError
        errors.GatedRepoError: f"it is gated; accept its terms at {page}, then run `hf auth login` or give a token",
        errors.RevisionNotFoundError: f"it has no revision {revision!r}; see {page}/commits",
        errors.RepositoryNotFoundError: "it does not exist, or it is private; check the name, or run `hf auth login`",
        errors.DisabledRepoError: "the hub disabled it; choose another model",
        errors.HFValidationError: "it is not a valid hub id; write org/name",
        errors.LocalTokenNotFoundError: "there is no stored token; run `hf auth login`",
        errors.LocalEntryNotFoundError: "it is not in the local cache, and the hub cannot be reached; "
        "go online (and unset HF_HUB_OFFLINE), or give a folder",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return reason
    first_line = next(iter(str(error).splitlines()), "")
    return f"the download failed ({type(error).__name__}: {first_line}); try again"
