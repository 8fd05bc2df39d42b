"""Named cases of LoRAs, IP-Adapters and embeddings: after each refusal the pipeline draws the same bits."""

from tests.fuzz.cases import Case
from tests.fuzz.named import embeddings, loras, pictures
from tests.fuzz.named.image_prompts import ip_adapters
from tests.fuzz.named.making import DONE, EITHER, REFUSED, Named, call


def _ends(sound: bool, hostile: bool) -> str:
    return DONE if sound else REFUSED if hostile else EITHER


NAMED: Named = {
    f"a LoRA: {form}": (
        [Case("sd1", (("lora", form, "500"),), "library", "adapters")],
        _ends(form in loras.SOUND, form in loras.HOSTILE),
    )
    for form in loras.FORMS
}
NAMED |= {
    f"an embedding: {form}": (
        [Case("sd1", (("embedding", form, "2", str(embeddings.WIDTH)),), "library", "adapters")],
        _ends(form in embeddings.SOUND, form in embeddings.REFUSED),
    )
    for form in embeddings.FORMS
}
NAMED |= {
    f"an IP-Adapter: {form}": (
        [Case("sd1", (("ip_adapter", form, "500"),), "library", "adapters")],
        _ends(form in ip_adapters.SOUND, form in ip_adapters.HOSTILE),
    )
    for form in ip_adapters.FORMS
}


def _prompted(encoder: str, picture: str = "RGB") -> list[Case]:
    """Return the case of an image prompt in the command."""
    edits = ("ip_adapter", "plain", "0"), ("image_encoder", encoder), ("picture", picture, "16", "24", pictures.PROMPT)
    return [Case("sd1", edits, "command", "sample", pictures.OF_PROMPTS)]


NAMED |= {
    f"an image encoder: {form}": (
        _prompted(form),
        _ends(form in ("sound", "half"), form in ip_adapters.REFUSED_ENCODERS),
    )
    for form in ip_adapters.ENCODERS
}
NAMED |= {
    f"a picture for an IP-Adapter: {form}": (_prompted("sound", form), _ends(form == "LAB", form in pictures.REFUSED))
    for form in ("LAB", "NaN", "EPS", "half", "bomb", "nothing")
}
NAMED |= {
    f"an image prompt: {form} for {place}": call("library", "image prompt", ends, "bare", place=place, form=form)
    for place, form, ends in (
        ("first", "NaN", DONE),
        ("first", "meta", REFUSED),
        ("list", "itself", REFUSED),
        ("all", "control characters", REFUSED),
    )
}
