"""`fastdiff models`: what is bundled, and what a model offers."""

import re


def test_models_lists_what_is_bundled_and_what_a_model_offers(fastdiff, model, refused):
    listed = fastdiff("models").stdout
    for name in ("emoji64", "emoji64-dit"):
        assert re.search(rf"^{name} +bundled +64x64, ddim, 216 labels$", listed, re.MULTILINE)
    done = fastdiff("models", model)
    assert "guidance_scale: 4.0\n" in done.stdout and "\n  215  twemoji flags\n" in done.stdout
    assert "\ngroup  noto food: noto fruit, " in done.stdout
    assert "\n  216 " not in done.stdout, "the null label is nothing to ask for"
    refused(fastdiff("models", "emoji65"), "no model 'emoji65'; did you mean emoji64?")
