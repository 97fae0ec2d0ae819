"""Laws of the action server: bytes are unchanged, edits follow a model, lines survive any cutting."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gangline.agents.tools.action_server import ActionServer
from gangline.agents.tools.in_sandbox.loop import Lines, Loop
from gangline.agents.tools.in_sandbox.messages import dumps, loads
from gangline.agents.tools.in_sandbox.output import Output
from gangline.domain.errors import ActionRefused
from support.node.tools import action_server


class Running:
    """An action server and the loop that it lives in, for tests that are functions."""

    def __init__(self, runner: asyncio.Runner, server: ActionServer, folder: Path) -> None:
        self.run = runner.run
        self.server = server
        self.folder = folder


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Generator[Running]:
    folder = tmp_path_factory.mktemp("work")
    with asyncio.Runner() as runner:
        context = action_server(folder)
        server = runner.run(context.__aenter__())
        yield Running(runner, server, folder)
        runner.run(context.__aexit__(None, None, None))


@given(pieces=st.lists(st.tuples(st.binary(max_size=300), st.sampled_from(["", ">&2", "| cat"])), max_size=6),
       code=st.integers(0, 255))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_bytes_and_the_code_of_a_command_are_unchanged(
    running: Running, pieces: list[tuple[bytes, str]], code: int
) -> None:
    lines = ["printf '" + "".join(f"\\{byte:03o}" for byte in piece) + f"' {way}" for piece, way in pieces]
    command = "\n".join([*lines, f"(exit {code})"])
    result = running.run(running.server.shell.run(command, timeout_s=60))
    assert result.output.head + result.output.tail == b"".join(piece for piece, _ in pieces)
    assert (result.state, result.exit_code, result.is_new) == ("ended", code, False)


WORDS = st.text(alphabet="ab\né\\1'$", max_size=8)
EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), WORDS, st.just("")),
        st.tuples(st.just("replace"), WORDS, WORDS),
        st.tuples(st.just("insert"), WORDS, st.integers(0, 4)),
        st.tuples(st.just("undo"), st.just(""), st.just("")),
    ),
    max_size=12,
)


class Model:
    """A file as it should become."""

    def __init__(self) -> None:
        self.text: str | None = None
        self._undos: list[str | None] = []

    def apply(self, kind: str, text: str, other: str | int) -> bool:
        """Whether the edit is done."""
        after = self._after(kind, text, other)
        if after is None:
            return False
        if kind == "undo":
            self.text = self._undos.pop()
        else:
            self._undos.append(self.text)
            self.text = after
        return True

    def _after(self, kind: str, text: str, other: str | int) -> str | None:
        match kind:
            case "write":
                return text
            case "undo":
                return "" if self._undos else None
            case _ if self.text is None:
                return None
            case "replace":
                is_unique = text != "" and sum(self.text.startswith(text, n) for n in range(len(self.text))) == 1
                return self.text.replace(text, str(other)) if is_unique else None
            case _:
                return self._inserted(self.text, text, int(other))

    @staticmethod
    def _inserted(before: str, text: str, after_line: int) -> str | None:
        lines = [line + "\n" for line in before.split("\n")]
        lines = lines[:-1] if before.endswith("\n") or not before else lines
        if after_line > len(lines):
            return None
        whole = text if text.endswith("\n") else text + "\n"
        joined = "".join([*lines[:after_line], whole, *lines[after_line:]])
        unended = before and not before.endswith("\n") and after_line < len(lines)
        return joined[:-1] if unended else joined


@given(edits=EDITS)
@settings(max_examples=60, deadline=None)
def test_edits_follow_the_model(running: Running, edits: list[tuple[str, str, str | int]]) -> None:
    model = Model()
    files = running.server.files
    path = f"file-{os.urandom(8).hex()}"
    for kind, text, other in edits:
        action = {
            "write": lambda t=text: files.write(path, t),
            "replace": lambda t=text, o=other: files.replace(path, old=t, new=str(o)),
            "insert": lambda t=text, o=other: files.insert(path, t, after_line=int(o)),
            "undo": lambda: files.undo(path),
        }[kind]
        done = True
        try:
            running.run(action())
        except ActionRefused:
            done = False
        assert done == model.apply(kind, text, other), (kind, text, other, model.text)
        found = (running.folder / path).read_text() if (running.folder / path).exists() else None
        assert found == model.text
        if found is not None:
            view = running.run(files.view(path))
            assert view.lines == (found.removesuffix("\n").split("\n") if found else [])


@given(
    lines=st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8),
    cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_lines_come_whole_however_they_are_cut_and_long_ones_are_dropped(lines: list[bytes], cuts: list[int]) -> None:
    ours, theirs = socket.socketpair()
    loop = Loop()
    seen: list[bytes] = []
    received = Lines(loop, theirs.detach(), seen.append, loop.stop, max_bytes=20)
    data = b"".join(line + b"\n" for line in lines)
    turn = loop._turn
    while data:
        size = cuts[len(data) % len(cuts)]
        ours.sendall(data[:size])
        data = data[size:]
        turn()
    ours.close()
    loop.run()
    assert received.fd == -1
    assert seen == [line if len(line) <= 20 else b"" for line in lines]


@given(pieces=st.lists(st.binary(max_size=30), max_size=20), max_bytes=st.integers(0, 50))
def test_output_keeps_its_head_and_its_tail(pieces: list[bytes], max_bytes: int) -> None:
    import base64

    output = Output(max_bytes)
    for piece in pieces:
        output.add(piece)
    whole = b"".join(pieces)
    told = output.as_dict()
    head, tail = base64.b64decode(told["head"]), base64.b64decode(told["tail"])
    assert len(head) + told["omitted_bytes"] + len(tail) == len(whole)
    assert len(head) + len(tail) == min(len(whole), max_bytes)
    assert whole.startswith(head)
    assert whole.endswith(tail)
    if told["omitted_bytes"]:
        assert (len(head), len(tail)) == (max_bytes - max_bytes // 2, max_bytes // 2)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@given(value=VALUES)
def test_messages_are_what_the_module_json_makes_and_reads(value: object) -> None:
    line = dumps(value)
    assert line == json.dumps(value)
    assert loads(line) == loads(f" {line}\n".encode()) == value


@given(text=st.text(alphabet='{}[]",:1-.e tru\\u0\n') | st.text(), cut=st.integers(0, 5))
def test_what_is_no_message_is_refused_as_the_module_json_refuses_it(text: str, cut: int) -> None:
    line = text.encode("utf-8", "surrogatepass")[cut:]
    try:
        expected = json.loads(line.decode("utf-8", "surrogatepass"))
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011 - `json` itself has many messages for it
            loads(line)
    else:
        assert repr(loads(line)) == repr(expected)  # NaN is equal to nothing
