"""Who may use the page: the server's host names, and users who log in."""

import re

import httpx
import pytest
from gradio import networking
from gradio_client import Client

from fastdiff.errors import InputError
from fastdiff.ui.parts.request import Limits
from fastdiff.ui.server import serving
from fastdiff.ui.serving.access import AUTH_VARIABLE, SPACE_VARIABLE, HostNames, Users, addresses, is_reached_by_others

LINK = "https://a1b2c3.gradio.live"  # as from Gradio's servers


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:7860", "127.0.0.1:9", "[::1]:7860", "10.0.0.5", "10.0.0.5:80"]
)
def test_numbers_and_localhost_are_names_of_every_server(host):
    assert HostNames("127.0.0.1").have(host)


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:7860", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_other_names_are_not(host):
    assert not HostNames("127.0.0.1").have(host) and not HostNames("0.0.0.0").have(host)


def test_names_of_proxies_and_spaces(monkeypatch):
    monkeypatch.setenv(SPACE_VARIABLE, "me-draw.hf.space, draw.example.org")
    names = HostNames("127.0.0.1", ["Proxy.example.org"])
    for name in ("me-draw.hf.space", "draw.example.org:443", "proxy.example.org"):
        assert names.have(name) and names.are_public(name)
    assert not names.are_public("localhost:3000")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", False), ("127.8.8.8", False), ("::1", False), ("localhost", False), ("0.0.0.0", True), ("::", True),
     ("10.0.0.5", True), ("here.example.org", True)],
)  # fmt: skip
def test_who_reaches_a_host(host, expected):
    assert is_reached_by_others(host) == expected


def test_addresses_are_real():
    assert addresses(["http://127.0.0.1:7861/"], "127.0.0.1") == ["http://127.0.0.1:7861/"]
    everywhere = addresses(["http://localhost:7861/"], "0.0.0.0")
    assert "http://127.0.0.1:7861/" in everywhere
    assert all(re.fullmatch(r"http://[\d.]+:7861/", each) and "0.0.0.0" not in each for each in everywhere)
    sixth = addresses(["http://[::]:7861/"], "::")
    assert "http://[::1]:7861/" in sixth and all(re.fullmatch(r"http://\[[\da-f:]+\]:7861/", each) for each in sixth)
    assert addresses(["http://localhost:7861/", LINK], "0.0.0.0") == [LINK, *everywhere]
    assert addresses(["http://127.0.0.1:7861/", LINK], "127.0.0.1") == [LINK, "http://127.0.0.1:7861/"]


def test_passwords(tmp_path, monkeypatch):
    path = tmp_path / "users"
    path.write_text("ann:a:b c\n\nbob:ü\n", encoding="utf-8")
    users = Users.read(path)
    assert users("ann", "a:b c") and users("bob", "ü")
    assert not users("ann", "ü") and not users("ann", "") and not users("eve", "ü")
    assert "a:b c" not in str(vars(users))
    monkeypatch.setenv(AUTH_VARIABLE, "ann:x")
    assert Users.read(None)("ann", "x") and not Users.read(path)("ann", "x")
    monkeypatch.delenv(AUTH_VARIABLE)
    assert Users.read(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("ann:x\nsecret\n", "line 2 is not user:password", id="no colon"),
        pytest.param("ann:\n", "line 1 is not user:password", id="no password"),
        pytest.param("\n", "has no users; add a line user:password for each", id="empty"),
    ],
)
def test_files_that_name_nobody(tmp_path, text, message):
    (tmp_path / "users").write_text(text)
    with pytest.raises(InputError, match=message) as refusal:
        Users.read(tmp_path / "users")
    assert "secret" not in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"--auth .*users cannot be read \(No such file or directory\); give a file"):
        Users.read(tmp_path / "users")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.invalid"])
def test_hosts_that_are_not_here(shared, host):
    with (
        pytest.raises(InputError, match=rf"--host {host} is not an address of this machine"),
        serving(shared, Limits(), host=host),
    ):
        pass


def test_without_a_share_link_it_ends(shared, serve, monkeypatch, capsys):
    monkeypatch.setattr(networking, "setup_tunnel", lambda **options: 1 / 0)
    with pytest.raises(OSError, match="--share: Gradio created no share link"), serve(shared, Limits(), share=True):
        pass
    assert "Could not create share link" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting' is deprecated", "ignore:The copy keyword")
def test_a_page_with_a_login_and_a_proxy_and_a_share_link(shared, serve, monkeypatch):
    """One server for all tests, because a start takes seconds."""
    monkeypatch.setattr(networking, "setup_tunnel", lambda **options: LINK)
    options = {"users": Users(["ann:secret"], "test"), "allow_hosts": ["proxy.example.org"], "share": True}
    with serve(shared, Limits(), **options) as address:
        with httpx.Client(base_url=address) as http:
            asked = {"json": {"data": []}}
            assert http.get("/config").status_code == 401
            assert http.post("/gradio_api/call/models", **asked).status_code == 401
            assert http.post("/login", data={"username": "ann", "password": "wrong"}).status_code == 400
            assert http.post("/login", data={"username": "ann", "password": "secret"}).status_code == 200
            assert http.post("/gradio_api/call/models", **asked).status_code == 200
            seen_by_proxy = {"Origin": "https://proxy.example.org"}  # a proxy sends its own Host, or the browser's
            seen_by_link = {"Origin": LINK, "Host": "a1b2c3.gradio.live"}
            for headers in (seen_by_proxy, seen_by_proxy | {"Host": "proxy.example.org"}, seen_by_link):
                assert http.post("/gradio_api/call/models", headers=headers, **asked).status_code == 200
            anothers = {"Origin": "https://another.gradio.live"}
            for headers in (anothers, {"Host": "another.gradio.live"}):
                assert http.post("/gradio_api/call/models", headers=headers, **asked).status_code == 403
        with pytest.raises(ValueError, match="credentials were not provided"):
            Client(address, verbose=False)
        client = Client(address, verbose=False, auth=("ann", "secret"))
        assert client.predict(api_name="/models")
        client.close()
