"""Read the file of `--prompt-file`, one prompt per line, and other text files."""

from fastdiff.errors import InputError

MAX_BYTES = 2**28  # five times the size of 50,000 prompts of about 1,000 letters each


def read_prompts(path: str) -> tuple[str, ...]:
    """Return the lines of a UTF-8 text file, unchanged and without blank lines. InputError if there are none."""
    text = read_text(path, "prompt-file", "a text file with one prompt per line", "one prompt per line")
    prompts = tuple(line for line in (line.removesuffix("\r") for line in text.split("\n")) if line.strip())
    if not prompts:
        raise InputError(f"prompt-file {path} has no prompts; write one per line")
    return prompts


def read_text(
    path: str, flag: str, wanted: str, saved: str, most_bytes: int | None = None, things: str = "prompts"
) -> str:
    """Return the text of a UTF-8 file without its byte order mark.

    An InputError names the `flag` that gave the file, the file that is `wanted`, how it is to be `saved`, and the
    `things` in it. most_bytes: MAX_BYTES if None.
    """
    most = MAX_BYTES if most_bytes is None else most_bytes
    try:
        with open(path, "rb") as file:
            content = file.read(most + 1)
        if len(content) > most:
            raise InputError(f"{flag} {path} is larger than {most >> 20} MB; give fewer {things}")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{flag} {path} does not exist; give {wanted}") from None
    except UnicodeDecodeError:
        raise InputError(f"{flag} {path} is not UTF-8 text; save it as UTF-8, {saved}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{flag} {path} cannot be read ({reason}); give a text file") from None
