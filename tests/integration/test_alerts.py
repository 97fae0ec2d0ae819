"""Our alerts and dashboard: promtool accepts them, their metrics exist, and each alert has a part of the runbook."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.requirements import need_command
from support.service.prometheus import ALERTS, INSTALL

REPOSITORY = Path(__file__).parents[2]
DASHBOARD = REPOSITORY / "deploy" / "grafana" / "gangline.json"


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [rule["expr"] for rule in rules()] + [one["expr"] for panel in panels for one in panel["targets"]]


@pytest.mark.parametrize("words", [("check", "rules", ALERTS), ("test", "rules", ALERTS.with_name("alerts_test.yaml"))])
def test_promtool_accepts_the_alerts_and_their_unit_tests(words: tuple[object, ...]) -> None:
    need_command("promtool", INSTALL)
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    need_command("promtool", INSTALL)
    records = [{"record": f"dashboard:{place}", "expr": expr} for place, expr in enumerate(expressions())]
    (tmp_path / "rules.yaml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": records}]}))
    done = subprocess.run(["promtool", "check", "rules", tmp_path / "rules.yaml"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_metric_of_alerts_and_dashboard_is_one_of_a_server() -> None:
    """By the generated reference, which `docs/generate.py --check` holds to the code."""
    of_servers = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text().split("\n## Node\n")[0]
    known = set(re.findall(r"^- `(\w+)", of_servers, re.MULTILINE))
    used = {name for expr in expressions() for name in re.findall(r"gangline_\w+", expr)}
    assert used
    assert used <= known, used - known


def test_every_alert_says_what_and_leads_to_a_part_of_the_runbook() -> None:
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        headings = re.findall(r"^## (.+)$", (REPOSITORY / page).read_text(), re.MULTILINE)
        assert anchor in {heading.lower().replace(" ", "-") for heading in headings}, rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_alert_fires_in_a_unit_test() -> None:
    tested = ALERTS.with_name("alerts_test.yaml").read_text()
    assert [rule["alert"] for rule in rules() if rule["alert"] not in tested] == []
