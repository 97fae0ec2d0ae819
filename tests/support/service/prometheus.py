"""A real Prometheus over a running server, with the alerts that Gangline ships."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.requirements import need_command

ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts.yaml"
INSTALL = "apt-get install prometheus"

_CONFIG = """
global: {{scrape_interval: 15s, evaluation_interval: 15s}}
rule_files: [{alerts}]
scrape_configs:
  - job_name: gangline
    authorization: {{credentials: {token}}}
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def firing(self) -> list[dict[str, Any]]:
        """The alerts that fire now; empty while it starts."""
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/alerts", timeout=5) as answer:
                alerts = json.load(answer)["data"]["alerts"]
        except OSError:
            return []
        return [alert for alert in alerts if alert["state"] == "firing"]


@contextmanager
def prometheus(folder: Path, server_url: str, token: str) -> Generator[Prometheus]:
    """It scrapes and judges every 15 s, as the operations guide says."""
    need_command("prometheus", INSTALL)
    folder.mkdir()
    config = folder / "prometheus.yaml"
    config.write_text(_CONFIG.format(alerts=ALERTS, token=token, target=server_url.removeprefix("http://")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
