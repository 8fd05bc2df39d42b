"""FILE:VALUE, and the names of LoRAs in prompts."""

import pytest

from fastdiff.requests.file_option import FileOption, lora_name, lora_names


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("ink.safetensors", "ink"),
        ("a/b/Ink v1.5.SFT", "Ink v1.5"),
        (r"C:\loras\ink.pt", "ink"),
        ("ink", "ink"),
        (".safetensors", ".safetensors"),
        ("pytorch_lora_weights.safetensors", "pytorch_lora_weights"),
        ("a/ink/pytorch_lora_weights.safetensors", "pytorch_lora_weights"),
        ("/c/hub/models--org--my-ink/snapshots/0a1/pytorch_lora_weights.safetensors", "my-ink"),
        ("/c/hub/models--org--my-ink/snapshots/0a1/wash.safetensors", "wash"),
    ],
)
def test_the_name_of_a_lora(path, name):
    assert lora_name(path) == name


def test_files_of_one_name_have_their_paths():
    def names(*texts):
        return lora_names([*map(FileOption.parse, texts)])

    assert names("a/ink.safetensors:0.5", "wash.sft") == ["ink", "wash"]
    assert names("a/ink.safetensors:0.5", "wash.sft", "b/ink.sft") == ["a/ink.safetensors", "wash", "b/ink.sft"]
    assert names("s.sft", "b/s.sft", "s.sft.sft") == ["s.sft", "b/s.sft", "s.sft.sft"]
    assert names() == []
