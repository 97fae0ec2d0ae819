"""Samples side by side: where they differ, and which of them are alike for longest."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.domain.conversation import Message, Text
from gangline.server.web.alignment import AlignedSamples, align
from gangline.server.web.outline import OpenedSession, open_session
from gangline.server.web.tokens import recorded_texts
from support.page.sessions import Talk, working_session


def said(*replies: str, reward: float | None = 0.0) -> OpenedSession:
    talk = Talk()
    before = None
    for reply in replies:
        news = (Message("user", (Text("Go on."),)),)
        before = talk.call(news, (Text(reply),), prompt=" Go on.", sampled=reply, after=before)
    return open_session(talk.result(reward))


def aligned(*group: OpenedSession) -> AlignedSamples:
    return align("t", [(index, session, recorded_texts(session.calls)) for index, session in enumerate(group)])


def places(group: AlignedSamples) -> Sequence[tuple[int | None, int | None, bool, str]]:
    return [(one.leaves_in_call, one.leaves_at_token, one.is_sampled, one.next_text) for one in group.samples]


def test_samples_leave_at_the_first_token_that_differs() -> None:
    group = aligned(said(" a b", " c d"), said(" a b", " c e f"), said(" a b", " c d"))
    assert group.num_alike_ids == 2 + 2 + 2 + 1
    assert places(group) == [(1, 3, True, " d"), (1, 3, True, " e f"), (1, 3, True, " d")]
    assert [(one.nearest, one.num_like_nearest) for one in group.samples] == [(None, 0), (0, 7), (0, 8)]
    assert [[call.number for call in one.calls] for one in group.samples] == [[1], [1], [1]]


def test_a_sample_that_ends_before_the_others_leaves_in_no_call() -> None:
    group = aligned(said(" a b"), said(" a b", " c"))
    assert places(group) == [(None, None, False, ""), (1, 0, False, " c")], "texts are known of sampled tokens alone"


def test_advantages_are_over_the_samples_that_have_a_reward() -> None:
    group = aligned(said(" a", reward=1.0), said(" a", reward=0.0), said(" a", reward=None))
    assert [one.advantage for one in group.samples] == [0.5, -0.5, None]


def test_sub_agents_are_left_out() -> None:
    (sample,) = aligned(open_session(working_session())).samples
    assert sample.num_calls == 5
    assert aligned().samples == ()


def test_a_sample_without_calls_shares_nothing() -> None:
    assert aligned(said(), said(" a")).num_alike_ids == 0
