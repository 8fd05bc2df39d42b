"""Named cases of LoRAs, IP-Adapters and embeddings: after each refusal the pipeline draws the same bits."""

from tests.fuzz.cases import Case
from tests.fuzz.named import embeddings, loras
from tests.fuzz.named.image_prompts import ip_adapters
from tests.fuzz.named.making import DONE, EITHER, REFUSED, Named


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
