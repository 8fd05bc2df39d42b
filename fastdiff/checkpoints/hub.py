"""From a model's name to its folder: a folder, a bundled model, or a hub id, in diffusers' layout.

Nothing in a model folder is imported or executed: its JSON is read, its weights are tensors.
"""

import difflib
import os
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints.configs.model import Library
from fastdiff.checkpoints.json_files import read_json
from fastdiff.checkpoints.names import Revision, Variant
from fastdiff.checkpoints.registry import (
    PIPELINES,
    ModelPart,
    TokenizerPart,
    denoisers,
    read_denoiser_part,
    read_model_index,
)
from fastdiff.errors import InputError
from fastdiff.schema import checked

BUNDLED = Path(__file__).parents[1] / "bundled"
# The stems of each library's weight files, by their extension
STEMS: dict[Library, dict[str, str]] = {
    "diffusers": {"safetensors": "diffusion_pytorch_model", "bin": "diffusion_pytorch_model"},
    "transformers": {"safetensors": "model", "bin": "pytorch_model"},
}

_CACHED = "models--"  # the beginning of the name of a model's folder in huggingface_hub's cache
_CONFIGS = ("model_index.json", "config.json")  # a pipeline's folder has the first, a plain model's the second
_TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),  # of older ones
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve(
    name_or_path: str | Path,
    *,
    revision: str | None = None,
    token: str | None = None,
    variant: str | None = None,
    local_files_only: bool = False,
) -> Path:
    """The local folder of a model: a folder that holds one, else a bundled name, else a hub id `org/name`.

    A hub model is downloaded into huggingface_hub's cache (which HF_HUB_OFFLINE and `local_files_only` restrict to
    what is there), its weights in safetensors where it has them. `revision`, `token` and `variant` are diffusers'.
    Raises InputError for a name that is none of the three, for a variant or revision that none can have, and
    for whatever the hub refuses.
    """
    name = _checked_name(name_or_path)
    checked("variant", variant, Variant | None)
    checked("revision", revision, Revision | None)
    if not isinstance(token, str | bool | None):
        raise InputError("token: it is neither a text nor True; give the token, or leave it out")
    checked("local_files_only", local_files_only, bool)
    _check_permission(name)
    if is_hub_id(name):
        return _download(name, revision, token, variant, local_files_only)
    if revision is not None:
        raise InputError(f"revision {revision!r} has no meaning for {name}; only a hub id org/name has revisions")
    bundled = bundled_models()
    if name in bundled and not _is_model(name):
        return bundled[name]
    if _is_model(name):
        return Path(name)
    if os.path.isdir(name):
        raise InputError(f"{name} holds neither {' nor '.join(_CONFIGS)}; give a model folder in diffusers' layout")
    if os.path.isfile(name):
        raise InputError(f"{name} is a file; give the model folder in diffusers' layout that it belongs to")
    close = difflib.get_close_matches(name, bundled, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise InputError(f"no model {name!r}; {hint}{_on_offer()}")


def _checked_name(name_or_path: object) -> str:
    try:
        return str(checked_path("name_or_path", name_or_path))
    except InputError as error:
        raise InputError(f"{error}; {_on_offer()}") from None


def _on_offer() -> str:
    return f"bundled: {', '.join(bundled_models())}; a model folder and a hub id org/name also work"


def _check_permission(name: str) -> None:
    """InputError for a folder that may be there, but that nobody shows us."""
    try:
        os.stat(os.path.join(name, _CONFIGS[0]))
    except PermissionError:
        raise InputError(f"{name} may not be read (Permission denied); ask its owner, or give another model") from None
    except (OSError, ValueError):  # for `resolve` to tell
        pass


def bundled_models() -> dict[str, Path]:
    """The models inside the package, by name."""
    return {folder.name: folder for folder in sorted(BUNDLED.iterdir()) if _is_model(folder)}


def cached_models() -> dict[str, Path]:
    """The models in huggingface_hub's cache that fastdiff can draw with, by hub id: the folder of their main revision.

    Without a main revision it is the one downloaded last. A model whose files cannot be read is among them, so that a
    list can say why it cannot be drawn with. Empty where there is no cache.
    """
    from huggingface_hub import constants

    found = {}
    for repo in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_CACHED}*")):  # its own scan ends at what it may not read
        try:
            folder = _newest_snapshot(repo)
            is_listed = folder is not None and (_is_supported(folder) or _is_broken(folder))
        except OSError:
            folder, is_listed = repo, True
        if folder is not None and is_listed:
            found[repo.name.removeprefix(_CACHED).replace("--", "/")] = folder
    return found


