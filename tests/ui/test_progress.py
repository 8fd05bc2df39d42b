"""The pictures of the progress: previews of a run while it is drawn."""

from PIL import Image

from fastdiff.hosting.models import Models
from fastdiff.requests.defaults import COMMAND
from fastdiff.requests.request import Request
from fastdiff.runs.drawing import Run, draw
from fastdiff.ui.progress import _frame, preview
from tests.parity.z_image import tiny as captions


def test_the_page_shows_previews_of_z_image(randomise, tmp_path):
    captions.pipeline(randomise, channels=16).save_pretrained(tmp_path / "z-image")
    own = Models(tmp_path, device="cpu")
    sizes = {"height": 16, "width": 24, "num_inference_steps": 1, "guidance_scale": 0.0}
    request = Request(model="./z-image", prompt=("a cat",), seed=(5,), **sizes)
    card = own.catalogue.card("./z-image")
    run = Run.prepare(request, card, COMMAND)
    progress, *_ = draw(run, own.pipeline(card, None))
    html = preview(progress)
    assert "Preview of seed 5" in html and "data:image/png;base64," in html and "--w: 12px; --ratio: 1.5" in html


def test_a_whole_preview_is_a_jpeg_and_a_small_one_a_png():
    """A large preview is scaled down, unless a preview VAE made it."""
    images = [Image.new("RGB", (400, 300)) for _ in range(2)]
    shrunk, whole = (_frame("Preview", image, is_whole) for image, is_whole in zip(images, (False, True), strict=True))
    assert [image.size for image in images] == [(256, 192), (400, 300)]
    assert "data-small" in shrunk and "data:image/png;base64," in shrunk
    assert "data-small" not in whole and "data:image/jpeg;base64," in whole
