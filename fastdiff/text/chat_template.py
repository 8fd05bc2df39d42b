"""Chat templates: Jinja templates of a tokenizer's folder, which turn a prompt into a turn of a chat.

A template is code of the folder's author. It runs in Jinja's sandbox, which reaches no file and no attribute of Python.
"""

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from annotated_types import Len

from fastdiff.errors import InputError, in_one_line
from fastdiff.schema import Wanted, checked

if TYPE_CHECKING:
    from jinja2 import Template

MAX_TEMPLATE = 2**16  # characters; Qwen3's has 4,168
MAX_TEXT = 2**20  # characters of a rendered prompt
_Template = Annotated[str, Len(1, MAX_TEMPLATE), Wanted(f"a template of 1 to {MAX_TEMPLATE} characters")]


class ChatTemplate:
    """A chat template, as transformers' `apply_chat_template` renders it.

    Raises InputError that begins with `source`, a file, for a text that is no template.
    """

    def __init__(self, text: Any, source: Path):
        self.text: str = checked(f"{source}: chat_template", text, _Template)
        self._source = source
        from jinja2 import TemplateError

        try:
            self._template = _compiled(self.text)
        except TemplateError as error:
            raise InputError(f"{source}: its chat_template is damaged ({in_one_line(error)}); save it again") from None

    def render(self, prompt: str) -> str:
        """Return the chat of a user who says `prompt`, up to the answer of the assistant, who may think first.

        Raises InputError if the template fails, or makes a text of more than MAX_TEXT characters.
        """
        message = {"role": "user", "content": prompt}
        parts, length = [], 0
        try:
            for part in self._template.generate(messages=[message], add_generation_prompt=True, enable_thinking=True):
                parts.append(part)
                length += len(part)
                if length > MAX_TEXT:
                    raise InputError(f"{self._source}: its chat_template makes more than {MAX_TEXT} characters")
        except InputError:
            raise
        except Exception as error:  # a template may call anything of Jinja's with anything
            told = in_one_line(error)
            raise InputError(f"{self._source}: its chat_template fails ({told}); save the tokenizer again") from None
        return "".join(parts)


@functools.lru_cache(maxsize=4)
def _compiled(text: str) -> "Template":
    """Return a template with the functions that transformers gives to its templates."""
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(text)