def _newest_snapshot(repo: Path) -> Path | None:
    """The folder of a cached repository's main revision, else of its last one. OSError where that cannot be told."""
    main = repo / "refs" / "main"
    commit = main.read_text(errors="replace").strip() if main.is_file() else None
    try:
        snapshots = [folder for folder in (repo / "snapshots").iterdir() if folder.is_dir()]
    except (FileNotFoundError, NotADirectoryError):  # nothing of it was downloaded
        return None
    return max(snapshots, key=lambda folder: (folder.name == commit, folder.stat().st_mtime), default=None)


def _is_broken(folder: Path) -> bool:
    """Whether `folder` has a config that cannot be read."""
    for path in (folder / name for name in _CONFIGS):
        try:
            if os.path.lexists(path):
                read_json(path)
        except InputError:
            return True
    return False


def weights_name(extension: str, variant: str | None = None, library: Library = "diffusers") -> str:
    """A library's name of a file that holds all weights: `extension` is safetensors or bin."""
    return ".".join(filter(None, (STEMS[library][extension], variant, extension)))


def index_names(extension: str, variant: str | None = None, library: Library = "diffusers") -> list[str]:
    """A library's names, the newer first, of the index of weights in shards."""
    name = weights_name(extension, library=library)
    if variant is None:
        return [f"{name}.index.json"]
    return [f"{name}.index.{variant}.json", f"{name}.{variant}.index.json"]


def _weight_names(extension: str, variant: str | None, library: Library) -> list[str]:
    """All names that a library gives to files of weights and their index; those of shards are patterns."""
    stem, shard = STEMS[library][extension], "-?????-of-?????"
    shards = [f"{stem}{shard}.{extension}"]
    if variant is not None:
        shards = [f"{stem}.{variant}{shard}.{extension}", f"{stem}{shard}.{variant}.{extension}"]
    return [weights_name(extension, variant, library), *index_names(extension, variant, library), *shards]


def component_folder(root: str | Path, name: str) -> Path:
    """`root`/`name` where it exists, else `root`: old hub repositories keep every component's files at the top."""
    folder = Path(root) / name
    return folder if folder.is_dir() else Path(root)


def _is_model(folder: str | Path) -> bool:
    return os.path.isdir(folder) and any(os.path.isfile(os.path.join(folder, config)) for config in _CONFIGS)


class Needed(NamedTuple):
    """The folders of a model that more than its first JSON files are needed of."""

    models: dict[Path, Library]  # with weights, and the library that names their files
    tokenizers: list[Path]


def needed_folders(root: Path) -> Needed:
    """The folders of the pipeline below `root`, or `root` itself where it is a plain model.

    Raises InputError for a pipeline or model that fastdiff does not run.
    """
    if not (root / "model_index.json").is_file():
        return Needed({root: read_denoiser_part(root / "config.json").library}, [])
    classes = read_model_index(root)
    pipeline = PIPELINES[classes["pipeline"]]
    parts = [part for part in pipeline.companions if part.name in classes]
    denoiser = {component_folder(root, pipeline.denoiser.name): pipeline.denoiser.library}
    companions = {root / part.name: part.library for part in parts if isinstance(part, ModelPart)}
    return Needed(denoiser | companions, [root / part.name for part in parts if isinstance(part, TokenizerPart)])


