"""A tiny text U-Net, the arguments of a call of it, and the comparison with diffusers."""

import torch

SD = {  # a tiny version of SD1.x
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "layers_per_block": 2,
    "norm_num_groups": 8,
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
KEYS = 7  # tokens of the text


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = (ours - theirs).abs().max().item()
    assert error <= 1e-4
    assert error <= 2e-5 * max(1, theirs.abs().max().item())


def inputs(config: dict, n: int = 2, height: int = 8, width: int = 12) -> tuple[tuple, dict]:
    """Return the positional and keyword arguments for a model of `config`. The sample is not square."""
    torch.manual_seed(1)
    cross = config["cross_attention_dim"]
    text_width = config.get("encoder_hid_dim") or (cross if isinstance(cross, int) else cross[0])
    addition, projection = config.get("addition_embed_type"), config.get("encoder_hid_dim_type")
    channels = config.get("in_channels", 4) - 4 * (addition == "image_hint")
    given = torch.randn(n, channels, height, width), torch.arange(n) * 390 + 7
    options: dict = {}
    projected = config.get("projection_class_embeddings_input_dim", 0)
    temb = config.get("time_embedding_dim") or 4 * config["block_out_channels"][0]
    labels = {
        "timestep": torch.linspace(10, 400, n),
        "identity": torch.randn(n, temb),
        "projection": torch.randn(n, projected),
        "simple_projection": torch.randn(n, projected),
    }
    if config.get("class_embed_type"):
        options["class_labels"] = labels[config["class_embed_type"]]
    elif "num_class_embeds" in config:
        options["class_labels"] = torch.arange(n) % config["num_class_embeds"]
    added = {}
    if addition == "text_time":
        added["text_embeds"] = torch.randn(n, projected - 48)
        added["time_ids"] = torch.tensor([[64.0, 48, 0, 3, 64, 64]]).repeat(n, 1)
    if addition == "text_image":
        added["text_embeds"] = torch.randn(n, cross)
    if addition == "text_image" or projection == "text_image_proj":
        added["image_embeds"] = torch.randn(n, cross)
    elif addition in ("image", "image_hint") or projection == "image_proj":
        added["image_embeds"] = torch.randn(n, config["encoder_hid_dim"])
    if addition == "image_hint":
        added["hint"] = torch.rand(n, 3, 8 * height, 8 * width)
    if added:
        options["added_cond_kwargs"] = added
    if "time_cond_proj_dim" in config:
        options["timestep_cond"] = torch.randn(n, config["time_cond_proj_dim"])
    return (*given, torch.randn(n, KEYS, text_width)), options


def compare(theirs, ours, given, options) -> None:
    with torch.no_grad():
        expected = theirs(*given, **options).sample
    assert_close(ours(*given, **options).sample, expected)
