"""Shared by all tests: a skip is a failure where everything is required (GANGLINE_REQUIRE_ALL=1, as in CI)."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from requirements import everything_is_required


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and everything_is_required():
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped here (GANGLINE_REQUIRE_ALL=1): {why}"
    return report
