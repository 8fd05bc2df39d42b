"""The file of `--prompt-file`, a prompt a line; and the reading of such text files."""

from fastdiff.errors import InputError

MAX_BYTES = 2**28  # a run's 50,000 prompts of some 1,000 letters each are a fifth of it


def read_prompts(path: str) -> tuple[str, ...]:
    """The lines of a text file in UTF-8, as they are; blank ones are left out. InputError where there are none."""
    text = read_text(path, "prompt-file", "a text file with a prompt a line", "a prompt a line")
    prompts = tuple(line for line in (line.removesuffix("\r") for line in text.split("\n")) if line.strip())
    if not prompts:
        raise InputError(f"prompt-file {path} holds no prompt; write one a line")
    return prompts


def read_text(path: str, flag: str, wanted: str, saved: str) -> str:
    """The text of a file in UTF-8 that `flag` names, without a byte order mark. InputError says what is `wanted`."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"{flag} {path} has more than {MAX_BYTES >> 20} MB; give fewer prompts")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{flag} {path} does not exist; name {wanted}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag} {path} is not text in UTF-8; save it as UTF-8, {saved}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{flag} {path} cannot be read ({reason}); name a text file") from None
