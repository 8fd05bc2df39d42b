"""Textual inversion (Gal et al. 2022, arXiv 2208.01618): embeddings of new tokens for a pipeline's text encoders.

The methods have the names and arguments of diffusers' TextualInversionLoaderMixin.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastdiff.arguments import did_you_mean, instance, optional, shown, text
from fastdiff.arguments import path as checked_path
from fastdiff.checkpoints import hub
from fastdiff.checkpoints.loading import REFUSED
from fastdiff.checkpoints.single_files.embeddings import (
    FIRST_NAME,
    REMEDY,
    Embedding,
    base_of_width,
    find_embedding,
    read_embedding,
    recognise,
)
from fastdiff.errors import InputError, NonFiniteWeightsError
from fastdiff.execution.tensors import FLOATS, tensor
from fastdiff.models.clip import CLIPTextModel
from fastdiff.pipelines.encoding import TextEncoders
from fastdiff.schema import Schema, option_names
from fastdiff.text.tokenizer import CLIPTokenizer, Words

Source = str | Path | Mapping[str, Any] | Tensor

_NAME = "pretrained_model_name_or_path"
_A1111 = "string_to_param"  # in a dict that torch.load read from A1111's file


@dataclass(frozen=True)
class EmbeddingOptions(Schema):
    """Where an embedding's file is: the options of diffusers' `load_textual_inversion`."""

    weight_name: str | None = None  # the file's name in a folder or on the hub
    subfolder: str | None = None
    revision: str | None = None
    hf_token: str | bool | None = None
    cache_dir: str | Path | None = None
    local_files_only: bool | None = None
    force_download: bool = False
    use_safetensors: bool | None = None

    def check(self) -> None:
        if self.use_safetensors is False or (self.weight_name or "").lower().endswith((".bin", ".pt")):
            raise InputError(
                "use_safetensors: loading a pickle can run code that is hidden in it, so embeddings are read from "
                "safetensors alone; convert the file, or give the dict that torch.load(..., weights_only=True) returns"
            )
        optional(text, "weight_name", self.weight_name)
        optional(text, "subfolder", self.subfolder)


class Readable(NamedTuple):
    """An embedding, and the function that reads its tensor of a key: (C,) or (vectors, C)."""

    embedding: Embedding
    read: Callable[[str], Tensor]


class TextualInversion:
    """A pipeline that takes embeddings of new tokens."""

    encoders: TextEncoders

    def load_textual_inversion(
        self,
        pretrained_model_name_or_path: Source | Sequence[Source],
        token: str | Sequence[str] | None = None,
        tokenizer: CLIPTokenizer | None = None,
        text_encoder: CLIPTextModel | None = None,
        **kwargs: Any,
    ) -> None:
        """Load embeddings, so that their tokens can stand in prompts. As diffusers' method of this name.

        A prompt names an embedding by its first token; the tokens of its other vectors follow by themselves. Letters
        match in any case. The models' own weights do not change: `save_pretrained` leaves the embeddings out (diffusers
        saves them), and after `unload_textual_inversion` the pictures have the bits that they had before. The text
        encoder's CUDA graphs are captured again; the denoiser's stay. Pipelines that share the encoder share the
        embeddings. An error leaves everything as it was.

        Args:
            pretrained_model_name_or_path: one of these, or a list of them:
                a safetensors file of diffusers (one tensor, named by its token), of A1111 (`emb_params`), or of SDXL
                (`clip_l` and `clip_g`); a folder that holds one of these files; a hub id; a dict of the same tensors,
                or A1111's dict as torch.load reads it; a tensor (C,) or (vectors, C), C being the encoder's width.
            token: the token, or one for each embedding. Default: the token in the file, else the file's name. Several
                tokens for one embedding divide its vectors: one for each token.
            tokenizer: the tokenizer of the text encoder to load into. Default: the pipeline's first one; an embedding
                with `clip_l` and `clip_g` is loaded into both encoders of SDXL.
            text_encoder: the text encoder, instead of its tokenizer.
            kwargs: `weight_name` and `subfolder` of a folder or a hub id, and the hub's `revision`, `hf_token`,
                `cache_dir`, `local_files_only` and `force_download`.

        Raises:
            InputError: for a file that is no embedding, an embedding of another width or with more vectors than a
                prompt has room for, and a token that cannot be one or exists already.
            NonFiniteError: for NaN or infinity in an embedding.
        """
        only = self._index_of(tokenizer, text_encoder)
        options = _options(kwargs)
        sources = _listed(pretrained_model_name_or_path)
        found = [_readable(source, options) for source in sources]
        added: dict[int, dict[str, tuple[Readable, str, slice]]] = {}  # by encoder, then by token
        for readable, tokens in zip(found, _tokens(token, len(sources)), strict=True):
            for i, key in self._places(readable.embedding, only).items():
                mine = added.setdefault(i, {})
                for name, rows in _divided(readable.embedding, tokens):
                    if name in mine:
                        raise InputError(f"token {name}: two embeddings have it; give each its own with token=")
                    mine[name] = (readable, key, rows)
        words = {i: self._words(i, mine) for i, mine in added.items()}  # every check of tokens, before tensors are read
        tables = {i: self._table(i, mine) for i, mine in added.items()}
        for i, table in tables.items():
            self._set(i, words[i], table)

    def unload_textual_inversion(
        self,
        tokens: str | Sequence[str] | None = None,
        tokenizer: CLIPTokenizer | None = None,
        text_encoder: CLIPTextModel | None = None,
    ) -> None:
        """Remove embeddings that `load_textual_inversion` loaded, with all their vectors.

        Args:
            tokens: the token of an embedding, or a list of them. Default: all.
            tokenizer: the tokenizer of the text encoder to remove them from. Default: every encoder that has them.
            text_encoder: the text encoder, instead of its tokenizer.

        Raises InputError, and removes nothing, if a token is none of a loaded embedding.
        """
        only = self._index_of(tokenizer, text_encoder)
        places = range(len(self.encoders.models)) if only is None else [only]
        loaded = {i: self.encoders.tokenizers[i].embeddings for i in places}
        known = [*dict.fromkeys(name for mine in loaded.values() for name in mine)]
        asked = known if tokens is None else [tokens] if isinstance(tokens, str) else [*tokens]
        for name in asked:
            if name not in known:
                has = f"loaded are {', '.join(known)}" if known else "none is loaded"
                raise InputError(f"tokens: {shown(name)} is no token of a loaded embedding; {has}")
        for i, mine in loaded.items():
            kept = {name: count for name, count in mine.items() if name not in asked}
            if len(kept) < len(mine):
                words = self.encoders.tokenizers[i].with_embeddings(kept)
                rows = [part for name, part in self._rows(i).items() if name in kept]
                self._set(i, words, torch.cat(rows) if rows else None)

    def maybe_convert_prompt(self, prompt: str | list[str], tokenizer: CLIPTokenizer) -> str | list[str]:
        """Return a prompt, or a list of them, with the tokens of all vectors: "cat" becomes "cat cat_1 cat_2".

        `encode_prompt` and calls do it by themselves. As diffusers' method of this name; an embedding of one vector
        changes nothing. Raises InputError for a `prompt` that is no text.
        """
        instance("tokenizer", tokenizer, CLIPTokenizer, "a CLIPTokenizer of fastdiff, such as pipe.tokenizer")
        return [tokenizer.expand(each) for each in prompt] if isinstance(prompt, list) else tokenizer.expand(prompt)

    def _index_of(self, tokenizer: Any, text_encoder: Any) -> int | None:
        """Return which encoder a call means; None: the default."""
        if not self.encoders.models:
            raise InputError("textual inversion: this pipeline has no text encoder; load it with one")
        given = {
            "tokenizer": (tokenizer, self.encoders.tokenizers),
            "text_encoder": (text_encoder, self.encoders.models),
        }
        places = {}
        for name, (value, own) in given.items():
            if value is not None:
                place = next((i for i, each in enumerate(own) if each is value), None)
                if place is None:
                    raise InputError(
                        f"{name}: {shown(value)} is not this pipeline's; give pipe.{name}, or leave it out"
                    )
                places[name] = place
        if len(set(places.values())) > 1:
            raise InputError("text_encoder: the tokenizer is the other text encoder's; give both of one encoder")
        return next(iter(places.values()), None)

    def _places(self, embedding: Embedding, only: int | None) -> dict[int, str]:
        """Return the keys of the tensors to load, by encoder. Raises InputError if they do not fit the encoders."""
        models, source = self.encoders.models, embedding.source
        keys = {i: each.key for i, each in embedding.tensors.items()}
        widths = {i: each.width for i, each in embedding.tensors.items()}
        if not embedding.is_of_sdxl:
            keys, widths = {only or 0: keys[0]}, {only or 0: widths[0]}
        elif only is not None:
            keys = {i: key for i, key in keys.items() if i == only}
        if not keys or max(keys) >= len(models):
            raise InputError(
                f"{source}: it is for {embedding.base}, with vectors for {len(embedding.tensors)} text encoders, and "
                f"this model has {len(models)}; give an embedding that was trained for this model"
            )
        for i in keys:
            wanted = models[i].config.hidden_size
            if widths[i] != wanted:
                second = i == 0 and len(models) > 1 and widths[i] == models[1].config.hidden_size
                remedy = "give text_encoder=pipe.text_encoder_2 to load it there" if second else REMEDY
                raise InputError(
                    f"{source}: its vectors have {widths[i]} channels, so it is for {base_of_width(widths[i])}, and "
                    f"this text encoder has {wanted}; {remedy}{'' if second else ' that was trained for this model'}"
                )
        return keys

    def _words(self, i: int, added: Mapping[str, tuple[Readable, str, slice]]) -> Words:
        """Return the words of a tokenizer with more embeddings. Raises InputError for their tokens."""
        tokenizer = self.encoders.tokenizers[i]
        for name in added:
            if name in tokenizer.embeddings:
                raise InputError(
                    f"token {name}: an embedding with this token is loaded; call unload_textual_inversion({name!r}) "
                    "first, or give another token="
                )
        return tokenizer.with_embeddings(
            {**tokenizer.embeddings, **{name: rows.stop - rows.start for name, (_, _, rows) in added.items()}}
        )

    def _table(self, i: int, added: Mapping[str, tuple[Readable, str, slice]]) -> Tensor:
        """Return the added vectors of an encoder, (R, C), with the new ones. Reads their tensors."""
        model, read = self.encoders.models[i], {}
        for readable, key, _ in added.values():
            if (id(readable), key) not in read:
                vectors = readable.read(key)
                read[id(readable), key] = _converted(vectors, readable.embedding.source, model.dtype)
        new = [read[id(readable), key][rows].to(model.device) for readable, key, rows in added.values()]
        return torch.cat([*self._rows(i).values(), *new])

    def _rows(self, i: int) -> dict[str, Tensor]:
        """Return the vectors of each loaded embedding of an encoder, (vectors, C), by its token."""
        model, loaded = self.encoders.models[i], self.encoders.tokenizers[i].embeddings
        if model.added_tokens is None:
            return {}
        return dict(zip(loaded, model.added_tokens.split([*loaded.values()]), strict=True))

    def _set(self, i: int, words: Words, table: Tensor | None) -> None:
        model, tokenizer = self.encoders.models[i], self.encoders.tokenizers[i]
        model.add_tokens(tokenizer.size, table)
        tokenizer.use(words)


def _options(kwargs: Mapping[str, Any]) -> EmbeddingOptions:
    """Return the checked options of a call."""
    names = option_names(EmbeddingOptions)
    for name, value in kwargs.items():
        if name in ("proxies", "mirror") and value is None:
            continue
        if name not in names:
            hint = REFUSED.get(name) or did_you_mean(name, ("token", *names)) or "leave it out"
            raise InputError(f"{name}: load_textual_inversion has no such argument; {hint}")
    return EmbeddingOptions(**{name: value for name, value in kwargs.items() if name in names})


def _listed(sources: Any) -> list[Any]:
    listed = list(sources) if isinstance(sources, list | tuple) else [sources]
    if not listed:
        raise InputError(f"{_NAME}: an empty list; give an embedding")
    return listed


def _tokens(token: Any, count: int) -> list[list[str] | None]:
    """Return the tokens of each of `count` embeddings, None for one that names itself."""
    if token is None or (isinstance(token, list | tuple) and all(each is None for each in token)):
        return [None] * count
    listed = [token] if isinstance(token, str) else list(token) if isinstance(token, list | tuple) else [token]
    given = [each for each in listed if each is not None]
    if any(not isinstance(each, str) for each in given):
        raise InputError(f"token: {shown(token)} is neither a text nor a list of texts; give the embedding's token")
    if len(set(given)) < len(given):
        raise InputError(f"token: {shown(token)} has a token twice; give each embedding its own")
    if count == 1:
        return [given]
    if len(listed) != count:
        raise InputError(f"token: {len(listed)} given for {count} embeddings; give one for each, or none")
    return [None if each is None else [each] for each in listed]


def _divided(embedding: Embedding, tokens: list[str] | None) -> list[tuple[str, slice]]:
    """Return the tokens of an embedding, each with its rows."""
    if tokens is None and embedding.token is None:
        raise InputError(f"{embedding.source}: nothing names its token; give token=")
    names = [embedding.token] if tokens is None else tokens
    if len(names) == 1:
        return [(str(names[0]), slice(0, embedding.vectors))]
    if len(names) != embedding.vectors:
        raise InputError(
            f"token: {len(names)} tokens for the {embedding.vectors} vectors of {embedding.source}; give one token, or "
            "one for each vector"
        )
    return [(str(name), slice(i, i + 1)) for i, name in enumerate(names)]


def _readable(source: Any, options: EmbeddingOptions) -> Readable:
    """Return an embedding of any form. Of a file only the header is read."""
    if isinstance(source, Tensor):
        source = {"emb_params": source}
    if isinstance(source, Mapping):
        state, token = _state(source)
        shapes = {key: tuple(value.shape) for key, value in state.items()}
        return Readable(recognise(shapes, "the embedding", token), state.__getitem__)
    path = _path_of(source, options)
    return Readable(read_embedding(path), partial(_read, path))


def _state(given: Mapping[Any, Any]) -> tuple[dict[str, Tensor], str | None]:
    """Return the tensors of a dict by their keys, and the token of A1111's dict."""
    token = None
    if _A1111 in given:
        inner = given[_A1111]
        if not isinstance(inner, Mapping) or "*" not in inner:
            raise InputError(f"{_NAME}: {_A1111} holds no vectors under '*'; give the dict of an embedding")
        token, given = given.get("name"), {"emb_params": inner["*"]}
    for key, value in given.items():
        if not isinstance(key, str):
            raise InputError(f"{_NAME}: the key {shown(key)} is no text; give a dict of the token and its vectors")
        tensor(f"{_NAME}: {shown(key)}", value, FLOATS)
    return dict(given), token


