"""A case: a kind of folder, edits of it, and a call through a door. A case is text, so that it can be reproduced."""

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from unittest import mock

from huggingface_hub import constants
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider

from tests.fuzz import edits, folders, pickles, tabs, text_edits
from tests.fuzz.doors import command, library, page, server, tab
from tests.fuzz.doors.outcomes import Options, Outcome
from tests.fuzz.edits import Edit
from tests.fuzz.named import controls, embeddings, hostile_files, loras, pictures, syntax
from tests.fuzz.named.image_prompts import ip_adapters, live
from tests.fuzz.values import CONDITIONS, JSON, LEADING_OUT, OBJECTS, OF_PROMPTS, PLAIN, PNG_KEYS, TEXTS, WORDS
from tests.fuzz.watch import watching

KEPT, MEMORY, ROOM = "case.json", "/dev/shm", 2**28  # next to a kept case's folder; bytes that must be free there
BESIDE = ("w", "w.safetensors", "w.bin", "config.json", "model_index.json")  # files that no case may open


@dataclass(frozen=True)
class Case:
    """A kind of folder, edits, a door, what to call there, and (argument, name of a value) pairs."""

    kind: str
    edits: tuple[Edit, ...]
    door: str
    what: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, text: str) -> "Case":
        content = json.loads(text)
        content |= {name: tuple(map(tuple, content[name])) for name in ("edits", "options")}
        return cls(**content)

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@contextmanager
def made(case: Case) -> Iterator[Path]:
    """Yield the case's model folder, base/case/model, next to the files in base/beside, which no case may open."""
    base = _new_folder("fuzz-")
    try:
        folder = base / "case" / "model"
        (base / "case" / "out").mkdir(parents=True)
        (base / KEPT).write_text(case.to_json())
        folders.copy(case.kind, _originals(), folder)
        (base / "beside").mkdir()
        for name in BESIDE:
            os.link(_sentinel(), base / "beside" / name)
        edits.apply(case.edits, folder)
        yield folder
    finally:
        shutil.rmtree(base, ignore_errors=True)


def run(case: Case, folder: Path) -> Outcome:
    """Run the case through its door, and check every promise."""
    prepare(case.door, case.what)
    with watching(folder.parent, folder.parent.parent / "beside") as broken:
        outcome = DOORS[case.door](folder, case.what, case.options)
    outcome.problems += broken
    wrong = [edit for edit in case.edits if edits.must_be_refused(edit)]
    if outcome.is_done and (case.door, case.what) in DRAWING and len(case.edits) == 1 and wrong:
        outcome.problems.append(f"drawn in spite of {wrong[0]}")
    if any(edit[0] in edits.OF_WEIGHTS for edit in case.edits):  # damaged weights may amplify rounding
        outcome.problems = [problem for problem in outcome.problems if problem != command.NOT_WITHIN]
    return outcome


DOORS: dict[str, Callable[[Path, str, Options], Outcome]] = {
    "command": command.call,
    "library": library.call,
    "page": page.call,
    "server": server.call,
    "tab": tab.call,
}
DRAWING = {("command", "sample"), ("command", "from"), ("command", "sample file"), ("page", "generate")}
DRAWING |= {("library", "pipeline"), ("library", "adapters"), ("page", "image prompt")}


