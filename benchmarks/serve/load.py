"""Clients of an HTTP server that draws pictures: closed loops, and Poisson arrivals."""

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

PATIENCE = 600.0  # seconds for an answer, at most
Body = dict[str, Any]  # of a request


@dataclass(frozen=True)
class Answer:
    """A picture that a client received, or an error. Times are in seconds of `time.perf_counter`."""

    body: Body
    asked: float
    done: float
    first: float  # the first partial picture, or `done`
    status: int
    picture: bytes = b""

    @property
    def seconds(self) -> float:
        return self.done - self.asked


def one_by_one(address: str, bodies: Sequence[Body]) -> list[Answer]:
    """Ask for each picture when the one before has arrived."""

    async def run() -> list[Answer]:
        async with _client(address) as client:
            return [await ask(client, body) for body in bodies]

    return asyncio.run(run())


def closed_loop(address: str, body: Callable[[int], Body], clients: int, until: Callable[[int], bool]) -> list[Answer]:
    """Let clients ask again and again, each when its picture has arrived, until `until(count)` is true."""
    answers: list[Answer] = []
    numbers = iter(range(10**9))

    async def loop(client: httpx.AsyncClient) -> None:
        while not until(len(answers)):
            answers.append(await ask(client, body(next(numbers))))

    async def run() -> None:
        async with _client(address) as client:
            await asyncio.gather(*(loop(client) for _ in range(clients)))

    asyncio.run(run())
    return answers


def poisson(
    address: str, body: Callable[[int], Body], rate: float, seconds: float, dice: random.Random
) -> list[Answer]:
    """Ask for `rate` pictures a second on average, at random times, whether or not earlier ones have arrived."""

    async def run() -> list[Answer]:
        waiting: list[asyncio.Task[Answer]] = []
        async with _client(address) as client:
            start = due = time.perf_counter()
            while (due := due + dice.expovariate(rate)) < start + seconds:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                waiting.append(asyncio.create_task(ask(client, body(len(waiting)))))
            return [await each for each in waiting]

    return asyncio.run(run())


def ask(client: httpx.AsyncClient, body: Body) -> Coroutine[Any, Any, Answer]:
    """Ask for a picture."""
    return (_stream if body.get("stream") else _whole)(client, body)


async def _whole(client: httpx.AsyncClient, body: Body) -> Answer:
    asked = time.perf_counter()
    answer = await client.post("/v1/images/generations", json=body)
    picture = base64.b64decode(answer.json()["data"][0]["b64_json"]) if answer.status_code == 200 else b""
    done = time.perf_counter()
    return Answer(body, asked, done, done, answer.status_code, picture)


async def _stream(client: httpx.AsyncClient, body: Body) -> Answer:
    asked, first, event = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "/v1/images/generations", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                first = first or time.perf_counter()
    return Answer(body, asked, time.perf_counter(), first, answer.status_code, base64.b64decode(event["b64_json"]))


@asynccontextmanager
async def _client(address: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=PATIENCE, limits=limits, trust_env=False) as client:
        yield client
