"""The names of the ways to read a prompt. Imports no torch."""

from typing import Literal, get_args

PromptSyntax = Literal["plain", "weighted"]
Emphasis = Literal["original", "no-norm"]
SYNTAXES: tuple[str, ...] = get_args(PromptSyntax)
EMPHASES: tuple[str, ...] = get_args(Emphasis)
EMPHASIS: Emphasis = "original"
SYNTAX: PromptSyntax = "plain"
