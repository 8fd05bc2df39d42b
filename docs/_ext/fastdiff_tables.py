"""Three directives, which write parts of the API pages from the code at build time.

- `command-line` writes a section for each command of `fastdiff`, with the text of its `--help`.
- `scheduler-names` writes the table of the schedulers' names.
- `fields` writes the table of the fields of a class: names, defaults and the comments beside them.

So a new command, flag, sampler or option appears at the next build.
"""

import argparse
import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from fastdiff import cli
from fastdiff.cli.arguments import help_of_all
from fastdiff.sampler_names import SAMPLERS

WIDTH = 100  # characters in a line of help
FIELD = re.compile(r"^    (?P<name>[a-z]\w*): (?!ClassVar)[^=#]+?(?: = (?P<default>.*?))?(?:  # (?P<meaning>.*))?$")


def commands() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name, in the order of `fastdiff --help`."""
    parser = cli._parser()
    (action,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return {"fastdiff": parser} | {f"fastdiff {name}": command for name, command in action.choices.items()}


def help_of(parser: argparse.ArgumentParser) -> str:
    """Return the text of `--help-all`, in one width and without colours on every machine."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH + 2), "NO_COLOR": "1"}):  # argparse leaves 2 columns empty
        return help_of_all(parser).rstrip()


def command_line() -> str:
    """Return the sections of all commands in Markdown."""
    return "\n\n".join(f"## {name}\n\n```text\n{help_of(parser)}\n```" for name, parser in commands().items())


def scheduler_names() -> str:
    """Return the table of the schedulers' names in Markdown."""
    rows = ["| Name | Class | Options that the name sets |", "|---|---|---|"]
    for class_name, sampler in SAMPLERS.items():
        for name, options in sampler.names.items():
            values = ", ".join(f"`{key}={value!r}`" for key, value in options.items())
            rows.append(f"| `{name}` | [{class_name}](#{class_name.lower()}) | {values} |")
    return "\n".join(rows)


def fields_of(kind: type) -> dict[str, tuple[str, str]]:
    """Return the default and the comment of each field of a class. Fields of its base classes come first."""
    found: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("fastdiff."):
            found |= {name: (default, meaning) for name, default, meaning in _read(base)}
    return found


def _read(kind: type) -> Iterator[tuple[str, str, str]]:
    for line in inspect.getsource(kind).splitlines():
        if re.match(r"    (@|def )", line):  # fields come before the first method
            return
        if match := FIELD.match(line):
            yield match["name"], match["default"] or "", match["meaning"] or ""


class CommandLine(SphinxDirective):
    """A section for each command."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(command_line(), allow_section_headings=True)


class SchedulerNames(SphinxDirective):
    """The table of the schedulers' names."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(scheduler_names())


class Fields(SphinxDirective):
    """The table of the fields of a class, whose full name is the argument."""

    required_arguments = 1
    heads: ClassVar = ("Name", "Default", "Meaning")

    def run(self) -> list[nodes.Node]:
        module, _, name = self.arguments[0].rpartition(".")
        rows = fields_of(getattr(import_module(module), name))
        cells = [(nodes.literal(text=name), _code(default), _words(text)) for name, (default, text) in rows.items()]
        used = [i for i in range(len(self.heads)) if any(row[i].astext() for row in cells)]  # no empty columns
        if len(used) < 2:  # the names alone are in the signature
            return []
        group = nodes.tgroup(cols=len(used))
        group += [nodes.colspec(colwidth=1) for _ in used]
        group += nodes.thead("", _row([nodes.Text(self.heads[i]) for i in used]))
        group += nodes.tbody("", *(_row([row[i] for i in used]) for row in cells))
        return [nodes.table("", group)]


def _row(cells: Sequence[nodes.Node]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", cell)) for cell in cells))


def _code(text: str) -> nodes.Node:
    return nodes.literal(text=text) if text else nodes.Text("")


def _words(text: str) -> nodes.Node:
    """Return a comment as text, in which `code` is literal."""
    children = [nodes.literal(text=part) if i % 2 else nodes.Text(part) for i, part in enumerate(text.split("`"))]
    return nodes.inline("", "", *children)


def setup(app: Sphinx) -> dict[str, Any]:
    """Add the directives to Sphinx."""
    app.add_directive("command-line", CommandLine)
    app.add_directive("scheduler-names", SchedulerNames)
    app.add_directive("fields", Fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
