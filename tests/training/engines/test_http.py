"""Answers that come at the same time, one of which is an error, and a key that every call has and no message."""

import asyncio

import httpx2 as httpx
import pytest

from fastrl.base.errors import UserError
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


KEY = "s3cret-key"


def answering(tmp_path, key, status, **answer):
    """A server with this text in its key file, and an answer for each call; the headers that it was sent."""
    (tmp_path / "key").write_text(key)
    server, sent = http.Server("http://127.0.0.1:9", "a server", None, tmp_path / "key"), []

    def handle(request):
        sent.append(request.headers.get("Authorization"))
        return httpx.Response(status, **answer)

    server.options["transport"] = httpx.MockTransport(handle)
    server.client = httpx.Client(**server.options)
    return server, sent


def test_all_calls_have_the_key(tmp_path):
    server, sent = answering(tmp_path, f"{KEY}\n", 200, json={})
    server.get("/health")
    server.post("/pause")
    assert list(server.post_all("/generate", [{}], timeout=5)) == [(0, {})]
    assert sent == [f"Bearer {KEY}"] * 3


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (400, {"json": {"error": f"got Bearer {KEY}"}}),
        (401, {"text": "x" * 290 + KEY}),
        (503, {"text": KEY}),
        (200, {"text": f"Authorization: Bearer {KEY}"}),
    ],
)
def test_an_answer_that_repeats_the_key_is_shown_without_it(tmp_path, status, answer):
    server, _ = answering(tmp_path, KEY, status, **answer)
    with pytest.raises((UserError, EngineUnavailable)) as caught:
        server.get("/health")
    assert "s3c" not in str(caught.value) and "<key" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read .*key: No such file"),
        (b"", "expected one key"),
        (b" \n", "expected one key"),
        (b"s3cret key", "expected one key"),
        (b"s3cret\nkey", "expected one key"),
        (b"s3cret\x00", "expected one key"),
        ("s3cret–".encode(), "ASCII"),
    ],
)
def test_a_file_that_holds_no_key_is_not_shown(tmp_path, content, expected):
    """No header can have it, and the client's error for that would show it."""
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    with pytest.raises(UserError, match=f"rollout.api_key_file: .*{expected}") as caught:
        http.Server("http://127.0.0.1:9", "a server", None, tmp_path / "key")
    assert "s3cret" not in str(caught.value) and caught.value.__cause__ is None