def _path_of(source: Any, options: EmbeddingOptions) -> Path:
    """Return the file of a path, a folder or a hub id."""
    name = os.fspath(checked_path(_NAME, source))
    if os.path.isdir(name):
        return find_embedding(Path(name), options.weight_name, options.subfolder)
    if not hub.names_hub_file(name):
        return Path(name)
    return hub.hub_file(
        name,
        "/".join(filter(None, [options.subfolder, options.weight_name or FIRST_NAME])),
        revision=options.revision,
        token=options.hf_token,
        cache_dir=options.cache_dir,
        local_files_only=options.local_files_only,
        force_download=options.force_download,
    )


def _read(path: Path, key: str) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({' '.join(str(error).split())}); download it again") from None


def _converted(vectors: Tensor, source: str, dtype: torch.dtype) -> Tensor:
    """Return vectors (C,) or (vectors, C) as (vectors, C) in a dtype, on the CPU. Raises if they are not finite."""
    vectors = vectors.detach().cpu().reshape(-1, vectors.shape[-1])
    if not vectors.double().isfinite().all():
        raise NonFiniteWeightsError(f"{source}: NaN or infinity in its vectors; use one from before training diverged")
    made = vectors.to(dtype)
    if not made.isfinite().all():
        raise InputError(f"{source}: values beyond the range of {dtype} in its vectors; use bfloat16 or float32")
    return made
