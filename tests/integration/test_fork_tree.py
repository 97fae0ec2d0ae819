"""The tree of forks that a session is in, read from any of its sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.domain.errors import NotFound
from gangline.domain.task import TaskRequest
from gangline.server.run import serving
from gangline.server.service.fork_tree import fork_tree
from gangline.store.sql.tasks import TaskStore
from gangline.wire.client.server import ServerClient
from support.service.older_stores import make_older
from support.service.running import FakeNode, any_plugin, request


def fork(task_id: str, parent: str, turn: int, **fields: Any) -> TaskRequest:
    spec = {"session_id": parent, "attempt": 1, "turn": turn, **fields}
    return TaskRequest.model_validate(request(task_id, num_samples=2, fork=spec))


def plain(task_id: str) -> TaskRequest:
    return TaskRequest.model_validate(request(task_id, num_samples=2))


def test_forks_of_forks_are_found_from_each_of_them(any_database: str | Path) -> None:
    store = TaskStore(any_database)
    try:
        store.submit([plain("p"), plain("other")])
        store.submit([fork("a", "p.0", 3), fork("b", "p.0", 1, edit="x" * 5000)])
        store.submit([fork("c", "a.1", 5)])
        tree = fork_tree(store, "a.0")
        assert [(node.session_id, node.parent, node.depth, node.turn) for node in tree.nodes] == [
            ("p.0", None, 0, None),
            ("a.0", "p.0", 1, 3),
            ("a.1", "p.0", 1, 3),
            ("c.0", "a.1", 2, 5),
            ("c.1", "a.1", 2, 5),
            ("b.0", "p.0", 1, 1),
            ("b.1", "p.0", 1, 1),
        ]
        assert tree.is_whole
        assert [None if node.edit is None else len(node.edit) for node in tree.nodes][-2:] == [2000, 2000]
        for one in tree.nodes:
            assert fork_tree(store, one.session_id) == tree
        assert [node.session_id for node in fork_tree(store, "other.1").nodes] == ["other.1"]
        with pytest.raises(NotFound):
            fork_tree(store, "nobody")
    finally:
        store.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("parents", [{"a": "a.0"}, {"a": "b.0", "b": "a.0"}, {"a": "b.1", "b": "c.0", "c": "a.1"}])
def test_forks_that_lead_round_in_a_circle_end_where_it_closes(tmp_path: Path, parents: dict[str, str]) -> None:
    store = TaskStore(tmp_path / "tasks.db")
    try:
        store.submit([fork(task_id, parent, 1) for task_id, parent in parents.items()])
        for parent in parents.values():
            found = [node.session_id for node in fork_tree(store, parent).nodes]
            assert parent in found
            assert len(found) == len(set(found))
    finally:
        store.close()


def test_a_tree_of_very_many_forks_is_cut(tmp_path: Path) -> None:
    store = TaskStore(tmp_path / "tasks.db")
    try:
        store.submit([plain("p")])
        store.submit([fork(f"f{number}", "p.0", 1) for number in range(101)])
        tree = fork_tree(store, "p.0")
        assert (len(tree.nodes), tree.is_whole) == (201, False)
    finally:
        store.close()


async def test_a_fork_whose_parent_was_deleted_is_the_first_of_its_tree(tmp_path: Path) -> None:
    async with (
        serving(data_dir=tmp_path, control_token=None, check_task=any_plugin) as running,
        ServerClient(running.url, None) as client,
    ):
        await client.submit(fork("a", "gone.0", 3))
        tree = await client.forks("a.0")
        assert [(node.session_id, node.parent) for node in tree.nodes] == [("a.0", None)]
        await FakeNode(client).finish(await FakeNode(client).lease(), reward=1.0)
        (node,) = (await client.forks("a.0")).nodes
        assert (node.state, node.outcome, node.reward) == ("ended", "completed", 1.0)


def test_forks_that_a_version_without_trees_stored_are_found(any_database: str | Path) -> None:
    store = TaskStore(any_database)
    store.submit([plain("p"), fork("a", "p.1", 3)])
    with store.database.writing() as conn:
        conn.exec_driver_sql("DROP INDEX tasks_by_fork")
        conn.exec_driver_sql("ALTER TABLE tasks DROP COLUMN fork_of")
        make_older(conn, 4)
    store.close()
    store = TaskStore(any_database)
    try:
        assert [node.session_id for node in fork_tree(store, "p.1").nodes] == ["p.1", "a.0", "a.1"]
    finally:
        store.close()
