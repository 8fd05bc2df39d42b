"""Wrong requests are refused in one line that names the field."""

import pytest

from tests.serve.conftest import error_of

WRONG = {  # fields -> the field that the error names, and a part of its message
    "unknown": ({"negative_promt": "x"}, "negative_promt", "did you mean negative_prompt?"),
    "null": ({"anything": None}, "anything", "unknown"),
    "prompt": ({"prompt": ["a"]}, "prompt", "is not a string"),
    "n": ({"n": 11}, "n", "from 1 to 10"),
    "bool": ({"n": True}, "n", "whole number"),
    "float": ({"num_inference_steps": 2.0}, "num_inference_steps", "whole number"),
    "text": ({"seed": "7"}, "seed", "whole number"),
    "size": ({"size": "16*16"}, "size", "16*16"),
    "multiple": ({"size": "17x16"}, "size", "multiples"),
    "large": ({"size": "4096x64"}, "size", "at most 2048"),
    "no-size": ({"size": "0x16"}, "size", "0x16"),
    "work": ({"size": "2048x2048", "num_inference_steps": 900}, None, "million pixels x steps"),
    "steps": ({"num_inference_steps": 100_000}, "num_inference_steps", "1000"),
    "quality": ({"quality": "high"}, "quality", "auto"),
    "moderation": ({"moderation": "low"}, "moderation", "auto"),
    "background": ({"background": "transparent"}, "background", "opaque"),
    "style": ({"style": "vivid"}, "style", "not supported"),
    "format": ({"output_format": "gif"}, "output_format", "png"),
    "compression": ({"output_compression": 50}, "output_compression", "webp"),
    "url": ({"response_format": "url"}, "response_format", "b64_json"),
    "partial": ({"partial_images": 1}, "partial_images", "stream"),
    "many": ({"partial_images": 4, "stream": True}, "partial_images", "0 to 3"),
    "scheduler": ({"scheduler": "../x"}, "scheduler", "ddim"),
    "loras": ({"loras": ["style"]}, "loras", "offers none"),
    "guidance": ({"guidance_scale": -1}, "guidance_scale", "at least 0"),
    "model": ({"model": "../../etc"}, "model", "not on offer"),
}


@pytest.mark.parametrize("fields, param, message", WRONG.values(), ids=WRONG)
def test_a_wrong_field_is_named(served, fields, param, message):
    error = error_of(served.generate(**fields))
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize("fields", [{"quality": "auto", "moderation": "auto", "background": "opaque"}, {"style": None}])
def test_fields_that_change_nothing_are_taken(served, fields):
    assert served.generate(**fields, size="auto", output_compression=100).status_code == 200


BODIES = {
    "nothing": b"",
    "half": b'{"prompt": "a',
    "list": b"[]",
    "deep": b"[" * 100_000,
    "deep-object": b'{"a":' * 100_000,
    "nan": b'{"prompt": "a", "seed": NaN}',
    "huge": b'{"prompt": "a", "seed": 1' + b"0" * 10_000 + b"}",
    "infinite": b'{"prompt": "a", "guidance_scale": 1e999}',
    "bytes": b"\xff\xfe",
    "surrogate": b'{"prompt": "\\ud800", "num_inference_steps": 1}',
    "empty": b"{}",
    "large": b'"' + b"a" * 2**20 + b'"',
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_request(served, body):
    headers = {"content-type": "application/json"}
    answer = served.http.post("/v1/images/generations", content=body, headers=headers)
    error_of(answer)
    assert answer.status_code == (413 if body is BODIES["large"] else 400)


def test_other_bodies_and_paths(served):
    for answer, status in (
        (served.http.post("/v1/images/generations", content=b"{}"), 415),
        (served.http.post("/v1/images/edits", json={"prompt": "a"}), 415),
        (served.http.get("/v1/images/generations"), 405),
        (served.http.get("/v1/images/variations"), 404),
        (served.http.get("/health", headers={"host": "evil.example"}), 403),
        (served.http.post("/v1/images/edits", headers={"origin": "https://evil.example"}), 403),
        (served.http.post("/v1/images/edits", headers={"origin": "null"}), 403),
    ):
        assert answer.status_code == status
        error_of(answer)


def test_the_document_of_the_api_has_all_fields(served):
    document = served.http.get("/openapi.json").json()
    for path, own in (("generations", set()), ("edits", {"image", "mask", "strength"})):
        (content,) = document["paths"][f"/v1/images/{path}"]["post"]["requestBody"]["content"].values()
        assert {"prompt", "seed", "loras", "partial_images"} | own <= content["schema"]["properties"].keys()
        assert "style" not in content["schema"]["properties"]
    assert "/v1/models" in document["paths"]
