"""The file of `--prompt-file`: a prompt a line."""

from fastdiff.errors import InputError

MAX_BYTES = 2**28  # a run's 50,000 prompts of some 1,000 letters each are a fifth of it


def read_prompts(path: str) -> tuple[str, ...]:
    """The lines of a text file in UTF-8, as they are; blank ones are left out. InputError where there are none."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InputError(f"prompt-file {path} has more than {MAX_BYTES >> 20} MB; give fewer prompts")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"prompt-file {path} does not exist; name a text file with a prompt a line") from None
    except UnicodeDecodeError:
        raise InputError(f"prompt-file {path} is not text in UTF-8; save it as UTF-8, a prompt a line") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        if isinstance(error, InputError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"prompt-file {path} cannot be read ({reason}); name a text file") from None
    prompts = tuple(line for line in (line.removesuffix("\r") for line in text.split("\n")) if line.strip())
    if not prompts:
        raise InputError(f"prompt-file {path} holds no prompt; write one a line")
    return prompts
