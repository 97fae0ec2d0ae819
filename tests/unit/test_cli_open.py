"""`gangline open PART` leads to that part of the page, and refuses a part that the page does not have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gangline.cli.results import page
from gangline.cli.terminal.output import open_command
from gangline.domain.errors import InvalidRequest
from gangline.domain.views import PageLink
from gangline.server.routes.page import _SIGNING_IN  # pyright: ignore[reportPrivateUsage]
from gangline.wire.client.running import Service


@pytest.fixture(autouse=True)
def service(monkeypatch: pytest.MonkeyPatch) -> None:
    async def link(_service: Service, read_only: bool) -> PageLink:
        return PageLink(path="/open/link-1", read_only=read_only, expires_at=0.0)

    def found(_data: Path | None, _server: str | None) -> Service:
        return Service(server_url="http://h:8700", control_token=None)

    monkeypatch.setattr("gangline.wire.client.running.find_service", found)
    monkeypatch.setattr(page, "_link", link)


@pytest.mark.parametrize(
    ("part", "after"),
    [
        ("", ""),
        ("runs", "#/runs"),
        ("#/runs/mine", "#/runs/mine"),
        ("/sessions/t.0", "#/sessions/t.0"),
        ("evaluations/b-1?with=a-1", "#/evaluations/b-1?with=a-1"),
        ("find?words=two words", "#/find?words=two%20words"),
    ],
)
def test_the_link_leads_to_the_part(part: str, after: str, capsys: pytest.CaptureFixture[str]) -> None:
    page.open_page(part, read_only=False, browser=False, as_json=False)
    assert capsys.readouterr().out == f"http://h:8700/open/link-1{after}\n"


def test_signing_in_keeps_the_part() -> None:
    assert 'location.replace("/"+location.hash)' in _SIGNING_IN


@pytest.mark.parametrize("part", ["evals/x", "session/t.0", "task-1.0", "https://h/", "run"])
def test_an_unknown_part_is_refused_with_those_that_there_are(part: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape("evaluations, find, runs, sessions, tasks")):
        page.open_page(part, read_only=False, browser=False, as_json=False)


def test_the_command_that_is_printed_can_be_pasted() -> None:
    assert open_command("runs/mine") == "gangline open runs/mine"
    told = open_command("evaluations/b?with=a", Path("/my data"), "http://h:1")
    assert told == "gangline open 'evaluations/b?with=a' --data '/my data' --server http://h:1"
