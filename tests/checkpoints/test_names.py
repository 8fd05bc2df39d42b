"""Names that become parts of file names: which are allowed."""

import pytest

from fastdiff.checkpoints import hub, names
from fastdiff.errors import InputError


@pytest.mark.parametrize("variant", ["x/../../../w", "..\\w", "**", "fp?", "[a]", "", ".", "..", "a\nb", "x" * 65, 7])
@pytest.mark.parametrize("name", ["emoji64", "org/name"])
def test_a_variant_is_part_of_a_file_name(name, variant):
    with pytest.raises(InputError) as error:
        hub.resolve(name, variant=variant)
    assert str(error.value).startswith("variant") and "such as fp16" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "revision",
    [
        "../w",
        "/w",
        "a/../b",
        "a\\b",
        "C:w",
        "",
        "a\nb",
        "a\0b",
        "x" * 300,
        7,
        pytest.param(10**5000, id="5,001 digits"),
    ],
)
def test_a_revision_leads_to_no_file_outside_of_the_cache(revision):
    with pytest.raises(InputError) as error:
        hub.resolve("org/name", revision=revision)
    assert str(error.value).startswith("revision") and "branch, tag or commit" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", "0123abcd" * 5, "feature/größe-2", "a.b+c@d"])
def test_revisions_that_models_have(revision):
    assert names.is_revision(revision)


@pytest.mark.parametrize("variant", ["fp16", "non_ema", "fp8_e4m3fn", "v1.5", "a-b"])
def test_variants_that_models_have(variant):
    assert hub.resolve("emoji64", variant=variant) == hub.bundled_models()["emoji64"]


@pytest.mark.parametrize("name", ["", ".", "..", "../w", "/w", "a/b", "..\\w", "C:w"])
def test_what_is_elsewhere_is_no_file_name(name):
    assert not names.is_file_name(name)
    assert names.is_file_name("diffusion_pytorch_model-00001-of-00002.safetensors") and names.is_file_name("a b..c")
