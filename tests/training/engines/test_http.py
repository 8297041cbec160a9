"""Answers that come at the same time, one of which is an error."""

import asyncio

import httpx2 as httpx
import pytest

from fastrl.training.engines import http
from fastrl.training.engines.protocol import EngineUnavailable


def test_answers_beside_a_failed_one_are_kept(monkeypatch):
    def answer(request):
        return httpx.Response(503 if request.content == b"5" else 200, json=int(request.content))

    wait = asyncio.wait
    monkeypatch.setattr(http.asyncio, "wait", lambda tasks, **_: wait(tasks))  # until all are there
    monkeypatch.setattr(http.Server, "is_healthy", lambda self: False)
    server = http.Server("http://127.0.0.1:9", "a server")
    server.options["transport"] = httpx.MockTransport(answer)
    answers = server.post_all("/generate", list(range(9)), timeout=5)
    assert sorted(next(answers) for _ in range(8)) == [(i, i) for i in range(9) if i != 5]
    with pytest.raises(EngineUnavailable, match="503"):
        next(answers)
