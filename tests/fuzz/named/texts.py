"""Named cases of folders that draw from prompts, and of calls of their pipelines."""

from tests.fuzz.cases import Case
from tests.fuzz.edits import STYLES_HEAD
from tests.fuzz.named.making import DONE, EITHER, REFUSED, Named, call, everywhere, flags

TEXT_DOORS = (("library", "pipeline"), ("command", "verify"))
WHOLE = ("usual", "UNICODE", "whole")  # a dropped picture that is only damaged in its text
NAMED: Named = {
    **{
        f"{file}: {how}": everywhere(kind, ("strange", file, how), doors=TEXT_DOORS)
        for kind, file in (
            ("sd1", "tokenizer/tokenizer.json"),
            ("sdxl", "tokenizer_2/vocab.json"),
            ("sdxl", "tokenizer_2/merges.txt"),
        )
        for how in ("gone", "pipe", "folder", "endless", "giant", "no UTF-8", "empty")
        if (file, how) != ("tokenizer_2/merges.txt", "empty")  # an empty file is valid: no merges
    },
    **{
        f"a tokenizer's {key} {value}": everywhere("sd1", ("option", f"tokenizer/{file}", key, value), doors=TEXT_DOORS)
        for file, key, value in (
            ("tokenizer.json", "model", "null"),
            ("tokenizer.json", "model", '{"vocab": {"a": 1e400}, "merges": []}'),
            ("tokenizer_config.json", "model_max_length", "1"),
            ("tokenizer_config.json", "model_max_length", "10^18"),
            ("tokenizer_config.json", "pad_token", '"missing"'),
            ("tokenizer_config.json", "pad_token", "{}"),
            ("tokenizer_config.json", "bos_token", "{}"),
            ("tokenizer_config.json", "tokenizer_class", '"T5Tokenizer"'),
        )
    },
    "a special token without its text": everywhere(
        "sd2", ("option", "tokenizer/special_tokens_map.json", "eos_token", "{}"), doors=TEXT_DOORS
    ),
    "a vocabulary with an id above its count": everywhere(
        "sdxl", ("vocabulary", "tokenizer_2/vocab.json", "a gap"), doors=TEXT_DOORS
    ),
    "a vocabulary without letters and without a token for them": everywhere(
        *(
            "sd2",
            ("vocabulary", "tokenizer/vocab.json", "no letters and no end"),
            ("merges", "tokenizer/merges.txt", "none"),
        ),
        doors=TEXT_DOORS,
    ),
    "a text encoder of another width": everywhere(
        "sd1", ("option", "text_encoder/config.json", "hidden_size", "64"), doors=TEXT_DOORS
    ),
    "a text encoder without a tensor": everywhere(
        "sdxl", ("tensor", "text_encoder_2/model.safetensors", "missing", "500"), doors=TEXT_DOORS
    ),
    **{
        f"prompt_embeds={value}": call("library", "pipeline", kind="sd1", prompt_embeds=value)
        for value in (
            *("embeds of sdxl", "embeds of no tokens", "no embeds", "embeds without an axis", "whole embeds"),
            *("complex embeds", "float8 embeds", "sparse embeds", "meta embeds", "NaN embeds", "prompt", "None"),
        )
    },
    **{
        f"original_size={value}": call("library", "pipeline", kind="sdxl", original_size=value)
        for value in ("half a size", "size below", "size above", "size of fractions", "prompt", "object")
    },
    "prompt_embeds=double": call("library", "pipeline", DONE, "sd1", prompt_embeds="double embeds"),
    "prompt=odd": call("library", "pipeline", DONE, "sd1", prompt="odd prompt"),
    "prompt=long": call("library", "pipeline", DONE, "sdxl", prompt="long prompt"),
    "prompt_2=array": call("library", "pipeline", kind="sdxl", prompt_2="array"),
    "a prompt beside embeddings": call(
        "library", "pipeline", kind="sd1", prompt="prompt", prompt_embeds="embeds of sd1"
    ),
    "embeddings of several counts": call(
        *("library", "pipeline"), kind="sdxl", prompt_embeds="two embeds of sdxl", pooled_prompt_embeds="pooled"
    ),
    **{
        f"a file of styles {how}": (
            [Case("sd1", (("styles", content),), "command", "sample", (("--styles", "styles"), ("--style", "x")))],
            ends,
        )
        for how, content, ends in (
            ("that is sound", f"{STYLES_HEAD}\nx,the {{prompt}},dog", DONE),
            ("with a name twice", f"{STYLES_HEAD}\nx,a,\nx,b,", REFUSED),
            ("without its column", "name,negative_prompt\nx,a", REFUSED),
            ("with half a surrogate pair", f"{STYLES_HEAD}\nx,\ud800,", REFUSED),
            ("with NUL", f"{STYLES_HEAD}\nx\0,a,", REFUSED),
            ("with an open quote", f'{STYLES_HEAD}\nx,"a', REFUSED),
            ("with a value of 200,000 letters", f"{STYLES_HEAD}\nx,{'a' * 200_000},", REFUSED),
            ("of 5 MB", f"{STYLES_HEAD}\n{'#,,' * 2_000_000}", REFUSED),
        )
    },
    "styles without end": flags(("--prompt", "x"), ("--styles", "endless"), ("--style", "x")),
    "a callback of no dictionary": call(
        "library", "pipeline", kind="sd1", callback_on_step_end="callback without an end"
    ),
    **{
        f"in History, {what}": ([Case("bare", (), "tab", "history", steps)], ends)
        for what, steps, ends in (
            ("a label of half a surrogate pair", (("settings", "label=surrogate"),), DONE),
            ("a page of 400 digits", (("HistoryTab.show", str(10**400)),), DONE),
            ("a page that is a text", (("HistoryTab.following", "x"),), DONE),
            ("a locked index", (("index", "locked"), ("HistoryTab.show", "1")), DONE),
            ("a model that is a number", (("settings", "model=1e-320"), ("HistoryTab.previous", "true")), DONE),
            ("a list of prompts and others", (("settings", "prompt=mixed"), ("HistoryTab.previous", "true")), DONE),
            ("no versions", (("settings", "versions=gone"), ("HistoryTab.previous", "true")), DONE),
            ("a folder that is a loop", (("run", "link"), ("HistoryTab.previous", "NaN")), DONE),
            ("a click on a text", (("Panel.follow.<locals>.show", "Grid"),), DONE),
            (
                "several clicks on no place",
                (("HistoryTab.select_several", "true"), ("HistoryTab.pick", "Grid"), ("HistoryTab.pick", "-0.0")),
                DONE,
            ),
            ("nothing to delete", (("HistoryTab.delete", "0"),), REFUSED),
        )
    },
    "a dropped picture with half a surrogate pair": (
        [
            Case("bare", (("settings", "label", "surrogate"),), "tab", "dropped"),
            Case("bare", (("write_dropped", "PNG", "FOOOCUS", "texts: surrogate", *WHOLE),), "tab", "dropped"),
        ],
        EITHER,
    ),
    **{
        f"of Z-Image, a {callback}": call(
            "library", "pipeline", kind="z-image", callback_on_step_end=callback, height="64", width="64"
        )
        for callback in (
            *("callback without an end", "callback of NaN", "callback of other latents"),
            *("callback of texts", "callback of one state"),
        )
    },
    "a callback of other latents": call(
        "library", "pipeline", kind="sd1", callback_on_step_end="callback of other latents"
    ),
}
