"""Named cases of single files: each ends with one line."""

from tests.fuzz.cases import Case
from tests.fuzz.named import controls
from tests.fuzz.named.hostile_files import CONTENTS
from tests.fuzz.named.making import DONE, REFUSED, Named

NAMED: Named = {
    f"a single file: {how}": (
        [Case("sd1", (("single", how, "500"),), "command", "sample file")],
        DONE if how == "sound" else REFUSED,
    )
    for how in CONTENTS
    if how != "metadata that is a list"
}
NAMED |= {
    f"a file of a ControlNet: {form}": (
        [Case("sd1", (("controlnet", "sound"), ("control_file", form)), "library", "control")],
        REFUSED if controls.file_must_be_refused(form) else DONE,
    )
    for form in controls.CONTENTS
}
