"""Results and records of turns in a real S3-compatible server, and what becomes of them when it does not answer."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator
from pathlib import Path

import fsspec
import msgspec
import pytest

from gangline.domain.errors import NotFound, StoreError
from gangline.domain.session import Turns
from gangline.domain.tokens import encode_msgpack
from gangline.server.run import Storage, serving, turn_store
from gangline.store.journal.entries import Appended
from gangline.store.journal.object_turns import ObjectTurns
from gangline.store.results.artifacts import ArtifactResults
from gangline.wire.client.server import ServerClient
from support.service.running import FakeNode, any_plugin, request
from support.store.completions import completion

START_S = 60.0


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with (tmp_path / "s3.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)], stdout=log, stderr=log)
    try:
        _wait_for(f"{url}/moto-api/", process)
        yield process
    finally:
        process.kill()
        process.wait()
        # Its file systems are kept by their options, and would be another test's with another address.
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def _wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < ends_at
            time.sleep(0.05)


def turns(fence: int, first: int, number: int) -> Turns:
    calls = tuple(msgspec.Raw(encode_msgpack(Appended.of([completion(one)]))) for one in range(first, number))
    return Turns(session_id="s", fence=fence, first=first, calls=calls)


@pytest.mark.usefixtures("s3")
def test_records_of_turns_are_found_by_another_server_and_forgotten() -> None:
    store, other = ObjectTurns("s3://bucket/results/.turns"), ObjectTurns("s3://bucket/results/.turns")
    ArtifactResults("s3://bucket/results").prepare()
    assert other.sessions() == []
    store.append(turns(1, 0, 2))
    store.append(turns(1, 1, 4))
    store.append(turns(2, 0, 1))
    found = other.latest("s", 3)
    assert (found.fence, len(found.completions)) == (1, 4)
    assert encode_msgpack(found.completions) == encode_msgpack(tuple(completion(one) for one in range(4)))
    assert other.sessions() == ["s"]
    other.forget("s")
    other.forget("s")
    assert store.latest("s", 3).completions == ()
    assert store.sessions() == []


@pytest.mark.usefixtures("s3")
async def test_a_server_keeps_results_in_a_bucket_and_hands_them_out(tmp_path: Path) -> None:
    storage = Storage(results_url="s3://bucket/results")
    assert isinstance(turn_store(storage, tmp_path, is_shared=True), ObjectTurns)
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin, storage=storage) as server,
        ServerClient(server.url, None) as client,
    ):
        await client.submit(request("t", num_samples=1))
        node = FakeNode(client)
        (lease,) = await node.lease()
        await node.finish([lease], reward=0.5)
        view = await client.wait("t")
        assert view.outcomes == {"completed": 1}
        (found,) = await client.result("t")
        assert found.reward == 0.5
    reopened = ArtifactResults("s3://bucket/results")
    address, num_bytes = reopened.locate("t", lease.session_id, 1)
    assert address.startswith("s3://bucket/results/t/")
    assert num_bytes > 0
    reopened.remove("t")
    with pytest.raises(NotFound):
        reopened.read("t", lease.session_id, 1)


USES: dict[str, Callable[[], object]] = {
    "the check at the start": lambda: ArtifactResults("s3://bucket/results").prepare(),
    "reading a result": lambda: ArtifactResults("s3://bucket/results").read("t", "s", 1),
    "deleting results": lambda: ArtifactResults("s3://bucket/results").remove("t"),
    "storing turns": lambda: ObjectTurns("s3://bucket/.turns").append(turns(1, 0, 1)),
    "reading turns": lambda: ObjectTurns("s3://bucket/.turns").latest("s", 2),
    "listing turns": lambda: ObjectTurns("s3://bucket/.turns").sessions(),
    "forgetting turns": lambda: ObjectTurns("s3://bucket/.turns").forget("s"),
}


@pytest.mark.parametrize("use", USES)
def test_a_bucket_that_does_not_answer_is_an_error_of_the_store(use: str, s3: subprocess.Popen[bytes]) -> None:
    s3.kill()
    s3.wait()
    with pytest.raises(StoreError, match="could not be stored or read"):
        USES[use]()
