"""A server over HTTP, and its answers as errors that a user can act on."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from fastrl.base.errors import UserError
from fastrl.training.engines.protocol import EngineUnavailable

PATIENCE = 10.0  # seconds for a connection, for short answers, and between looks at a server that is busy
CONNECTIONS = 256


class Server:
    """Calls to a server. `hints` say for a path and status what its user must change."""

    def __init__(self, url: str, name: str, hints: Mapping[tuple[str, int], str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f'rollout.url: expected "http://HOST:PORT", got {url!r}')
        self.url, self.name, self.hints, self.host = url.rstrip("/"), name, hints or {}, parts.hostname
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(PATIENCE, read=None, pool=None),
            "limits": httpx.Limits(max_connections=CONNECTIONS),
            "trust_env": False,  # a proxy of the environment is for the outside
        }
        self.client = httpx.Client(**self.options)

    def get(self, path: str, timeout: float | None = PATIENCE) -> Any:
        """The answer to GET, which is JSON or empty."""
        return self._ask("GET", path, None, timeout)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The answer to POST. Raises EngineUnavailable for no answer or a 5xx, and UserError for another one."""
        return self._ask("POST", path, {} if body is None else body, timeout)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        with self._reached():
            limits = httpx.Timeout(PATIENCE, read=timeout)
            response = self.client.request(method, self.url + path, json=body, timeout=limits)
        return self._answer(path, response)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.TransportError as error:
            reason = str(error).strip() or type(error).__name__
            raise EngineUnavailable(f"{self.name} at {self.url} does not answer ({reason})") from error

    def _answer(self, path: str, response: httpx.Response) -> Any:
        """The JSON of an answer, or the error that it is."""
        where = f"{self.name} at {self.url} answered {path} with {response.status_code}: "
        if response.status_code >= 500:
            raise EngineUnavailable(where + _message(response))
        if response.status_code >= 400:
            hint = self.hints.get((path.partition("?")[0], response.status_code))
            raise UserError(f"rollout.url: {where}{_message(response)}{'' if hint is None else '; ' + hint}")
        if not response.content:
            return {}
        try:
            return response.json()
        except ValueError as error:
            raise UserError(
                f"rollout.url: {self.url}{path} answered with what is no JSON ({response.text[:60]!r}); is it a server "
                f"of {self.name}?"
            ) from error

    def is_healthy(self) -> bool:
        """Whether it answers /health in time."""
        try:
            self.get("/health")
        except EngineUnavailable:
            return False
        return True

    def post_all(self, path: str, bodies: Sequence[dict[str, Any]], timeout: float) -> Iterator[tuple[int, Any]]:
        """POST all bodies at the same time; yields index and answer as they come.

        Raises the first error as `post` does, and EngineUnavailable if the server is silent for `timeout` seconds,
        however long an answer may take. What is still open then is dropped, which ends it on the server too.
        """
        loop = asyncio.new_event_loop()
        client = httpx.AsyncClient(**self.options)
        tasks = {loop.create_task(client.post(self.url + path, json=body)): i for i, body in enumerate(bodies)}
        try:
            silent = 0.0
            while tasks:
                some = asyncio.wait(tasks, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
                done, _ = loop.run_until_complete(some)
                silent = 0.0 if done or self.is_healthy() else silent + PATIENCE
                if silent >= timeout:
                    raise EngineUnavailable(f"{self.name} at {self.url} has been silent for {silent:.0f} s")
                for task in done:
                    index = tasks.pop(task)
                    with self._reached():
                        response = task.result()
                    yield index, self._answer(path, response)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.run_until_complete(client.aclose())
            loop.close()


def _message(response: httpx.Response) -> str:
    """What an error answer says, in one line."""
    try:
        tree = response.json()
    except ValueError:
        tree = None
    for name in ("error", "message", "detail"):
        if isinstance(tree, dict) and name in tree:
            tree = tree[name]
    text = tree if isinstance(tree, str) else response.text if tree is None else json.dumps(tree)
    return " ".join(text.split())[:300] or response.reason_phrase