@cache
def _originals() -> Path:
    folder = _new_folder("fuzz-kinds-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _new_folder(prefix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_place()))


@cache
def _place() -> str | None:
    """Return a folder in memory if it has room, because removing a case's folders from a disk takes longer than a case.

    All folders of a process are in one place, because their files are hard links.
    """
    has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM
    return MEMORY if has_room else None


@cache
def prepare(door: str, what: str) -> None:
    """Disable the network, and run a sound folder through the door once.

    The first run imports and builds more files than a case may read and write.
    """
    constants.HF_HUB_OFFLINE = True
    for name in folders.MODELS if what == "accelerate" else ():
        library.theirs(name)
    with made(Case("plain", (), door, what)) as folder:
        DOORS[door](folder, what, ())


@cache
def _sentinel() -> Path:
    path = _originals() / "sentinel"
    path.write_text("no case may open this")
    return path


def keep(folder: Path, place: Path) -> None:
    """Copy a case's base folder into `place`."""
    base = folder.parents[1]
    shutil.copytree(base, place / base.name, symlinks=True, copy_function=_copy, dirs_exist_ok=True)


def _copy(source: str, target: str) -> None:
    if os.path.isfile(source):  # reading a pipe would block
        shutil.copyfile(source, target)


# -- the strategies --

_SAMPLE = """--label --num-images --seed --steps --scheduler --eta --cfg-scale --dtype --batch-size --variant --revision
    --height --width --prompt --prompt-file --styles --style --negative-prompt --clip-skip
    --horizon --device --out --grid --overwrite --resume --nothing"""
_FROM = "--label --seed --num-images --variant --scheduler --grid --horizon --prompt --height --models-dir"
ANYWHERE = ("--out", "--grid", "--prompt-file", "--styles")  # flags whose file may be in any folder
FLAGS = {  # by command
    "sample": _SAMPLE.split(),
    "from": _FROM.split(),
    "info": ["--json", "--nothing"],
    "models": ["", "--nothing"],
    "verify": ["--steps", "--json", "--variant", "--revision", "--device"],
    "bench": ["--batch-size", "--height", "--width", "--dtype", "--precision", "--variant", "--revision", "--device"],
    "explain": ["--label", "--batch-size", "--json", "--scheduler", "--horizon"],
}
ALONE = ("--overwrite", "--resume", "--json")
_DRAWN = """num_inference_steps num_images seed class_labels guidance_scale eta batch_size height width generator
    latents output_type use_clipped_model_output nothing"""
_PLANNED = "horizon conditions sort_by_value n_guide_steps"
_LOADED = ["pretrained_model_name_or_path", "device", "dtype", "variant", "revision", "token", "local_files_only"]
_PAGE = "model label seed num_images steps scheduler eta guidance_scale width height batch_size"
_PAGE += " control control_image canny_low control_scale ip_adapter ip_adapter_image ip_adapter_scale"
ARGUMENTS = {
    ("library", "pipeline"): [*_DRAWN.split(), *_PLANNED.split()],
    ("library", "load"): [*_LOADED, "scheduler"],
    ("library", "model"): ["sample", "timestep", "class_labels", "return_dict", "nothing"],
    ("library", "load model"): [*_LOADED, "subfolder"],
    ("library", "config"): [],  # the options of the model's class
    ("library", "scheduler"): [*library.STEP, *folders.SCHEDULER, "num_inference_steps", "device", "timestep_spacing"],
    ("library", "accelerate"): ["model", "sample", "timestep", "class_labels"],
    ("page", "generate"): _PAGE.split(),
}
FITTING = {  # values that a planner accepts, or almost
    "conditions": [*CONDITIONS, *["{0: [0.5]}", "the last values", "rows"] * 20],
    "horizon": ["2", "8", "64"],
    "sort_by_value": ["True"],
    "latents": ["trajectories", "one trajectory", "no horizon"],
    "seed": ["2", "[0, 1]"],
}
PNG_CALLS = {("command", "from"), ("command", "info"), ("page", "upload")}


@cache
def _files(kind: str) -> dict[str, tuple[str, ...]]:
    """Return the files of a kind's folder, with the options of the JSON files."""
    with made(Case(kind, (), "", "")) as folder:
        found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        return {name: _options(path) if name.endswith(".json") else () for name, path in found.items()}


def _options(path: Path) -> tuple[str, ...]:
    content = json.loads(path.read_bytes())
    more = folders.CONFIG_OPTIONS.get(content.get("_class_name"), "unknown").split()
    return tuple(dict.fromkeys([*content, *more]))


def folder_edits(kind: str) -> st.SearchStrategy[Edit]:
    """Return edits of the files of a kind, equally many for each of its folders."""
    parts: dict[str, list[str]] = {}
    for name in _files(kind):
        parts.setdefault(os.path.dirname(name), []).append(name)
    a_file = st.sampled_from(sorted(parts.values())).flatmap(st.sampled_from)
    return a_file.flatmap(lambda name: _file_edits(kind, name))


@cache
def _file_edits(kind: str, name: str) -> st.SearchStrategy[Edit]:
    """Return edits of one file of a kind."""
    files, place = _files(kind), st.integers(0, 1000).map(str)
    a_value = st.sampled_from(PLAIN) | st.sampled_from(sorted(JSON))

    def edit(what: str, *words: Iterable[str] | st.SearchStrategy[str]) -> st.SearchStrategy[Edit]:
        told = [each if isinstance(each, st.SearchStrategy) else st.sampled_from(sorted(each)) for each in words]
        return st.tuples(st.just(what), st.just(name), *told)

    kinds = [
        edit("strange", edits.STRANGE),
        edit("swapped", files),
        edit("flip", place, map(str, range(8))),
        edit("truncate", place),
        edit("append", ["1", "8", "4096"]),
    ]
    if name.endswith((".json", ".txt", ".jinja")):
        kinds.append(edit("encoded", text_edits.ENCODINGS))
    if name.endswith(".json"):
        way = st.lists(st.integers(0, 1000), min_size=2, max_size=5).map(lambda steps: ".".join(map(str, steps)))
        an_option = edit("option", files[name], a_value)
        inside = edit("within", way, a_value | st.just(text_edits.GONE))
        kinds += [*[an_option] * 3, *[inside] * 3, edit("no_option", files[name]), edit("whole", a_value)]
    if name.endswith("index.json") and name != "model_index.json":
        kinds.append(edit("shard", text_edits.SHARDS))
    if name.endswith((".safetensors", ".bin")):
        kinds += [edit("tensor", edits.TENSORS, place)] * 2
        is_safe = name.endswith(".safetensors")
        kinds.append(
            edit("header", edits.HEADERS) if is_safe else edit("pickled", [*pickles.CONTENTS, *pickles.OTHERS])
        )
    if name.endswith(("/vocab.json", "/tokenizer.json")):
        kinds += [edit("vocabulary", text_edits.VOCABULARIES)] * 4
    if name.endswith(("/merges.txt", "/tokenizer.json")):
        kinds += [edit("merges", text_edits.MERGES)] * 4
    return st.one_of(kinds)


def png_edits() -> st.SearchStrategy[Edit]:
    """Return edits that write a PNG, for the page's upload, `info` and `sample --from`."""
    one = st.tuples(st.just("settings"), st.sampled_from(PNG_KEYS), st.sampled_from([*sorted(JSON), text_edits.GONE]))
    # users may name a file in any folder, also in a PNG
    inside = one.filter(
        lambda edit: not (edit[1] in ("model", "config", "vae", "image_encoder") and edit[2] in LEADING_OUT)
    )
    return st.one_of(inside, st.tuples(st.just("chunk"), st.sampled_from(edits.CHUNKS)))


@st.composite
def folder_cases(draw: st.DrawFn, kind: str) -> Case:
    """Edited folders with calls that every folder supports."""
    door, what = draw(st.sampled_from(folders.calls_of(kind)))
    flags = folders.SMALL if kind == "z-image" and what in ("sample", "bench") else ()
    if kind == "z-image" and what == "sample" and draw(st.booleans()):
        edited, more = draw(loras.of_captions() | pictures.of_captions())
        return Case(kind, edited, door, what, (*flags, *more))
    return Case(kind, tuple(draw(st.lists(folder_edits(kind), min_size=1, max_size=2))), door, what, flags)


@st.composite
def png_cases(draw: st.DrawFn) -> Case:
    door, what = draw(st.sampled_from(sorted(PNG_CALLS)))
    flags = draw(_flags(what, 1)) if door == "command" else ()
    return Case(draw(st.sampled_from(["attention", "attention", "policy"])), (draw(png_edits()),), door, what, flags)


@st.composite
def command_cases(draw: st.DrawFn) -> Case:
    """Sound folders with unsound command lines."""
    what = draw(st.sampled_from([*["sample"] * 12, "models", "models", "verify", "explain", "bench"]))
    return Case(
        draw(st.sampled_from(sorted({*folders.KINDS} - {"z-image"}))), (), "command", what, draw(_flags(what, 3))
    )


def _flags(what: str, most: int) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    words = st.sampled_from(sorted(WORDS))
    # users may write pictures to, and read prompts from, any folder
    inside = words.filter(lambda word: word not in LEADING_OUT)
    flag = st.one_of(
        st.tuples(st.sampled_from(FLAGS[what]), words).filter(lambda pair: pair[0] not in ANYWHERE),
        st.tuples(st.sampled_from(FLAGS[what]), inside),
    ).map(lambda pair: (pair[0], command.NO_VALUE) if pair[0] in ALONE else pair)
    return st.lists(flag, max_size=most).map(tuple)


@st.composite
def call_cases(draw: st.DrawFn) -> Case:
    """Sound folders with odd arguments of the library and of the page's API."""
    kind = draw(st.sampled_from(sorted({*folders.KINDS} - {"z-image"})))
    door, what = draw(st.sampled_from(sorted(ARGUMENTS)))
    return Case(kind, (), door, what, draw(_arguments(kind, door, what)))


@st.composite
def _arguments(draw: st.DrawFn, kind: str, door: str, what: str) -> tuple[tuple[str, str], ...]:
    """Draw one or two arguments of a call, and their values."""
    config = folders.KINDS[kind].config
    known = ARGUMENTS[door, what] or [*config, *folders.CONFIG_OPTIONS[config["_class_name"]].split()]
    names = draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
    values = sorted(OBJECTS.keys() - CONDITIONS.keys())
    if "pretrained_model_name_or_path" in names or "model" in names:
        values = [value for value in values if value != "path"]  # users may name a model in any folder
    return tuple((name, draw(st.sampled_from(values))) for name in names)


@st.composite
def plan_cases(draw: st.DrawFn) -> Case:
    """Sound planners, called with at most one grossly wrong argument."""
    kind = draw(st.sampled_from(folders.PLANNERS))
    if draw(st.integers(0, 4)) == 4:
        return Case(kind, (), "command", "sample", (("--horizon", draw(st.sampled_from(sorted(WORDS)))),))
    fitting = draw(st.lists(st.sampled_from(sorted(FITTING)), max_size=3, unique=True))
    wrong = draw(st.lists(st.sampled_from([*_PLANNED.split(), "num_images", "generator", "output_type"]), max_size=1))
    options = {name: draw(st.sampled_from(FITTING[name])) for name in fitting}
    options |= {name: draw(st.sampled_from(sorted(OBJECTS))) for name in wrong}
    return Case(kind, (), "library", "pipeline", tuple(options.items()))


@st.composite
def text_cases(draw: st.DrawFn) -> Case:
    """Sound text-to-image pipelines, called with at most one grossly wrong argument."""
    fitting = draw(st.lists(st.sampled_from(sorted(OF_PROMPTS)), max_size=4, unique=True))
    options = {name: draw(st.sampled_from(OF_PROMPTS[name])) for name in fitting}
    wrong = draw(st.lists(st.sampled_from([*OF_PROMPTS, "class_labels", "timesteps", "eta", "nothing"]), max_size=1))
    values = sorted(TEXTS) * 2 + sorted(OBJECTS.keys() - CONDITIONS.keys())
    options |= {name: draw(st.sampled_from(values)) for name in wrong}
    return Case(draw(st.sampled_from(folders.OF_PROMPTS)), (), "library", "pipeline", tuple(options.items()))


@st.composite
def style_cases(draw: st.DrawFn) -> Case:
    """Files of styles, applied to a prompt."""
    sound = st.sampled_from(["#x,", "0,a,b", 'y,"a\nb",', ",,", "", "cat,{prompt},"])
    line = st.one_of(sound, sound, st.sampled_from(["x,", "y,a,b,c", '"y']) | st.text(max_size=8))
    head = st.sampled_from([edits.STYLES_HEAD] * 4 + ["name,text", "name;prompt", "name", ""])
    content = "\n".join([draw(head), "x,{prompt} of a cat,dog", *draw(st.lists(line, max_size=2))])
    name = draw(st.sampled_from(["x"] * 4 + ["0", "nothing", "long"]))
    return Case("sd1", (("styles", content),), "command", "sample", (("--styles", "styles"), ("--style", name)))


GROUPS: dict[str, st.SearchStrategy[Case]] = {
    "png": png_cases(),
    "command": command_cases(),
    "call": call_cases(),
    "plan": plan_cases(),
    "text": text_cases(),
    "styles": style_cases(),
    "dropped": (tabs.dropped() | tabs.dropped() | tabs.dropping(png_edits())).map(lambda drawn: Case("bare", *drawn)),
    "history": tabs.clicks().map(lambda drawn: Case("bare", *drawn)),
    "files": hostile_files.loaded().map(lambda drawn: Case("sd1", *drawn)),
    **{
        kind.__name__.split(".")[-1]: kind.loaded(edits.HEADERS).map(lambda drawn: Case("sd1", *drawn))
        for kind in (embeddings, loras, controls, ip_adapters)
    },
    "syntax": syntax.called().map(lambda drawn: Case(drawn[0], (), "library", "weighted", drawn[1])),
    "image_prompts": live.calls().map(lambda drawn: Case("bare", *drawn)),
    "http": server.requests().map(lambda drawn: Case("bare", *drawn)),
    "tags": syntax.tagged().map(lambda drawn: Case("sd1", *drawn)),
    "pictures": pictures.loaded().map(lambda drawn: Case("sd1", *drawn)),
    **{kind: st.deferred(lambda kind=kind: folder_cases(kind)) for kind in folders.KINDS},
}


def explore(group: str, count: int, start: int, take: Callable[[Case], None]) -> None:
    """Draw about `count` cases of a group with the seed `start`, and pass each to `take`.

    The cases depend on nothing else: Hypothesis may not draw constants from the source of the imported modules.
    """

    @seed(start)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(GROUPS[group])
    def each(case: Case) -> None:
        take(case)

    with mock.patch.object(HypothesisProvider, "_maybe_draw_constant", return_value=None):
        each()
