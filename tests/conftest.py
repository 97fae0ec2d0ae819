"""Shared by all tests: a skip is a failure where everything is required (GANGLINE_REQUIRE_ALL=1, as in CI).

A test that has no meaning here, rather than lacks something, says so: its reason begins with `does not apply:`.
"""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings

from support.requirements import DOES_NOT_APPLY, everything_is_required
from support.store.databases import any_database, postgres

__all__ = ["any_database", "postgres"]

# No test fails for its time: on a busy machine an example takes seconds.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# For `make mutation`: the same examples for every mutant, and one that fails is enough.
settings.register_profile(
    "mutation",
    settings.get_profile("untimed"),
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
# CI judges a change, so it tries the same examples on every commit, as Hypothesis does in the CI services it knows.
# Elsewhere each run looks for new ones.
if everything_is_required():
    settings.register_profile("ci", settings.get_profile("untimed"), derandomize=True, database=None)
    settings.load_profile("ci")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Else the threads of one model spin while they wait for each other on processors that other tests use.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


_LONGEST_TEARDOWN_S = 240
_stderr_fd = 2
"""While a test runs, its output is captured from 2."""

# A collection of garbage visits all that is alive: while the tests are imported, more of it each time. That takes 7 of
# 17 seconds, in each worker. Afterwards all that was imported stays, and is not visited again.
gc.disable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


_lost_workers: list[object] = []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object | None) -> None:
    """Of pytest-xdist. A worker that is lost is not replaced, and its other tests are not run."""
    if error is not None:
        _lost_workers.append(node)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """CI runs again what failed. Of a run that did not come to its end, that would leave out what was not run.

    The names of what failed are added to the file that GANGLINE_FAILED names.
    """
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (named := os.environ.get("GANGLINE_FAILED")) and reporter is not None:
        failed = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
        with open(named, "a", encoding="utf-8") as names:
            names.writelines(f"{report.nodeid}\n" for report in failed)
    came_to_its_end = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not _lost_workers
    if not came_to_its_end and session.config.pluginmanager.hasplugin("cacheprovider"):
        session.config.cache.set("cache/lastfailed", {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and everything_is_required():
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if DOES_NOT_APPLY in why:
            return report
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} may not be skipped here (GANGLINE_REQUIRE_ALL=1): {why}"
    return report


def pytest_configure() -> None:
    global _stderr_fd
    _stderr_fd = os.dup(2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process where a test hangs beyond its time limit, and show where each of its threads is.

    The limit strikes once, as an exception, wherever the main thread then is: a callback of an event loop, or a task
    that belongs to something else, swallows it.
    """
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker is not None else item.config.getini("timeout"))
    return (yield from _watched(limit_s + 60))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """The same for a teardown: pytest ends the watch over a test that fails, and its time limit may have struck.

    A thread that waits for ever keeps a loop from being closed.
    """
    return (yield from _watched(_LONGEST_TEARDOWN_S))


def _watched(limit_s: float) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_stderr_fd)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
