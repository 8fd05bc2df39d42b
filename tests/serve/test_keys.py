"""Bearer keys: who is let in, in constant time, and without showing a key."""

import pytest

from fastdiff.errors import InputError
from fastdiff.serve import keys
from fastdiff.serve.keys import VARIABLE, Keys
from fastdiff.serve.wire.errors import ApiError
from tests.serve.conftest import error_of, served_by

ANN, BOB = "sk-ann-0123456789", "sk-bob-0123456789"


def test_only_keys_let_in(sd1, one_thread):
    with served_by(sd1, keys=Keys([ANN, BOB])) as served:
        for header in (None, "", ANN, "Bearer", f"Basic {ANN}", f"Bearer {ANN}x", f"Bearer {ANN[:-1]}"):
            answer = served.http.get("/v1/models", headers={} if header is None else {"authorization": header})
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
            error = error_of(answer)
            assert error["code"] == "invalid_api_key" and ANN not in error["message"]
        assert served.http.get("/metrics").status_code == 401
        for key in (ANN, BOB):
            headers = {"authorization": f"bearer {key}", "host": "draw.example.org"}
            assert served.http.get("/v1/models", headers=headers).status_code == 200
        assert served.http.get("/health").status_code == served.http.get("/openapi.json").status_code == 200


def test_every_key_is_compared(monkeypatch):
    compared = []
    compare = keys.hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda *each: compared.append(each) or compare(*each))
    some = Keys([ANN, BOB])
    assert some.check(f"Bearer {ANN}") == 0 and len(compared) == 2
    with pytest.raises(ApiError):
        some.check("Bearer x")
    assert len(compared) == 4 and all(len(left) == len(right) == 32 for left, right in compared)
    assert Keys().check(None) is None


def test_keys_of_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text(f"# ours\n\n  {ANN}  \n{BOB}\n")
    assert Keys.read(file).check(f"Bearer {BOB}") == 1
    monkeypatch.setenv(VARIABLE, f"{BOB},{ANN}")
    assert Keys.read(None).check(f"Bearer {ANN}") == 1
    monkeypatch.delenv(VARIABLE)
    assert not Keys.read(None)


@pytest.mark.parametrize(
    "content, problem",
    [(b"short\n", "line 1 is not a key"), (b"#\n\n", "has no keys"), (b"\xff", "not UTF-8"), (b"a b" * 9, "line 1")],
)
def test_a_file_without_usable_keys(tmp_path, content, problem):
    file = tmp_path / "keys"
    file.write_bytes(content)
    with pytest.raises(InputError, match=problem) as error:
        Keys.read(file)
    assert "short" not in str(error.value)
    with pytest.raises(InputError, match="No such file"):
        Keys.read(tmp_path / "nothing")
