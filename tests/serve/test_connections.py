"""Connections that are slow, half closed or broken, and bodies and headers that are too large."""

import json
import socket
from unittest import mock

import pytest

from tests.serve.conftest import SMALL, error_of, raw, request_of, served_by, wait_until_empty
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def impatient(sd1, one_thread):
    with served_by(sd1, body_seconds=0.05, header_seconds=0.05, body=10_000) as served:
        yield served


def test_a_slow_body_is_given_up(impatient):
    with raw(impatient) as connection:
        connection.sendall(request_of(b'{"prompt": ', length=100))
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in answer


def test_slow_headers_are_given_up(impatient):
    with raw(impatient) as connection:
        connection.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: ")
        assert connection.makefile("rb").read() == b""


def test_a_flood_of_headers_is_refused(served):
    with raw(served) as connection:
        flood = b"".join(b"X-%d: %s\r\n" % (i, b"x" * 1000) for i in range(100))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + flood)
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 4")


def test_a_connection_that_is_half_closed_leaves_nothing(served):
    for body, length in ((b'{"prompt": "a cat", "num_inference_steps": 900}', None), (b'{"prompt"', 100)):
        with raw(served) as connection:
            connection.sendall(request_of(body, length=length))
            connection.shutdown(1)
            connection.makefile("rb").read()
        wait_until_empty(served)
    assert served.generate().status_code == 200


def test_an_answer_waits_for_no_acknowledgement(served):
    """Its headers and its body are two packets: without TCP_NODELAY the second waits up to 40 ms."""
    assert served.http.get("/health").status_code == 200
    connections = [*served.server._uvicorn.server_state.connections]
    sockets = [connection.transport.get_extra_info("socket") for connection in connections]
    assert sockets and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in sockets)


def test_a_client_that_does_not_read_is_given_up(sd1, one_thread):
    with served_by(sd1, send_seconds=0.05) as served, raw(served) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"prompt": "a", **SMALL, "stream": True})
        patch = "fastdiff.serve.answering._event_of"
        with mock.patch(patch, lambda *_: b": " + b"x" * 2**24 + b"\n\n"):  # more than the buffers of sockets hold
            connection.sendall(request_of(body.encode()))
            wait_for(lambda: served.studio.admission.here)
            wait_until_empty(served)
        assert served.generate().status_code == 200


def test_a_large_body_is_refused_before_it_is_read(impatient):
    answer = impatient.http.post("/v1/images/edits", content=b"x" * 10_001)
    assert answer.status_code == 413
    error_of(answer)


def test_a_large_body_of_unknown_length_is_refused(impatient):
    headers = {"content-type": "multipart/form-data; boundary=x"}
    with raw(impatient) as connection:
        head = request_of(b"", path="/v1/images/edits", headers={**headers, "transfer-encoding": "chunked"})
        connection.sendall(head + b"".join(b"1000\r\n" + b"x" * 4096 + b"\r\n" for _ in range(4)))
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413 ") and b"too_large" in answer


def test_no_connection_keeps_a_place(impatient, served):
    for each in (impatient, served):
        wait_for(lambda each=each: not each.studio.admission.here)
