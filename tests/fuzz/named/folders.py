"""Named cases of folders that draw from labels, or draw trajectories."""

from tests.fuzz.cases import Case
from tests.fuzz.named.making import (
    DENOISER,
    DONE,
    EITHER,
    PNG_DOORS,
    REFUSED,
    THREE,
    VAE_CONFIG,
    VALUES_CONFIG,
    WEIGHTS,
    Named,
    call,
    config,
    everywhere,
    flags,
    scheduler,
    weights,
)

VAE: Named = {
    "a VAE without a tensor": everywhere(
        "dit-vae", ("tensor", f"vae/{WEIGHTS}", "missing", "500"), doors=(*THREE, ("command", "verify"))
    ),
    "use_post_quant_conv turned": everywhere(
        "dit-vae", ("option", VAE_CONFIG, "use_post_quant_conv", "false"), doors=(*THREE, ("command", "verify"))
    ),
    "use_quant_conv turned": everywhere("dit-vae", ("option", VAE_CONFIG, "use_quant_conv", "false")),
    "the VAE's act_fn null": everywhere("dit-vae", ("option", VAE_CONFIG, "act_fn", "null")),
    "the VAE's scaling_factor 0": everywhere("dit-vae", ("option", VAE_CONFIG, "scaling_factor", "0")),
    "the VAE's scaling_factor a text": everywhere("dit-vae", ("option", VAE_CONFIG, "scaling_factor", '"x"')),
}
OPTIONS: Named = {
    "act_fn null": config("act_fn", "null"),
    "norm_num_groups -1": config("norm_num_groups", "-1"),
    "norm_num_groups {}": config("norm_num_groups", "{}"),
    "down_block_types [1, 2]": config("down_block_types", "numbers"),
    "freq_shift [1]": config("freq_shift", "[1]"),
    "norm_eps null": config("norm_eps", "null"),
    "norm_eps -1": config("norm_eps", "-1"),
    "mid_block_scale_factor {}": config("mid_block_scale_factor", "{}"),
    "attention_head_dim x": config("attention_head_dim", '"x"', "attention"),
    "attention_head_dim 0": config("attention_head_dim", "0", "attention"),
    "out_channels 10^400": config("out_channels", "10^400"),
    "center_input_sample x": config("center_input_sample", '"x"'),
    "mid_block_type unknown": config("mid_block_type", '"x"'),
    "5,000 digits in the denoiser's config": config("sample_size", "5,000 digits"),
    "5,000 digits in a transformer's config": config("num_layers", "5,000 digits", "dit"),
    "_class_name []": everywhere("plain", ("option", DENOISER, "_class_name", "[]")),
    "_class_name of the pipeline []": everywhere("plain", ("option", "model_index.json", "_class_name", "[]")),
    "_class_name of the scheduler []": everywhere(
        "plain", ("option", "scheduler/scheduler_config.json", "_class_name", "[]"), ends=EITHER
    ),
    "steps_offset 10^400": scheduler("steps_offset", "10^400"),
    "steps_offset 10^18": scheduler("steps_offset", "10^18"),
    "_use_default_values null": everywhere(
        "plain", ("option", "scheduler/scheduler_config.json", "_use_default_values", "null"), ends=EITHER
    ),
    "5,000 digits in the scheduler's config": scheduler("steps_offset", "5,000 digits"),
    "5,000 digits in model_index.json": everywhere("plain", ("option", "model_index.json", "_x", "5,000 digits")),
    "5,000 digits in fastdiff.json": everywhere("attention", ("option", "fastdiff.json", "null_label", "5,000 digits")),
    "5,000 digits in an index": everywhere(
        "skip", ("option", f"unet/{WEIGHTS}.index.json", "metadata", "5,000 digits")
    ),
    "5,000 digits in a safetensors header": everywhere("plain", ("header", f"unet/{WEIGHTS}", "metadata")),
}
BOUNDS: Named = {
    "num_class_embeds 10^9": config("num_class_embeds", "10^9"),
    "num_embeds_ada_norm 10^9": config("num_embeds_ada_norm", "10^9", "dit"),
    "num_train_timesteps 10^9": scheduler("num_train_timesteps", "10^9"),
    "num_train_timesteps 10^9 of a table": config("num_train_timesteps", "10^9", "learned"),
    "num_layers 10^9": config("num_layers", "10^9", "dit"),
    "layers_per_block 10^9": config("layers_per_block", "10^9"),
    "sample_size 10^9": config("sample_size", "10^9"),
    "sample_size 10^9 of a transformer": config("sample_size", "10^9", "dit"),
    "layers_per_block 10^9 of the VAE": everywhere("dit-vae", ("option", VAE_CONFIG, "layers_per_block", "10^9")),
    "nested deeply": everywhere("plain", ("option", DENOISER, "_x", "very deep")),
    **{
        f"{file}: {how}": everywhere("attention", ("strange", file, how), doors=(*THREE, ("command", "models")))
        for file in (DENOISER, "model_index.json", "fastdiff.json")
        for how in ("pipe", "endless", "giant", "folder")
    },
    **{f"weights: {how}": everywhere("plain", ("strange", f"unet/{WEIGHTS}", how)) for how in ("pipe", "endless")},
    **{f"--variant {value}": flags(("--variant", value)) for value in ("path", "absolute", "**", "*", "NUL")},
    **{
        f"a PNG's variant {value}": (
            [Case("attention", (("settings", "variant", value),), *door) for door in PNG_DOORS],
            REFUSED,
        )
        for value in ("path", "absolute", "pattern")
    },
    **{
        f"a shard {name}": everywhere("skip", ("shard", f"unet/{WEIGHTS}.index.json", name))
        for name in ("outside", "absolute", "folder", "itself", "NUL", "number")
    },
}
PLANNERS: Named = {
    **{
        f"{option} {value} of a planner": config(option, value, "policy")
        for option, value in (
            ("sample_size", "10^9"),
            ("sample_size", "[1]"),
            ("sample_rate", "-1"),
            ("extra_in_channels", "-1"),
            ("extra_in_channels", "10^9"),
            ("time_embedding_type", "null"),
            ("use_timestep_embedding", "false"),
            ("use_timestep_embedding", "1"),
            ("freq_shift", "NaN"),
            ("freq_shift", "4"),
            ("down_block_types", '["DownBlock1D", "DownBlock1D"]'),
            ("down_block_types", "numbers"),
            ("up_block_types", "[]"),
            ("up_block_types", '["UpResnetBlock1D", "UpResnetBlock1D", "UpResnetBlock1D"]'),
            ("mid_block_type", "null"),
            ("mid_block_type", '"ValueFunctionMidBlock1D"'),
            ("out_block_type", '"ValueFunction"'),
            ("out_block_type", "{}"),
            ("block_out_channels", "[8]"),
            ("block_out_channels", "[8, 12]"),
            ("block_out_channels", "[8, 0]"),
            ("act_fn", "null"),
            ("norm_num_groups", "0"),
            ("norm_num_groups", "3"),
            ("layers_per_block", "-1"),
            ("layers_per_block", "10^9"),
            ("downsample_each_block", "true"),
            ("out_channels", "5,000 digits"),
        )
    },
    "a planner that says it is another model": everywhere(
        "policy", ("option", DENOISER, "_class_name", '"UNet2DModel"')
    ),
    "time_embedding_dim odd": config("time_embedding_dim", "3", "fourier-policy"),
    "a planner of values": everywhere(
        "planner", ("option", VALUES_CONFIG, "out_block_type", "null"), doors=(*THREE, ("command", "verify"))
    ),
    "a value function of other channels": everywhere(
        "planner", ("option", VALUES_CONFIG, "in_channels", "6"), doors=(*THREE, ("command", "verify"))
    ),
    "a value function without a tensor": everywhere(
        "planner", ("tensor", f"value_function/{WEIGHTS}", "missing", "500"), doors=(*THREE, ("command", "verify"))
    ),
    **{
        f"a value function: {how}": everywhere(
            "planner", ("strange", VALUES_CONFIG, how), doors=(*THREE, ("command", "verify"))
        )
        for how in ("pipe", "endless", "giant", "gone")
    },
    "a planner that does not say its horizon": everywhere("policy", ("option", DENOISER, "sample_size", "65536")),
    "a planner of a horizon that it cannot plan": everywhere("policy", ("option", DENOISER, "sample_size", "3")),
    **{
        f"--horizon {word}": ([Case("policy", (), "command", "sample", (("--horizon", word),))], ends)
        for word, ends in (
            ("0", REFUSED),
            ("1", REFUSED),
            ("2", DONE),
            ("-1", REFUSED),
            ("1.9", REFUSED),
            ("10^9", REFUSED),
            ("5,000 digits", REFUSED),
        )
    },
    "--horizon of pictures": flags(("--horizon", "8")),
    "a PNG's horizon": (
        [Case("policy", (("settings", "horizon", value),), "command", "from") for value in ("-1", '"x"', "10^9")],
        REFUSED,
    ),
    **{
        f"conditions={value}": call("library", "pipeline", kind="planner", conditions=value)
        for value in (
            "[0, 1]",
            "{8: [0.5]}",
            "{-1: [0.5]}",
            "{10^400: [0.5]}",
            "{True: [0.5]}",
            "{nan: [0.5]}",
            "{0: [nan]}",
            "{0: long range}",
            "{0: sparse}",
            "{0: meta}",
            "{0: a giant view}",
            "{0: giant rows}",
            "{0: ragged}",
            "too many channels",
        )
    },
    "conditions=rows": call("library", "pipeline", DONE, "planner", conditions="rows", sort_by_value="True"),
    "sort_by_value": call("library", "pipeline", DONE, "planner", sort_by_value="True"),
    "sort_by_value without a value_function": call("library", "pipeline", kind="policy", sort_by_value="True"),
    "sort_by_value=1": call("library", "pipeline", kind="planner", sort_by_value="1"),
    "sort_by_value at a long horizon": call("library", "pipeline", kind="planner", sort_by_value="True", horizon="64"),
    "horizon=10^9": call("library", "pipeline", kind="policy", horizon="10^9"),
    "horizon=a giant view": call("library", "pipeline", kind="policy", horizon="{0: a giant view}"),
    "horizon of pictures": call("library", "pipeline", horizon="8"),
    "n_guide_steps=2": call("library", "pipeline", kind="planner", n_guide_steps="2"),
    "height of trajectories": call("library", "pipeline", kind="policy", height="8"),
    "latents without a horizon": call("library", "pipeline", kind="policy", latents="no horizon"),
}
VERIFY = (("command", "verify"),)
VERIFICATION: Named = {
    "verify: shards of several dtypes": everywhere(
        "skip",
        ("tensor", "unet/diffusion_pytorch_model-00001-of-00002.safetensors", "double", "581"),
        doors=VERIFY,
        ends=DONE,
    ),
    "verify: PNDM": everywhere(
        "plain",
        ("option", "model_index.json", "scheduler", '["diffusers", "PNDMScheduler"]'),
        ("option", "scheduler/scheduler_config.json", "_class_name", '"PNDMScheduler"'),
        doors=VERIFY,
        ends=EITHER,
    ),
    "verify: damaged weights": everywhere("plain", ("truncate", f"unet/{WEIGHTS}", "500"), doors=VERIFY),
    "verify: an index without metadata": everywhere(
        "skip", ("no_option", f"unet/{WEIGHTS}.index.json", "metadata"), doors=VERIFY, ends=EITHER
    ),
    "an index without metadata": everywhere("skip", ("no_option", f"unet/{WEIGHTS}.index.json", "metadata"), ends=DONE),
}
LISTS: Named = {
    f"a list with a bad folder: {'-'.join(edit[1:])}": everywhere("plain", edit, doors=(("page", "models"),), ends=DONE)
    for edit in (
        ("whole", "model_index.json", "5,000 digits"),
        ("strange", DENOISER, "pipe"),
        ("option", DENOISER, "act_fn", "null"),
        ("option", DENOISER, "num_class_embeds", "10^9"),
    )
}
WEIGHT_FILES: Named = {
    **{
        f"a .bin with {how}": weights("k", how)
        for how in ("an int for a key", "None for a key", "sparse", "one sparse")
    },
    **{f"a .bin with {how}": weights("k", how) for how in ("one sparse", "meta", "code", "a number", "quantised")},
    **{f"a .bin that is {how}": weights("k", how) for how in ("a list", "nothing", "a plain pickle")},
    **{f"a .bin that is {how}": weights("k", how) for how in ("compressed", "a giant view")},
    **{f"a .bin of {how}": weights("k", how, DONE) for how in ("the same", "parameters", "an old file")},
    "float8 with NaN": everywhere("plain", ("tensor", f"unet/{WEIGHTS}", "float8 NaN", "500")),
}
NAMED: Named = VAE | OPTIONS | BOUNDS | PLANNERS | VERIFICATION | LISTS | WEIGHT_FILES
