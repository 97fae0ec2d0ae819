import pytest

from gangline.domain.errors import EvaluatorError
from gangline.evaluators.untrusted.patterns import matches


async def test_a_pattern_without_end_is_stopped_and_gives_no_reward() -> None:
    with pytest.raises(EvaluatorError, match="took longer"):
        await matches([(r"(a+)+$", False)], "a" * 40 + "b", timeout_s=0.5)


async def test_answers_come_in_the_order_of_the_patterns() -> None:
    assert await matches([("a", False), ("B", False), ("B", True)], "ab\udcff", timeout_s=60) == [True, False, True]
