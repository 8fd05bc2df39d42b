"""The defaults of calls are those in the signatures of diffusers' pipelines, which this test reads."""

import diffusers
import pytest

from fastdiff import Pipeline
from fastdiff.checkpoints.registry import PIPELINES
from fastdiff.pipelines.sizes import SCORES
from fastdiff.requests.defaults import LIBRARY, ModelFacts, SamplingOptions, complete_sampling
from tests.parity.image_starts.pictures import mask, picture
from tests.parity.surface.walk import parameters
from tests.support.pairwise import product
from tests.support.text_pipelines import inpainting_pipeline, refiner_pipeline, text_pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own
IMAGE = {"image": picture()}
MASKED = IMAGE | {"mask_image": mask()}
CALLS = {  # a folder, the arguments of a call, and the diffusers pipeline that has the call
    "sd1": ("sd1", {}, "StableDiffusionPipeline"),
    "sd1-image": ("sd1", IMAGE, "StableDiffusionImg2ImgPipeline"),
    "sd1-mask": ("sd1", MASKED, "StableDiffusionInpaintPipeline"),
    "sd1-inpainting": ("sd1-inpainting", MASKED, "StableDiffusionInpaintPipeline"),
    "sdxl": ("sdxl", {}, "StableDiffusionXLPipeline"),
    "sdxl-image": ("sdxl", IMAGE, "StableDiffusionXLImg2ImgPipeline"),
    "sdxl-mask": ("sdxl", MASKED, "StableDiffusionXLInpaintPipeline"),
    "sdxl-inpainting": ("sdxl-inpainting", MASKED, "StableDiffusionXLInpaintPipeline"),
    "refiner": ("refiner", IMAGE, "StableDiffusionXLImg2ImgPipeline"),
    "refiner-mask": ("refiner", MASKED, "StableDiffusionXLInpaintPipeline"),
}


def defaults(name):
    found = parameters(getattr(diffusers, name).__call__)
    return {key: each.default for key, each in found.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def folder(kind):
        if kind not in made:
            base, _, task = kind.partition("-")
            theirs = refiner_pipeline() if kind == "refiner" else (inpainting_pipeline if task else text_pipeline)(base)
            made[kind] = tmp_path_factory.mktemp(kind)
            theirs.save_pretrained(made[kind])
        return made[kind]

    return folder


@pytest.mark.parametrize(("case", "live"), product(list(CALLS), {"folder": False, "live": True}, together=1))
def test_a_call_has_diffusers_guidance_strength_and_steps(case, live, folder):
    kind, options, name = CALLS[case]
    pipe = Pipeline.from_pretrained(folder(kind), device="cpu")
    if live:
        pipe = type(pipe)(**pipe.components)
    theirs = defaults(name)
    steps, strength = theirs["num_inference_steps"], theirs.get("strength", 1)
    first = next(pipe.stream("a cat", **options))
    more = first.num_steps - min(int(steps * strength), steps)
    assert pipe.guidance_scale == theirs["guidance_scale"]
    assert more == pipe.scheduler_name.startswith("pndm"), "PNDM repeats its second step"


def test_scores_and_classes_have_diffusers_defaults():
    for name in ("StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline"):
        assert {score: defaults(name)[score] for score in SCORES} == SCORES
    for name, pipeline in PIPELINES.items():
        if pipeline.reads_text:
            assert pipeline.guidance_scale == defaults(name)["guidance_scale"]
            inpainting = name.replace("Img2Img", "").replace("Inpaint", "").replace("Pipeline", "InpaintPipeline")
            masked = pipeline.guidance_scale_with_mask or pipeline.guidance_scale
            assert masked == defaults(inpainting)["guidance_scale"]


def test_a_models_own_guidance_wins_with_a_mask(folder, tmp_path):
    from fastdiff.checkpoints.model_info import ModelInfo

    index = folder("sdxl") / "model_index.json"
    (tmp_path / "model_index.json").write_bytes(index.read_bytes())
    for content, wanted in (
        ("{}", 7.5),
        ('{"guidance_scale": 3}', 3.0),
        ('{"guidance_scale": 3, "guidance_scale_with_mask": 4}', 4.0),
        ('{"guidance_scale_with_mask": 0}', 0.0),
    ):
        (tmp_path / "fastdiff.json").write_text(content)
        facts = ModelFacts(ModelInfo.from_folder(tmp_path), "euler", 1000, reads_text=True)
        masked = complete_sampling(SamplingOptions(), facts, LIBRARY, labelled=False, masked=True)
        asked = complete_sampling(SamplingOptions(guidance_scale=2.0), facts, LIBRARY, labelled=False, masked=True)
        assert (masked.guidance_scale, asked.guidance_scale) == (wanted, 2.0)
