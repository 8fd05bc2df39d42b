"""The official client works unchanged."""

import base64

import openai
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent

from tests.serve.conftest import SMALL, pictures_of, wait_until_empty


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.server.address}/v1", api_key="none", max_retries=0) as client:
        yield client


OWN = {"num_inference_steps": 6, "seed": 3}


def test_generate(client, served):
    answer = client.images.generate(
        prompt="a cat", n=2, size="16x16", background="auto", quality="auto", extra_body=OWN
    )
    assert [base64.b64decode(each.b64_json) for each in answer.data] == pictures_of(served.generate(n=2, **OWN))
    assert answer.usage.output_tokens_details.image_tokens == answer.usage.output_tokens == 2
    assert (answer.background, answer.size, answer.data[1].seed) == ("opaque", "16x16", 4)


def test_stream(client, served):
    events = [*client.images.generate(prompt="a cat", size="16x16", stream=True, partial_images=2, extra_body=OWN)]
    assert [type(each) for each in events] == [ImageGenPartialImageEvent] * 2 + [ImageGenCompletedEvent]
    assert [each.partial_image_index for each in events[:2]] == [0, 1]
    assert [base64.b64decode(events[-1].b64_json)] == pictures_of(served.generate(**OWN))
    assert {(each.size, each.quality, each.background, each.output_format) for each in events} == {
        ("16x16", "auto", "opaque", "png")
    }
    assert events[-1].usage.total_tokens == 3 and events[-1].settings["seed"] == 3
    for each in events:  # each has every field of its type, with its type
        type(each).model_validate(each.model_dump(), strict=True)


def test_a_stream_of_several_pictures(client):
    events = [*client.images.generate(prompt="a cat", n=2, stream=True, extra_body=SMALL)]
    assert [(each.type, each.image_index, each.seed) for each in events] == [
        ("image_generation.completed", 0, 0),
        ("image_generation.completed", 1, 1),
    ]


def test_errors_are_the_clients(client, served, monkeypatch):
    with pytest.raises(openai.BadRequestError, match="n: 0 is not a whole number from 1 to 10") as error:
        client.images.generate(prompt="a cat", n=0)
    assert (error.value.param, error.value.code, error.value.type) == ("n", "invalid_value", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="gpt-image-1"):
        client.images.generate(prompt="a cat", model="gpt-image-1")
    with pytest.raises(openai.BadRequestError, match="style: 'vivid' is not supported"):
        client.images.generate(prompt="a cat", style="vivid")


def test_models(client):
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model


def test_a_closed_stream_ends_its_run(client, served):
    long = {"num_inference_steps": 900}
    with client.images.generate(prompt="a cat", size="16x16", stream=True, partial_images=1, extra_body=long) as stream:
        assert next(iter(stream)).type == "image_generation.partial_image"
    wait_until_empty(served)
    counts = []
    for _ in range(2):
        assert served.generate().status_code == 200
        counts.append(served.studio.drawer.counts().steps)
    assert counts[1] - counts[0] == 3, "only the last request takes steps"
