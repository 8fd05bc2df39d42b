"""IP-Adapters on the page: those on offer, the command's bytes, and settings that come back."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastdiff.checkpoints import hub
from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.errors import InputError, NonFiniteError
from fastdiff.hosting.catalogue import Catalogue, ip_adapters
from fastdiff.hosting.models import Models
from fastdiff.models.clip_vision import CLIPVisionModelWithProjection
from fastdiff.pipelines.image_prompts import ImagePrompting
from fastdiff.requests import png
from fastdiff.requests.request import Request
from fastdiff.ui.drawing import Drawn, draw, prepare, write_grid
from fastdiff.ui.inputs.axes import Axes, Axis
from fastdiff.ui.parts.request import UncheckedRequest
from fastdiff.ui.shared import Shared
from fastdiff.ui.sheet import draw_sheet, prepare_sheet
from fastdiff.ui.starting import larger
from tests.ui.history.unserved import upload
from tests.ui.inputs.conftest import ASKED, LIMITS, png_file
from tests.ui.inputs.test_mask import mask_file

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN, PLUS, MOVED, XL = (f"./{name}.safetensors" for name in ("ip/plain", "ip/plus", "other/moved", "other/xl"))
NET, TAB, EVENTS = "./nets/edges", "DrawTab.", "Starting."
FLAGS = ("--ip-adapter", PLAIN, "--ip-adapter-image", "style.png", "--embed-inputs")


@pytest.fixture(scope="module")
def models_dir(prompted_dir) -> Path:
    return prompted_dir


@pytest.fixture(scope="module")
def shared(models_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu"))


@pytest.fixture(scope="module")
def catalogue(shared) -> Catalogue:
    return shared.catalogue


@pytest.fixture
def style(upload_folder) -> dict:
    return upload(png_file((41, 33), seed=3), "style.png")


@pytest.fixture
def copied(models_dir, tmp_path) -> Path:
    """A copy of the folder, which a test may change."""
    return shutil.copytree(models_dir, tmp_path / "models")


def test_those_that_fit_the_model_are_on_offer(catalogue, form):
    sd1, sdxl, labels = map(catalogue.card, ("./text/sd1", "./text/sdxl", "emoji64"))
    assert [*catalogue.ip_adapters.offered(sd1)] == [PLAIN, PLUS, MOVED]
    assert [*catalogue.ip_adapters.offered(sdxl)] == [XL] and not catalogue.ip_adapters.offered(labels)
    data, fields = {field: field.value for field in form.components}, form.ip_adapter.fields
    assert form.ip_adapter.box.visible and not form.ip_adapter.fit(labels, data)[form.ip_adapter.box]["visible"]
    assert form.ip_adapter.fit(sdxl, data | {fields.ip_adapter: PLAIN})[fields.ip_adapter]["value"] == XL
    assert form.ip_adapter.fit(sd1, data | {fields.ip_adapter: PLUS})[fields.ip_adapter]["value"] == PLUS
    asked = {fields.ip_adapter_image: "a.png", fields.ip_adapter_scale: 0.5}
    assert form.request(data | asked).ip_adapter_scale is None
    asked = form.request(data | asked | {fields.ip_adapter: PLAIN})
    assert (asked.ip_adapter, asked.ip_adapter_image, asked.ip_adapter_scale) == (PLAIN, "a.png", 0.5)


def test_the_owner_reads_why_others_are_not(catalogue):
    reasons = {name: reason for name, reason in catalogue.left_out().items() if "nets" not in name}
    assert reasons.keys() == {f"./ip/{name}.safetensors" for name in ("face", "full", "wide")}
    assert "is an IP-Adapter FaceID, which reads embeddings of faces" in reasons["./ip/face.safetensors"]
    assert "is an IP-Adapter Full, which has a token for each patch" in reasons["./ip/full.safetensors"]
    assert "has no image encoder: the folder image_encoder beside it" in reasons["./ip/wide.safetensors"]


def test_the_file_is_the_commands_byte_for_byte(picture, command, style):
    plain = picture().path.read_bytes()
    mine = picture(ip_adapter=PLAIN, ip_adapter_image=style, ip_adapter_scale=0.6)
    files = {"style.png": png_file((41, 33), seed=3)}
    assert mine.path.read_bytes() == command(*FLAGS, "--ip-adapter-scale", "0.6", files=files).read_bytes()
    own = {"ip_adapter": [PLAIN], "ip_adapter_image": ["style.png"], "ip_adapter_scale": [0.6]}
    assert mine.record | own == mine.record
    assert png.read_input(mine.path, "ip-adapter-image") == files["style.png"]
    assert picture().path.read_bytes() == plain, "the next run has none"


def test_a_run_finds_its_model_once(picture, style, monkeypatch):
    """In between, runs of other models may put the model out of memory."""
    found, load = [], Models._load
    monkeypatch.setattr(Models, "_load", lambda *args: found.append(args) or load(*args))
    picture(ip_adapter=PLAIN, ip_adapter_image=style)
    assert len(found) == 1


def test_users_with_other_ip_adapters_draw_at_once(picture, style):
    asked = [{"ip_adapter": name, "ip_adapter_image": style, "steps": 3} for name in (PLAIN, PLUS)]
    alone = [picture(**each).path.read_bytes() for each in asked]
    with ThreadPoolExecutor(4) as users:
        at_once = list(users.map(lambda each: picture(**each).path.read_bytes(), asked * 2))
    assert at_once == alone * 2 and alone[0] != alone[1]


def test_beside_a_controlnet_and_a_start_picture_it_is_the_commands(picture, command, style, apple):
    own = {"control": NET, "control_image": upload(png_file(seed=4), "edges.png"), "init_image": apple, "strength": 0.8}
    mine = picture(ip_adapter=PLUS, ip_adapter_image=style, mask=upload(mask_file(), "mouth.png"), **own)
    flags = ["--control", NET, "--control-image", "edges.png", "--init-image", "apple.png", "--strength", "0.8"]
    flags += ["--mask", "mouth.png", "--ip-adapter", PLUS, *FLAGS[2:]]
    files = {"style.png": png_file((41, 33), seed=3), "edges.png": png_file(seed=4), "mouth.png": mask_file()}
    assert mine.path.read_bytes() == command(*flags, files=files).read_bytes()


@pytest.mark.slow
def test_an_image_encoder_elsewhere_is_found_and_named(picture, command, style):
    mine = picture(ip_adapter=MOVED, ip_adapter_image=style)
    assert mine.record["image_encoder"] == "./ip/image_encoder"
    flags = ["--ip-adapter", MOVED, *FLAGS[2:], "--image-encoder", "./ip/image_encoder"]
    assert mine.path.read_bytes() == command(*flags, files={"style.png": png_file((41, 33), seed=3)}).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "flags"),
    [
        ({"ip_adapter": PLUS, "precision": "int8"}, ["--ip-adapter", PLUS, "--precision", "int8"]),
        (
            {"ip_adapter": XL, "model": "./text/sdxl"},
            ["--ip-adapter", XL, "-m", "./text/sdxl", "--image-encoder", "./ip/image_encoder"],
        ),
    ],
    ids=["int8", "sdxl"],
)
def test_other_models_draw_the_commands_bytes(picture, command, style, asked, flags):
    files = {"style.png": png_file((41, 33), seed=3)}
    mine = picture(ip_adapter_image=style, **asked)
    assert mine.path.read_bytes() == command(*flags, *FLAGS[2:], files=files).read_bytes()


def test_headers_are_read_once(models_dir, monkeypatch):
    catalogue = Catalogue(models_dir)
    card, read = catalogue.card("./text/sd1"), ip_adapters.checked_header
    paths = []
    monkeypatch.setattr(ip_adapters, "checked_header", lambda path: paths.append(path) or read(path))
    assert catalogue.ip_adapters.offered(card) == catalogue.ip_adapters.offered(card)
    assert len(paths) == len(set(paths)) > 3


@pytest.mark.slow
def test_files_that_are_loaded_are_not_read_again(picture, style, models_dir, monkeypatch):
    own, loaded = Shared(Models(models_dir, device="cpu")), []
    encoder, adapter = CLIPVisionModelWithProjection.from_pretrained, ImagePrompting.load_ip_adapter

    def load_encoder(*given, **where):
        loaded.append("encoder")
        return encoder(*given, **where)

    def load_adapter(pipe, files):
        loaded.append(files[0].stem)
        return adapter(pipe, files)

    monkeypatch.setattr(CLIPVisionModelWithProjection, "from_pretrained", load_encoder)
    monkeypatch.setattr(ImagePrompting, "load_ip_adapter", load_adapter)
    asked = {"ip_adapter_image": style, "own": own}
    pictures = [picture(ip_adapter=PLAIN, ip_adapter_scale=scale, **asked).path.read_bytes() for scale in (1, 0.5)]
    plain = picture(own=own).path.read_bytes()
    assert loaded == ["encoder", "plain"]
    pictures.append(picture(ip_adapter=PLUS, **asked).path.read_bytes())
    assert loaded == ["encoder", "plain", "plus"]
    assert picture(ip_adapter=PLAIN, **asked).path.read_bytes() == pictures[0]
    assert len({*pictures, plain}) == 4


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ip_adapter": PLAIN}, "ip_adapter_image: the IP-Adapter reads a picture; drop one, or choose no IP-Adapter"),
        ({"ip_adapter_scale": 0.5}, "ip_adapter_scale: it is for an IP-Adapter; choose one, or leave it out"),
        ({"ip_adapter_image": b""}, "ip_adapter_image: it is for an IP-Adapter; choose one"),
        (
            {"ip_adapter": "/etc", "ip_adapter_image": b""},
            "ip_adapter: '/etc' is not on offer for ./text/sd1; choose one",
        ),
        ({"ip_adapter": "org/x:a.safetensors", "ip_adapter_image": b""}, "'org/x:a.safetensors' is not on offer"),
        ({"ip_adapter": PLAIN, "ip_adapter_image": b"", "model": "emoji64", "prompt": None}, "choose none"),
        ({"ip_adapter": XL, "ip_adapter_image": b""}, f"ip_adapter: {XL}: its tokens have 72 channels, and this model"),
        ({"ip_adapter": "./ip/face.safetensors", "ip_adapter_image": b""}, "is an IP-Adapter FaceID, which reads"),
        ({"ip_adapter": "./ip/full.safetensors", "ip_adapter_image": b""}, "is an IP-Adapter Full, which has a token"),
        (
            {"ip_adapter": "./ip/wide.safetensors", "ip_adapter_image": b""},
            "wide.safetensors has no image encoder: the",
        ),
        ({"ip_adapter": PLAIN, "ip_adapter_image": b"GIF89a"}, "ip-adapter-image 'a.png' is not a picture that PIL"),
        ({"ip_adapter": PLAIN, "ip_adapter_image": "/etc/passwd"}, "ip_adapter_image: this file was not uploaded"),
        ({"ip_adapter": 7}, "ip_adapter: 7 is not a name"),
        ({"ip_adapter": PLAIN, "ip_adapter_scale": float("inf")}, "ip_adapter_scale: inf is not a number from -100"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(shared, upload_folder, asked, message):
    data = asked.get("ip_adapter_image")
    given = upload(data or png_file(), "a.png") if isinstance(data, bytes) else data
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as refusal:
        prepare(UncheckedRequest(**ASKED | asked | {"ip_adapter_image": given}), shared, LIMITS)
    told = str(refusal.value)
    assert "\n" not in told and str(upload_folder) not in told and str(shared.catalogue.folder) not in told
    assert "--" not in told and "image-encoder" not in told


def nan(weights: Path) -> None:
    tensors = load_file(weights)
    name = next(name for name, each in tensors.items() if each.ndim == 2 and each.is_floating_point())
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, weights)


def short(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-100])


def without_a_layer(weights: Path) -> None:
    save_file({name: each for name, each in load_file(weights).items() if "1.to_k_ip" not in name}, weights)


SLOW = (
    ("plain.safetensors", without_a_layer, rf"^{PLAIN} has no ip_adapter.1.to_k_ip.weight; give an IP-Adapter of"),
    ("plain.safetensors", Path.unlink, rf"^{PLAIN} or its image encoder is gone"),
    ("image_encoder/model.safetensors", nan, r"^./ip/image_encoder: NaN or infinity in"),
    ("image_encoder/model.safetensors", short, r"^./ip/image_encoder/model.safetensors "),
)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("plain.safetensors", nan, rf"^{PLAIN}: NaN or infinity in"),
        (
            "image_encoder/config.json",
            Path.unlink,
            rf"^{PLAIN} or its image encoder is gone; reload the page, and choose",
        ),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_a_damaged_file_is_one_line_and_the_next_picture_is_the_same(copied, picture, style, file, damage, message):
    own = Shared(Models(copied, device="cpu"))
    first, asked = picture(own=own, steps=1).path.read_bytes(), {"ip_adapter": PLAIN, "ip_adapter_image": style}
    prompted = prepare(UncheckedRequest(**ASKED, **asked), own, LIMITS)
    damage(copied / "ip" / file)
    with pytest.raises((InputError, NonFiniteError), match=message) as refusal:
        [*draw(prompted, own, copied / "out")]
    assert str(copied) not in str(refusal.value) and "--" not in str(refusal.value)
    assert picture(own=own, steps=1).path.read_bytes() == first
    if "encoder" not in file:
        assert picture(own=own, ip_adapter=PLUS, ip_adapter_image=style).record["ip_adapter"] == [PLUS]


@pytest.mark.slow
def test_grids_and_sheets_hold_the_image_prompt(shared, style, tmp_path):
    data, own = Path(style["path"]).read_bytes(), {"ip_adapter": PLAIN, "ip_adapter_image": style}
    run = prepare(UncheckedRequest(**ASKED | {"num_images": 2}, **own), shared, LIMITS)
    drawn = [each for _, some in draw(run, shared, tmp_path / "run") for each in some]
    sheet = prepare_sheet(UncheckedRequest(**ASKED, **own), Axes(Axis("seed", (1, 2)), None), shared, LIMITS)
    cells = [each for _, some in draw_sheet(sheet, shared, tmp_path / "sheet") for each in some]
    assert png.read_input(cells[-1].path, "ip-adapter-image") == data
    Path(style["path"]).unlink()
    grid = write_grid(run, drawn)
    assert png.read_input(grid, "ip-adapter-image") == data and png.read_settings(grid)["ip_adapter"] == [PLAIN]


@pytest.mark.slow
def test_a_larger_picture_keeps_its_image_prompt(catalogue, picture, style, apple):
    drawn = picture(ip_adapter=PLAIN, ip_adapter_image=style, ip_adapter_scale=0.5)
    asked = larger(drawn, catalogue, LIMITS)
    assert (asked.ip_adapter, asked.ip_adapter_scale, Path(asked.ip_adapter_image).name) == (PLAIN, 0.5, "style.png")
    mask = upload(mask_file(), "mouth.png")
    again = larger(picture(ip_adapter=PLAIN, ip_adapter_image=style, init_image=apple, mask=mask), catalogue, LIMITS)
    assert again.ip_adapter == PLAIN and Path(again.ip_adapter_image).is_file() and again.mask is None


def test_the_settings_of_a_picture_bring_its_image_prompt_back(page, picture, style):
    drawn = picture(ip_adapter=PLUS, ip_adapter_image=style, ip_adapter_scale=0.35, steps=1)
    for event, given in (("use", {}), ("restore", dropped(drawn.path.read_bytes()))):
        if not given:
            page.choose(f"{TAB}{event}", drawn)
        said = page.press(f"{TAB}{event}", given)
        assert "style.png" in said and "not restored" not in said
        assert '"value":0.35' in said and f'"value":"{PLUS}"' in said
    lone = drawn.path.with_name("lone.png")
    lone.write_bytes(png.without_inputs(drawn.path))
    page.choose(f"{TAB}use", Drawn(lone, drawn.record))
    said = page.press(f"{TAB}use")
    assert "not restored: the image prompt style.png, which is not inside lone.png" in said


def dropped(data: bytes) -> dict:
    return {"Drop a picture anywhere to load its settings": upload(data, "d.png")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            ("--ip-adapter", PLUS, "--ip-adapter-image", "apple.png"),
            "plus.safetensors, because the page draws with one IP",
        ),
        (("--ip-adapter-image", "apple.png"), "apple.png, because the page draws with one image prompt"),
    ],
    ids=["two IP-Adapters", "two pictures"],
)
def test_of_several_the_first_comes_back(page, command, more, told):
    files = {"style.png": png_file(seed=3)}
    drawn = command(*FLAGS, *more, "--ip-adapter-scale", "0.7", files=files)
    said = page.press(f"{TAB}restore", dropped(drawn.read_bytes()))
    assert f"Loaded the settings of d.png; not restored: {told}" in said
    assert "style.png" in said and '"value":0.7' in said and f'"value":"{PLAIN}"' in said


@pytest.mark.parametrize("change", ["renamed", "gone"])
def test_an_ip_adapter_is_found_by_its_hash(models_dir, catalogue, change):
    digits = file_hash(models_dir / "ip" / "plus.safetensors") if change == "renamed" else "0" * 64
    record = {"ip_adapter": "/home/me/mine.bin", "ip_adapter_hash": digits, "ip_adapter_scale": 0.5}
    found, lines = catalogue.ip_adapters.here(record, "a.png", catalogue.card("./text/sd1"))
    assert found["ip_adapter"] == (PLUS if change == "renamed" else None)
    assert [*found.values()].count(0.5) == (change == "renamed")
    told = "not restored: the IP-Adapter mine.bin, which is not here by name or hash"
    assert len(lines) == (change != "renamed") and all(line.startswith(told) for line in lines)


@pytest.mark.slow
def test_another_image_encoder_is_told(catalogue, models_dir, picture, style):
    record = png.read_settings(picture(ip_adapter=PLAIN, ip_adapter_image=style).path)
    one = ip_adapters.IPAdapters.first(Request.from_record(record, "a.png"), record)
    card = catalogue.card("./text/sd1")
    assert catalogue.ip_adapters.here(one, "a.png", card)[1] == []
    _, lines = catalogue.ip_adapters.here(one | {"image_encoder_hash": "0" * 64}, "a.png", card)
    digits = file_hash(models_dir / "ip" / "image_encoder" / "model.safetensors")[:10]
    assert lines == [
        f"the image encoder of {PLAIN} is not the file that drew a.png: its hash is {digits}, not {'0' * 10}"
    ]


def test_a_dropped_picture_chooses_an_ip_adapter(page):
    own = {"Image prompt": upload(png_file((48, 40)), "a.png"), "Model": "./text/sd1"}
    said = page.press(f"{EVENTS}begin_image", own)
    assert f"{PLAIN} reads a.png." in said and '"value":48' not in said
    assert f"{PLUS} reads a.png." in page.press(f"{EVENTS}begin_image", own | {"IP-Adapter": PLUS})
    said = page.press(f"{EVENTS}begin_image", own | {"Image prompt": upload(b"no picture", "b.png")})
    assert "Image prompt 'b.png' is not a picture" in said
    said = page.press(f"{EVENTS}begin_image", own | {"Model": "emoji64"})
    assert "IP-Adapter: there is no IP-Adapter for emoji64; choose another model" in said


def test_what_is_gone_leaves_the_form(form, upload_folder):
    there = {"ip_adapter": PLAIN, "ip_adapter_image": upload(png_file(), "a.png")["path"], "ip_adapter_scale": 0.5}
    assert form.known_files(UncheckedRequest("./text/sd1", prompt="", **there)).ip_adapter_scale == 0.5
    for gone in ({"ip_adapter": "./none"}, {"ip_adapter_image": "/etc/passwd"}):
        left = form.known_files(UncheckedRequest("./text/sd1", prompt="", **there | gone))
        assert left.ip_adapter is left.ip_adapter_image is left.ip_adapter_scale is None


def test_compare_says_what_only_draw_has(page, picture, style):
    page.choose("CompareTab.send", picture(ip_adapter=PLAIN, ip_adapter_image=style, ip_adapter_scale=0.5, steps=1))
    assert "Not restored: IP-Adapter, Image prompt, IP-Adapter scale." in page.press("CompareTab.send")


@pytest.mark.slow
def test_one_of_the_hub(models_dir, picture, style, tmp_path, monkeypatch):
    cached = shutil.copytree(models_dir / "ip", tmp_path / "cached" / "models").parent
    monkeypatch.setattr(hub, "_snapshot", lambda repo_id, patterns, **options: cached)
    own, name = Shared(Models(models_dir, allow_hub=True, device="cpu")), "org/IP:models/plain.safetensors"
    mine = picture(own=own, ip_adapter=name, ip_adapter_image=style)
    assert mine.record["ip_adapter"] == [name] and "image_encoder" not in mine.record
    here = picture(own=own, ip_adapter=PLAIN, ip_adapter_image=style)
    assert mine.path.read_bytes() != here.path.read_bytes(), "they have other settings"
    for wrong in ("org/IP:../cached/models/plain.safetensors", "org/IP", "org/IP:/etc/a.safetensors"):
        with pytest.raises(InputError, match="is not on offer for"):
            picture(own=own, ip_adapter=wrong, ip_adapter_image=style)
    with pytest.raises(InputError, match=r"face\.safetensors' does not fit \./text/sd1: .* is an IP-Adapter FaceID"):
        picture(own=own, ip_adapter="org/IP:models/face.safetensors", ip_adapter_image=style)


def test_a_link_out_of_the_folder_is_no_image_encoder(copied, tmp_path):
    shutil.move(copied / "ip" / "image_encoder", tmp_path / "elsewhere")
    (copied / "ip" / "image_encoder").symlink_to(tmp_path / "elsewhere")
    catalogue = Catalogue(copied)
    assert not catalogue.ip_adapters.offered(catalogue.card("./text/sd1"))
