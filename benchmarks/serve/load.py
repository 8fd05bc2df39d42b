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
PROMPTS = ("red apple", "fox face", "rocket", "house with garden", "smiling face")
LATE = 0  # the status of an answer that did not come in time
Body = dict[str, Any]  # of a request


@dataclass(frozen=True)
class Workload:
    """How a model is measured."""

    batches: tuple[int, ...] = (1, 4, 16, 32)  # of the pipeline alone
    clients: int = 64
    rounds: int = 7  # requests to an idle server
    steps: int = 20

    @property
    def bursts(self) -> list[int]:
        """Numbers of clients that ask at once, up to the largest batch of a server."""
        return [2**i for i in range(min(self.clients, 32).bit_length())]

    def body(self, number: int, **more: Any) -> Body:
        """Return the body of a request."""
        prompt = PROMPTS[number % len(PROMPTS)]
        return {"prompt": prompt, "seed": number, "num_inference_steps": self.steps, **more}


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


def steady_loop(
    address: str, body: Callable[[int], Body], clients: int, ramp: float, seconds: float
) -> tuple[float, float, list[Answer]]:
    """Let clients begin one after the other during `ramp` seconds, and ask again and again for `seconds` more.

    Returns the begin and the end of these, and all answers until then. Requests that are left are cancelled.
    """
    answers: list[Answer] = []
    numbers = iter(range(10**9))

    async def loop(client: httpx.AsyncClient, delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            answers.append(await ask(client, body(next(numbers))))

    async def run() -> float:
        async with _client(address) as client:
            begin = time.perf_counter() + ramp
            loops = [asyncio.create_task(loop(client, ramp * i / clients)) for i in range(clients)]
            await asyncio.wait(loops, timeout=ramp + seconds, return_when=asyncio.FIRST_EXCEPTION)
            await _cancel(loops)
            return begin

    begin = asyncio.run(run())
    return begin, begin + seconds, answers


def rate_of(answers: Sequence[Answer], begin: float, end: float) -> float:
    """Return the answers per second from the last one before `begin` to the last one before `end`.

    Raises SystemExit without any.
    """
    inside = [each.done for each in answers if begin < each.done <= end]
    if not inside:
        raise SystemExit(f"no picture arrived within {end - begin:.1f} s; give more --seconds")
    return len(inside) / (max(inside) - max((each.done for each in answers if each.done <= begin), default=begin))


def poisson(
    address: str,
    body: Callable[[int], Body],
    rate: float,
    seconds: float,
    dice: random.Random,
    *,
    most: int,
    patience: float,
) -> list[Answer]:
    """Ask for `rate` pictures a second on average, at random times, whether or not earlier ones have arrived.

    Asks at most `most` times, and waits for `patience` seconds after the last time. Then answers that have not come are
    LATE.
    """

    async def run() -> list[Answer]:
        waiting: list[asyncio.Task[Answer]] = []
        async with _client(address) as client:
            start = due = time.perf_counter()
            while (due := due + dice.expovariate(rate)) < start + seconds and len(waiting) < most:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                waiting.append(asyncio.create_task(ask(client, body(len(waiting)))))
            if waiting:
                await asyncio.wait(waiting, timeout=patience)
            late = [each for each in waiting if not each.done()]
            await _cancel(late)
            now = time.perf_counter()
            left = [Answer({}, now, now, now, LATE) for _ in late]
            return [each.result() for each in waiting if each not in late] + left

    return asyncio.run(run())


async def _cancel(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel tasks and wait until they have ended. Raises the first error of their own."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


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
