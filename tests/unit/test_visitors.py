"""Sign-in links and cookies: used once, expired, forged, and of another service."""

from __future__ import annotations

import string

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from gangline.domain.errors import NotFound, TooMany
from gangline.wire.http.visitors import COOKIE_S, LINK_S, MAX_LINKS, READ_ONLY_LINK_S, Visitor, Visitors

SECRET = b"s" * 32


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def visitors(clock: Clock) -> Visitors:
    return Visitors(SECRET, "token", clock=clock)


def who(visitors: Visitors, value: str, name: str | None = None) -> Visitor | None:
    cookie = f"{name or visitors.cookie_name}={value}"
    return visitors.visitor(make_mocked_request("GET", "/", headers={"Cookie": cookie}))


def signed_in(visitors: Visitors, *, read_only: bool = False) -> str:
    return visitors.sign_in(visitors.new_link(read_only=read_only)[0])


def test_a_link_is_used_once(visitors: Visitors) -> None:
    code, _ = visitors.new_link(read_only=False)
    visitors.check_link(code)
    visitors.sign_in(code)
    with pytest.raises(NotFound, match="used already"):
        visitors.check_link(code)
    with pytest.raises(NotFound, match="used already"):
        visitors.sign_in(code)


@pytest.mark.parametrize(("read_only", "lasts_s"), [(False, LINK_S), (True, READ_ONLY_LINK_S)])
def test_a_link_expires(visitors: Visitors, clock: Clock, read_only: bool, lasts_s: float) -> None:
    code, expires_at = visitors.new_link(read_only=read_only)
    assert expires_at == clock.now + lasts_s
    clock.now += lasts_s
    with pytest.raises(NotFound):
        visitors.sign_in(code)


def test_links_that_nobody_opens_are_bounded(visitors: Visitors, clock: Clock) -> None:
    for _ in range(MAX_LINKS):
        visitors.new_link(read_only=False)
    with pytest.raises(TooMany):
        visitors.new_link(read_only=False)
    clock.now += LINK_S
    visitors.new_link(read_only=False)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_cookie_says_what_its_link_allowed_until_it_expires(
    visitors: Visitors, clock: Clock, read_only: bool
) -> None:
    cookie = signed_in(visitors, read_only=read_only)
    found = who(visitors, cookie)
    assert found is not None
    assert found.read_only == read_only
    clock.now += COOKIE_S
    assert who(visitors, cookie) is None


def test_a_cookie_outlives_a_restart_and_no_change_of_token_or_secret(visitors: Visitors, clock: Clock) -> None:
    cookie = signed_in(visitors)
    assert who(Visitors(SECRET, "token", clock=clock), cookie) is not None
    for other in (Visitors(SECRET, "new token", clock=clock), Visitors(b"t" * 32, "token", clock=clock)):
        assert other.cookie_name != visitors.cookie_name
        assert who(other, cookie) is None


def test_a_read_only_cookie_does_not_become_another(visitors: Visitors) -> None:
    cookie = signed_in(visitors, read_only=True)
    rights, role, tenant, token_id, expires_at, nonce, mac = cookie.split(".")
    whose = f"{role}.{tenant}.{token_id}"
    assert rights == "r"
    for forged in (
        f"w.{whose}.{expires_at}.{nonce}.{mac}",
        f"r.{whose}.{int(expires_at) + 1}.{nonce}.{mac}",
        f"r.admin.{tenant}.0.{expires_at}.{nonce}.{mac}",
        f"w.{cookie}",
        f"{cookie}.{mac}",
        cookie.upper(),
        mac,
        "",
    ):
        assert who(visitors, forged) is None
    assert who(visitors, cookie, name="gangline") is None


@given(st.text(alphabet=string.ascii_letters + string.digits + ".-_~", max_size=200))
def test_no_other_value_is_a_cookie(value: str) -> None:
    assert who(Visitors(SECRET, "token"), value) is None