def _is_supported(folder: Path) -> bool:
    try:
        needed_folders(folder)
    except InputError:
        return False
    return True


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form org/name and is not also a path that exists."""
    return bool(_HUB_ID.fullmatch(name)) and not os.path.exists(name)


def _download(
    repo_id: str, revision: str | None, token: str | None, variant: str | None, local_files_only: bool
) -> Path:
    """Configs first, so that an unsupported pipeline is refused before its gigabytes come; then what it needs.

    The later requests name the commit that the first one found: a push in between cannot mix two versions.
    """
    snapshot = partial(_snapshot, repo_id, token=token, local_files_only=local_files_only)
    root = snapshot(_json_files(), revision=revision)
    if not _is_model(root):
        raise InputError(f"hub model {repo_id} holds neither {' nor '.join(_CONFIGS)}; give one in diffusers' layout")
    needed = needed_folders(root)

    def fetch(folder: Path, names: Collection[str]) -> bool:
        """Download those files of a folder, and its config. Whether there are any of them."""
        wanted = [(folder / name).relative_to(root).as_posix() for name in ("config.json", *names)]
        snapshot(wanted, revision=root.name)
        return any(any(folder.glob(name)) for name in names)

    where = f"in diffusers' layout that can be had; see https://huggingface.co/{repo_id}/tree/{revision or 'main'}"
    for folder in needed.tokenizers:
        if not fetch(folder, _TOKENIZER_FILES):
            raise InputError(f"hub model {repo_id} has no {folder.name} {where}")
    for folder, library in needed.models.items():
        if not any(fetch(folder, _weight_names(extension, variant, library)) for extension in STEMS[library]):
            of_part = "" if folder == root else f" of its {folder.name}"
            wanted = "weights" if variant is None else f"weights of variant {variant!r}"
            raise InputError(f"hub model {repo_id} has no {wanted}{of_part} {where}")
    return root


def _json_files() -> list[str]:
    """The files that say what else a model needs.

    By name, not *.json: offline, the client refuses a snapshot that lacks any file asked for.
    """
    return [
        *_CONFIGS,
        *dict.fromkeys(f"{part.name}/config.json" for part in denoisers()),
        "scheduler_config.json",
        "scheduler/scheduler_config.json",
        "fastdiff.json",
    ]


def _snapshot(
    repo_id: str, patterns: list[str], *, revision: str | None, token: str | None, local_files_only: bool
) -> Path:
    import huggingface_hub  # slow to import, and needed for hub ids only
    from huggingface_hub.errors import HTTPError

    try:
        folder = huggingface_hub.snapshot_download(
            repo_id, allow_patterns=patterns, revision=revision, token=token, local_files_only=local_files_only
        )
    except (OSError, ValueError, HTTPError) as error:  # the client's own errors, the disk's, its transport's
        raise InputError(f"hub model {repo_id}: {_refusal(error, repo_id, revision)}") from None
    return Path(folder)


def _refusal(error: Exception, repo_id: str, revision: str | None) -> str:
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo_id}"
    reasons = {  # the first that fits: a gated repository is also one that was not found
        errors.GatedRepoError: f"it is gated; accept its terms at {page}, then `hf auth login` or give a token",
        errors.RevisionNotFoundError: f"there is no revision {revision!r}; see {page}/commits",
        errors.RepositoryNotFoundError: "there is none, or it is private; check the name, or `hf auth login`",
        errors.DisabledRepoError: "it was disabled by the hub; choose another model",
        errors.HFValidationError: "this is not a valid hub id; write org/name",
        errors.LocalTokenNotFoundError: "there is no stored token; run `hf auth login`",
        errors.LocalEntryNotFoundError: "it is not in the local cache and the hub was not reached; "
        "go online (and unset HF_HUB_OFFLINE), or give a folder",
    }
    for kind, reason in reasons.items():
        if isinstance(error, kind):
            return reason
    first_line = next(iter(str(error).splitlines()), "")
    return f"the download failed ({type(error).__name__}: {first_line}); try again"
