"""What graders' libraries return, and what the node makes of it: data that MessagePack and JSON hold."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import logging
import pathlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gangline.domain.contracts import Reward
from gangline.domain.errors import EvaluatorError, GanglineError
from gangline.domain.plain import plain, plain_number, plain_text
from gangline.domain.plain_reward import plain_reward
from gangline.domain.tokens import decode_msgpack, encode_json, encode_msgpack
from gangline.node.sessions.evaluation import bounded
from gangline.node.sessions.failures import failure_of


class Colour(enum.Enum):
    RED = np.float32(0.5)


class Level(enum.IntEnum):
    HIGH = 3


class Point(msgspec.Struct):
    x: Any


class Model(BaseModel):
    x: Any


@dataclasses.dataclass
class Case:
    x: Any


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("not now")


class Hostile(Mapping[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        raise MemoryError

    def __iter__(self) -> Iterator[Any]:
        raise RecursionError

    def __len__(self) -> int:
        return 1


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("nothing to say")


def cycle() -> dict[str, Any]:
    found: dict[str, Any] = {"x": 1}
    found["self"] = [found]
    return found


def laughs() -> list[Any]:
    """Small in memory, endless when it is written down."""
    found: list[Any] = ["ha"]
    for _ in range(60):
        found = [found, found]
    return found


def deep(levels: int = 100_000) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


DAY = datetime.datetime(2026, 11, 29, 9, 0, tzinfo=datetime.UTC)

PLAIN: list[tuple[Any, Any]] = [
    (None, None),
    (np.float32(0.5), 0.5),
    (np.float64(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.float16(0.5), 0.5),
    (np.int64(3), 3),
    (np.uint64(2**64 - 1), 2**64 - 1),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
    (np.bytes_(b"a"), "a"),
    (np.array([1.5, 2]), [1.5, 2.0]),
    (np.array(3), 3),
    (np.array([["a", None]], dtype=object), [["a", None]]),
    (np.array([1, np.nan]), [1.0, "nan"]),
    (np.datetime64("2026-11-29T09:00"), "2026-11-29T09:00:00"),
    (torch.tensor(0.5, requires_grad=True), 0.5),
    (torch.tensor([1, 2]), [1, 2]),
    (torch.tensor(True), True),
    (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
    (decimal.Decimal("0.5"), 0.5),
    (decimal.Decimal("NaN"), "NaN"),
    (fractions.Fraction(1, 2), 0.5),
    (fractions.Fraction(10**400), str(10**400)),
    (float("nan"), "nan"),
    (float("-inf"), "-inf"),
    (2**64, str(2**64)),
    (-(2**63), -(2**63)),
    (-(2**63) - 1, str(-(2**63) - 1)),
    (123456789012345678901234567890, "123456789012345678901234567890"),
    (1j, "1j"),
    ("\ud83d", "\\ud83d"),
    (b"\xff\x00".decode("utf-8", "surrogateescape"), "\\udcff\x00"),
    (b"a\xff", "a\\xff"),
    (bytearray(b"a"), "a"),
    (memoryview(b"a"), "a"),
    (array.array("i", [1, 2]), [1, 2]),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset(["b", "a"]), ["a", "b"]),
    ((1, (2,)), [1, [2]]),
    (collections.deque([1]), [1]),
    (range(2), [0, 1]),
    ({"a": 1}.keys(), ["a"]),
    (collections.OrderedDict(a=np.int8(1)), {"a": 1}),
    (collections.Counter("a"), {"a": 1}),
    (Case(np.int8(1)), {"x": 1}),
    (Point({1}), {"x": [1]}),
    (Model(x=(1,)), {"x": [1]}),
    (Colour.RED, 0.5),
    (Level.HIGH, 3),
    (DAY, "2026-11-29T09:00:00+00:00"),
    (DAY.date(), "2026-11-29"),
    (datetime.timedelta(seconds=1), "0:00:01"),
    (pathlib.Path("/a/\udcff"), "/a/\\udcff"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (ValueError("bad \ud83d"), "ValueError: bad \\ud83d"),
    ({1: "a", "1": "b", (1, 2): "c", "\ud83d": "d"}, {"1": "a", "1'": "b", "(1, 2)": "c", "\\ud83d": "d"}),
    (Mute(), "(Mute, which cannot be shown)"),
    (Silent(), "(Silent, which cannot be shown)"),
    (cycle(), {"x": 1, "self": ["(a value that is around this one)"]}),
]  # fmt: skip


def goes_through(value: Any) -> Any:
    """As the server has it, and as the page reads it."""
    there = decode_msgpack(encode_msgpack({"x": value}), dict[str, Any])["x"]
    page = json.loads(encode_json({"x": there}))["x"]
    assert there == page == value
    return there


@pytest.mark.parametrize(("given_value", "expected"), PLAIN, ids=lambda one: type(one).__name__)
def test_a_value_of_any_library_becomes_plain(given_value: Any, expected: Any) -> None:
    found = goes_through(plain({"a": [given_value]}))["a"][0]
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "value",
    [
        *(deep(), laughs(), "x" * (20 << 20), ["x" * (1 << 20)] * 50, list(range(1_000_000)), np.zeros(10_000_000)),
        *({str(number): number for number in range(1_000_000)}, 10**5000, object(), Hostile()),
        *(lambda: 1, type, (one for one in "a")),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_value_of_any_size_or_kind_is_bounded_and_says_so(value: Any) -> None:
    assert 0 < len(encode_msgpack(goes_through(plain(value)))) < 9 << 20


texts = st.text(st.characters(exclude_categories=()))
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | texts | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.integers() | texts, inner),
    max_leaves=20,
)


@given(values)
def test_whatever_a_grader_returns_reaches_the_server_and_the_page(value: Any) -> None:
    once = goes_through(plain(value))
    assert plain(once) == once


NUMBERS: list[tuple[Any, float | None]] = [
    *((1, 1.0), (True, 1.0), (np.mean([0, 1]), 0.5), (np.bool_(True), 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0)),
    *((np.array([2.0]), 2.0), (torch.tensor(0.5), 0.5), (decimal.Decimal("0.5"), 0.5), (fractions.Fraction(1, 2), 0.5)),
    *((float("nan"), None), (np.float64("inf"), None), (10**400, None), ("1", None), (None, None), ([1.0], None)),
    *((np.ma.masked, None), (np.ma.mean(np.ma.array([1.0], mask=[True])), None), (np.ma.array([0.5]), 0.5)),
    *((np.ma.array([1.0], mask=[True]), None), (pd.Series([0.5]), 0.5), (pd.NA, None), (pd.NaT, None)),
    *((1j, None), (np.array([1.0, 2.0]), None), ({}, None), (Mute(), None), (fractions.Fraction(10**400), None)),
]


@pytest.mark.parametrize(
    ("value", "expected"),
    NUMBERS,
    ids=lambda one: type(one).__name__,
)
def test_a_reward_is_any_type_of_one_finite_number(value: Any, expected: float | None) -> None:
    assert plain_number(value) == expected
    if expected is None:
        with pytest.raises(EvaluatorError, match="reward must be a finite number"):
            plain_reward(Reward(reward=value))
    else:
        found = plain_reward(Reward(reward=value, turn_scores={"c1": value}, values={"reward": value}))
        assert (found.reward, found.turn_scores, found.values) == (expected, {"c1": expected}, {"reward": expected})
        assert type(found.reward) is float


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        (0.5, "not a Reward"),
        (None, "not a Reward"),
        (Reward(reward=1, turn_scores=cast(Any, [1])), "turn_scores must"),
        (Reward(reward=1, trace_rewards={"t0": cast(Any, "1")}), r"trace_rewards\['t0'\] must be a finite number"),
    ],
)
def test_what_is_not_a_reward_is_the_evaluators_failure(reward: Any, why: str) -> None:
    with pytest.raises(EvaluatorError, match=why):
        plain_reward(reward)


def test_details_that_are_not_named_are_kept_under_a_name() -> None:
    assert plain_reward(Reward(reward=1, details=cast(Any, [np.int8(1)]))).details == {"details": [1]}


def test_every_failure_can_be_sent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "gangline.node")  # pytest-xdist cannot send a report with such a log
    for failure in (GanglineError("cut \ud83d").failure(), failure_of(RuntimeError("cut \ud83d"), "s1")):
        assert goes_through(failure.message).endswith("cut \\ud83d")
    assert failure_of(Silent(), "s1").message == "(Silent, which cannot be shown)"


def test_every_artifact_can_be_sent() -> None:
    given_artifacts = cast(Any, {"\udcff": b"a", "text": "\ud83d", "view": memoryview(b"b"), "number": 1})
    assert bounded(given_artifacts) == {"\\udcff": b"a", "text": b"\\ud83d", "view": b"b", "number": b"1"}
    assert bounded({pathlib.Path("log.txt"): b"a", 1: b"b"}) == {"log.txt": b"a", "1": b"b"}


def test_text_without_lone_surrogates_stays_as_it_is() -> None:
    assert plain_text("né 🐕 \x00") == "né 🐕 \x00"
