"""The shapes that are measured of the bundled text model."""


def test_the_measured_model_is_the_bundled_one(load):
    shapes = load("shapes")
    assert {"emoji-sd_b1", "emoji-sd_b64"} <= shapes.MODELS_GPU.keys()
    assert shapes.EMOJI_SD["cross_attention_dim"] and not any(name.startswith("_") for name in shapes.EMOJI_SD)
