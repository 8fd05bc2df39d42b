"""Who may use the page: the host names that the server answers to, and the users who may log in."""

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from fastdiff.errors import InputError

AUTH_VARIABLE = "FASTDIFF_AUTH"
SPACE_VARIABLE = "SPACE_HOST"  # set on Hugging Face Spaces: the host names of the Space, separated by commas


class HostNames:
    """The host names of the server. A name that another site rebound to its address (DNS rebinding) is not one.

    An IP address cannot be rebound, so it is always accepted.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """`host`: the address to listen on; `allowed`: names of proxies in front of the server."""
        own = {"localhost", host.lower()}
        if is_reached_by_others(host):
            own |= {socket.gethostname().lower(), f"{socket.gethostname().lower()}.local"}
        self._own = own
        self.public = {name.lower() for name in (*allowed, *space_names())}

    def have(self, address: str) -> bool:
        """Return whether a Host header, name:port or [IPv6 address]:port, names this server."""
        name = _name(address)
        return name in self._own or name in self.public or _is_number(name)

    def are_public(self, address: str) -> bool:
        """Return whether `address` has a public name, which a proxy may replace in the Host header."""
        return _name(address) in self.public


def _name(address: str) -> str:
    """Return the name of name:port, in lower case."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0].lower()


def _is_number(name: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def is_reached_by_others(host: str) -> bool:
    """Return whether other machines can reach a server that listens on `host`."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(host).is_loopback
    return host.lower() != "localhost"


def space_names() -> list[str]:
    """Return the host names of the Hugging Face Space that this process runs in; none elsewhere."""
    return [name.strip() for name in os.environ.get(SPACE_VARIABLE, "").split(",") if name.strip()]


def addresses(served: Sequence[str], host: str) -> list[str]:
    """Return the addresses to print, with share links first.

    served: the server's own address, then share links. A server that listens on all addresses of this machine gets up
    to two of them instead of its own.
    """
    own, *links = served
    if host not in ("0.0.0.0", "::"):
        return [*links, own]
    port = own.rstrip("/").rpartition(":")[2]
    numbers = (f"[{number}]" if ":" in number else number for number in _own_numbers(host))
    return [*links, *(f"http://{number}:{port}/" for number in numbers)]


def _own_numbers(host: str) -> list[str]:
    """Return the loopback address, and the address from which this machine reaches others. Nothing is sent.

    A server on 0.0.0.0 is reached by IPv4 only, and on :: by IPv6.
    """
    family, own, other = (
        (socket.AF_INET6, "::1", "2001:db8::1") if host == "::" else (socket.AF_INET, "127.0.0.1", "192.0.2.1")
    )  # addresses reserved for documentation: RFC 3849, RFC 5737
    numbers = [own]
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        numbers += {probe.getsockname()[0]} - {own}
    return numbers


class Users:
    """Users and the hashes of their passwords. A call returns whether a password is correct."""

    def __init__(self, lines: Iterable[str], source: str) -> None:
        """`lines`: one user:password each. Raises InputError, which shows no password, for a bad line or none."""
        self._hashes: dict[str, tuple[bytes, bytes]] = {}
        for place, line in enumerate(filter(str.strip, lines), 1):
            user, colon, password = line.strip().partition(":")
            if not (user and colon and password):
                raise InputError(f"{source}: line {place} is not user:password; fix it")
            self._hashes[user.strip()] = _salted(password)
        if not self._hashes:
            raise InputError(f"{source} has no users; add a line user:password for each")
        self._nobody = _salted(secrets.token_hex())

    @classmethod
    def read(cls, path: Path | None) -> "Users | None":
        """Return the users in a file, or else in the environment, or None if neither is given. Raises InputError."""
        if path is None:
            given = os.environ.get(AUTH_VARIABLE)
            return None if given is None else cls(given.splitlines(), AUTH_VARIABLE)
        try:
            return cls(path.read_text(encoding="utf-8").splitlines(), f"--auth {path}")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InputError(f"--auth {path} cannot be read ({reason}); give a file of lines user:password") from None

    def __call__(self, user: str, password: str) -> bool:
        salt, expected = self._hashes.get(user, self._nobody)  # an unknown user takes as long
        return hmac.compare_digest(_hash(password, salt), expected)


def _salted(password: str) -> tuple[bytes, bytes]:
    salt = secrets.token_bytes(16)
    return salt, _hash(password, salt)


def _hash(password: str, salt: bytes) -> bytes:
    return hashlib.scrypt(password.encode("utf-8", "surrogatepass"), salt=salt, n=2**14, r=8, p=1)
