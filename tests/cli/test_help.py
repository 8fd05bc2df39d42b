"""`--help`: examples first, in groups, on one screen."""

import re
import shlex

import pytest

from fastdiff import cli
from fastdiff.sampler_names import SCHEDULERS


@pytest.fixture
def helped(monkeypatch, capsys):
    """Returns the help of a command, 100 columns wide."""

    def show(*args: str, flag: str = "--help") -> str:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        assert cli.main([*args, flag]) == 0
        return capsys.readouterr().out

    return show


def test_the_help_begins_with_examples_that_are_valid(helped):
    usage, _, _, _, head, *lines = helped().splitlines()
    assert (usage, head) == ("usage: fastdiff COMMAND [options]", "examples:")
    examples = [re.split(r" {2,}", line.strip())[0] for line in lines[:4]]
    for example in examples:
        program, *args = shlex.split(example)
        assert program == "fastdiff" and cli._parser().parse_args(args).run, example
    assert [line for line in lines if len(line) > 100] == []


def test_the_help_of_sample_fits_on_a_screen_and_lists_schedulers_once(helped):
    text = helped("sample")
    assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 100
    assert re.findall(r"^([a-z ]+):$", text, re.MULTILINE) == ["options", "what to draw", "sampling", "model", "output"]
    words = re.split(r"[\s,]+", text)
    assert [name for name in SCHEDULERS if words.count(name) != 1] == []
    assert "-m, --model MODEL " in text, "the value of a flag with two names is there once"


@pytest.mark.parametrize("command", ["sample", "bulk"])
def test_help_all_adds_the_options_that_few_people_need(helped, command):
    usual, every = (
        {*re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, re.MULTILINE)}
        for text in (helped(command), helped(command, flag="--help-all"))
    )
    assert usual < every
    assert {"--prompt", "--steps", "--out", "--help-all"} <= usual
    assert {"--revision", "--eta", "--guidance-start", "--lora-dir"} <= every - usual
    assert helped(command, flag="--help") == helped(command)


@pytest.mark.parametrize("command", cli._COMMANDS)
def test_the_usage_of_each_command_is_short(helped, command):
    usage = helped(command).split("\n\n")[0]
    assert usage.startswith(f"usage: fastdiff {command} ") and len(usage.splitlines()) <= 5
