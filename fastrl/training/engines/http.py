"""A server over HTTP, and its answers as errors that a user can act on."""

import asyncio
import json
import ssl
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from fastrl.base.errors import UserError
from fastrl.training.engines.protocol import EngineFailed, EngineUnavailable

PATIENCE = 10.0  # seconds for a connection, for short answers, and between looks at a server that is busy
CONNECTIONS = 256
HEALTH = "/health"
KEY_HINT = "rollout.api_key_file names a file with the key that it was started with (--api-key)"


class Server:
    """Calls to a server. `hints` say for a path and status, or for a status, what its user must change.

    Each call has the key in `key_file`, which no message repeats. Raises UserError for a url or a key that is none.
    """

    def __init__(
        self, url: str, name: str, hints: Mapping[Any, str] | None = None, key_file: Path | None = None
    ) -> None:
        parts = urlsplit(url)
        try:
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of a port that is no number up to 65535
            usable = False
        if not usable or parts.hostname is None:
            raise UserError(f'rollout.url: expected "http://HOST:PORT", got {url!r}')
        self.url, self.name, self.hints, self.host = url.rstrip("/"), name, hints or {}, parts.hostname
        self.key = None if key_file is None else _key(key_file)
        self.options: dict[str, Any] = {
            "timeout": httpx.Timeout(PATIENCE, read=None, pool=None),
            "limits": httpx.Limits(max_connections=CONNECTIONS),
            "trust_env": False,  # a proxy of the environment is for the outside
            # Made once: a client of its own would read all certificates, also where none is needed.
            "verify": ssl.create_default_context() if parts.scheme == "https" else False,
            "headers": {} if self.key is None else {"Authorization": f"Bearer {self.key}"},
        }
        self.client = httpx.Client(**self.options)

    def get(self, path: str, timeout: float | None = None) -> Any:
        """The answer to GET, which is JSON or empty, and comes within PATIENCE or `timeout` seconds."""
        return self._ask("GET", path, None, timeout or PATIENCE)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """The answer to POST, which may take `timeout` seconds, or any time.

        Raises EngineUnavailable if there is none, EngineFailed for a 5xx, and UserError for what is no success else.
        """
        return self._ask("POST", path, body or {}, timeout)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None) -> Any:
        with self._reached():
            limits = httpx.Timeout(PATIENCE, read=timeout)
            response = self.client.request(method, self.url + path, json=body, timeout=limits)
        return self._answer(path, response)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.RequestError as error:
            reason = str(error).strip() or type(error).__name__
            raise EngineUnavailable(f"{self.name} at {self.url} does not answer ({reason})") from error

    def _answer(self, path: str, response: httpx.Response) -> Any:
        """The JSON of an answer, or the error that it is."""
        where = f"{self.name} at {self.url} answered {path} with {response.status_code}: "
        if response.status_code >= 500:
            # A server whose engine has died says so for a moment, and then is gone.
            failed = path != HEALTH and self.is_healthy()
            raise (EngineFailed if failed else EngineUnavailable)(where + self._message(response))
        if not response.is_success:
            route, status = path.partition("?")[0], response.status_code
            hint = self.hints.get((route, status)) or self.hints.get(status)
            raise UserError(f"rollout.url: {where}{self._message(response)}{'' if hint is None else '; ' + hint}")
        if not response.content:
            return {}
        try:
            return response.json()
        except ValueError as error:
            raise UserError(
                f"rollout.url: {self.url}{path} answered with what is no JSON ({self._text(response)[:60]!r}); is it a "
                f"server of {self.name}?"
            ) from error

    def _text(self, response: httpx.Response) -> str:
        """An answer's text without the key: whatever answers at a wrong url may repeat what it was sent."""
        return response.text if self.key is None else response.text.replace(self.key, "<key>")

    def _message(self, response: httpx.Response) -> str:
        """What an error answer says, in one line."""
        content = self._text(response)
        try:
            tree = json.loads(content)
        except ValueError:
            tree = None
        for name in ("error", "message", "detail"):
            if isinstance(tree, dict) and name in tree:
                tree = tree[name]
        text = tree if isinstance(tree, str) else content if tree is None else json.dumps(tree)
        return " ".join(text.split())[:300] or response.reason_phrase

    def is_healthy(self) -> bool:
        """Whether it answers /health in time."""
        try:
            self.get(HEALTH)
        except EngineUnavailable:
            return False
        return True

    def post_all(self, path: str, bodies: Sequence[dict[str, Any]], timeout: float) -> Iterator[tuple[int, Any]]:
        """POST all bodies at the same time; yields index and answer as they come.

        Raises the first error as `post` does. An answer may take any time, but if none comes and the server's health
        cannot be asked for `timeout` seconds, EngineUnavailable is raised. What is still open after an error is
        dropped, which ends it on the server too.
        """
        loop = asyncio.new_event_loop()
        client = httpx.AsyncClient(**self.options)
        tasks = {loop.create_task(client.post(self.url + path, json=body)): i for i, body in enumerate(bodies)}
        try:
            heard = time.monotonic()
            while tasks:
                some = asyncio.wait(tasks, timeout=min(PATIENCE, timeout), return_when=asyncio.FIRST_COMPLETED)
                done, _ = loop.run_until_complete(some)
                if done or self.is_healthy():
                    heard = time.monotonic()
                elif (silent := time.monotonic() - heard) >= timeout:
                    raise EngineUnavailable(f"{self.name} at {self.url} has been silent for {silent:.0f} s")
                for task in sorted(done, key=_failed):  # what came is kept before an error ends the rest
                    index = tasks.pop(task)
                    with self._reached():
                        response = task.result()
                    yield index, self._answer(path, response)
        finally:
            loop.run_until_complete(_drop(client, tasks))
            loop.close()


async def _drop(client: httpx.AsyncClient, tasks: Iterable[asyncio.Task[httpx.Response]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


def _failed(task: asyncio.Task[httpx.Response]) -> bool:
    """Whether a request that is done has no good answer."""
    return task.exception() is not None or not task.result().is_success


def _key(file: Path) -> str:
    """The key in a file. Raises UserError, which does not show it, for what no header can hold."""
    try:
        key = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it has other characters than ASCII's"
        raise UserError(f"rollout.api_key_file: cannot read {file}: {reason}") from None
    if not key.isprintable() or len(key.split()) != 1:
        raise UserError(f"rollout.api_key_file: expected one key without spaces in {file}, and nothing else")
    return key
