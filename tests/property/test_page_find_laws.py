"""Find: any words are a query, and a session is found by each of its words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.conversation import Message, Text, ToolCall, ToolResult
from gangline.server.web.finding import Wanted, find, open_index
from gangline.server.web.indexing import add_session, drop_session, found_rules
from support.page.sessions import Talk, working_session


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("find") / "find.db"
    with closing(open_index(path)) as opened:
        add_session(opened, working_session("t.0"), "shell", "default")
        add_session(opened, working_session("t.1", reward=1.0), "shell", "default")
        yield path


WORDS = sorted(set(re.findall(r"[a-z]+", "the sign is wrong a helper looks at tests make pass")))


@given(words=st.text(max_size=60) | st.text('" *()^:-+NEAROT\x00', max_size=40))
def test_any_words_are_a_query(index: Path, words: str) -> None:
    assert len(find(index, Wanted(words=words), 0).sessions) in (0, 1, 2)


@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=1))
def test_a_session_is_found_by_each_of_its_words(index: Path, words: list[str]) -> None:
    assert len(find(index, Wanted(words=" ".join(words).upper()), 0).sessions) == 2


def test_what_is_dropped_leaves_nothing_behind(tmp_path: Path) -> None:
    with closing(open_index(tmp_path / "find.db")) as opened:
        for _ in range(2):  # the second one replaces the first
            add_session(opened, working_session("t.0"), "shell", "default")
        add_session(opened, working_session("t.1", reward=1.0), "shell", "default")
        drop_session(opened, "t.0")
        assert len(find(tmp_path / "find.db", Wanted(words="sign"), 0).sessions) == 1
        drop_session(opened, "t.1")
        for table in ("sessions", "places", "digests", "texts"):
            assert opened.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        opened.execute("INSERT INTO texts(texts) VALUES ('integrity-check')")  # raises where it is not whole


@pytest.mark.parametrize(
    ("patches", "expected"),
    [({"patch.diff": b" \n"}, True), ({"patch.diff": b"diff --git"}, False), ({"other": b""}, False)],
)
def test_an_empty_patch_is_found(tmp_path: Path, patches: dict[str, bytes], expected: bool) -> None:
    with closing(open_index(tmp_path / "find.db")) as opened:
        add_session(opened, msgspec.structs.replace(working_session("t.0"), artifacts=patches), "shell", "default")
    found = find(tmp_path / "find.db", Wanted(rule="empty_patch"), 0).sessions
    assert bool(found) == expected


@pytest.mark.parametrize(
    ("commands", "is_error", "expected"),
    [
        (["ls"], False, []),
        (["ls"], True, ["tool_error"]),
        (["pytest -q", "pytest -q", "pytest -q"], False, ["repeated_action"]),
        (["pytest -q", "ls", "pytest -q", "pytest -q"], False, []),
        (["cd /x && git --no-pager log -3"], False, ["git_history"]),
        (["git status; echo log"], False, []),
        (["echo 'def test_x(): pass' > tests/test_add.py"], False, ["test_edited"]),
        (["sed -i s/1/2/ src/add_test.py"], False, ["test_edited"]),
        (["cat tests/test_add.py > /dev/null"], False, []),
    ],
)
def test_rules_find_what_they_are_named_for(commands: list[str], is_error: bool, expected: list[str]) -> None:
    talk = Talk()
    before = None
    for command in commands:
        news = (Message("tool", (ToolResult("c", (Text("out"),), is_error=is_error),)),)
        before = talk.call(news, (ToolCall("c", "shell", command),), prompt="p", sampled=command, after=before)
    assert found_rules(talk.calls) == expected
