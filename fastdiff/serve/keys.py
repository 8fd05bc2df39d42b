"""The bearer keys of clients, by file or environment."""

import hashlib
import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from fastdiff.errors import InputError
from fastdiff.serve.wire.errors import ApiError

VARIABLE = "FASTDIFF_API_KEYS"
SHORTEST = 16  # characters of a key


class Keys:
    """The digests of keys. Without keys, everybody is let in."""

    def __init__(self, lines: Iterable[str] = (), source: str = "") -> None:
        """lines: a key each; empty lines and lines that begin with # are skipped.

        Raises InputError, which shows no key, for a key that is too short or has other characters than ASCII's.
        """
        self._digests: list[bytes] = []
        for place, line in enumerate(lines, 1):
            key = line.strip()
            if not key or key.startswith("#"):
                continue
            if len(key) < SHORTEST or not key.isascii() or len(key.split()) > 1:
                raise InputError(f"{source}: line {place} is not a key; give {SHORTEST} or more letters and digits")
            self._digests.append(_digest(key))

    def __bool__(self) -> bool:
        return bool(self._digests)

    @classmethod
    def read(cls, path: Path | None) -> "Keys":
        """Return the keys in a file, or else in the environment, or none. Raises InputError."""
        if path is None:
            return cls(os.environ.get(VARIABLE, "").replace(",", "\n").splitlines(), VARIABLE)
        try:
            keys = cls(path.read_text(encoding="utf-8").splitlines(), f"--keys {path}")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"--keys {path} cannot be read ({reason}); give a file of one key per line") from None
        if not keys:
            raise InputError(f"--keys {path} has no keys; add one per line")
        return keys

    def check(self, header: str | None) -> int | None:
        """Return the number of the key in an Authorization header, or None if there are no keys.

        The time does not depend on which key is right, nor on how much of it. Raises ApiError 401.
        """
        if not self._digests:
            return None
        scheme, _, key = (header or "").partition(" ")
        asked = _digest(key.strip() if scheme.lower() == "bearer" else "")
        matches = [hmac.compare_digest(asked, digest) for digest in self._digests]
        if not any(matches):
            given = "the key is wrong" if header else "a key is needed"
            raise ApiError(
                401,
                f"{given}; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return matches.index(True)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
