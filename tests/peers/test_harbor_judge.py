"""Harbor's own runner as judge: it and Gangline give the same tasks, with the same agents, the same rewards.

GANGLINE_HARBOR_PYTHON names the interpreter of an environment with `harbor`, whose Docker environment needs
`docker compose`.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from containers.engines import IMAGE
from containers.test_container_images import engine
from containers.test_container_sessions import service
from e2e.test_field_tasks import NOTHING, ended, imported, solved, with_command
from support.compared import same
from support.requirements import need
from support.service.field_tasks import write

HARBOR = os.environ.get("GANGLINE_HARBOR_PYTHON", "")
BASE, WITH_TESTS = "localhost/gangline-test-app:1", "localhost/gangline-test-verifier:1"
TOML = f"""
schema_version = "1.4"
[agent]
timeout_sec = 120
[verifier]
timeout_sec = 120
[environment]
docker_image = "{BASE}"
workdir = "/app"
"""
SEPARATE = TOML.replace("[verifier]", '[verifier]\nenvironment_mode = "separate"')
STEPS = """
[[steps]]
name = "fill"
min_reward = 0.25
[[steps]]
name = "ask"
verifier = { environment_mode = "separate", timeout_sec = 120 }
"""
ARTIFACTS = 'artifacts = ["/app/answer", {source = "/app/out", exclude = ["*.log"]}]\n'
REWARD = "#!/bin/bash\n{}\necho $reward > /logs/verifier/reward.txt\n"
CALL = (
    "python3 -c \"import sys, urllib.request as u; r = u.Request(*sys.argv[1:2], method=sys.argv[2], data=b'sled'); "
    'print(u.urlopen(r).read().decode())" http://store/'
)
OF_STORE = 'artifacts = [{ source = "/srv/kept", service = "store", exclude = ["*.log"] }]\n'
HOOK = f"""
[[verifier.collect]]
service = "store"
command = '''mkdir /srv/kept; touch /srv/kept/a.log; {CALL} GET > /srv/kept/word'''
"""
STORE = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    word = open("/srv/word").read().strip()
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(Handler.word.encode())
    def do_PUT(self):
        Handler.word = self.rfile.read(int(self.headers["Content-Length"])).decode(); self.do_GET()
http.server.ThreadingHTTPServer(("", 80), Handler).serve_forever()
"""
COMPOSE = f"""
services:
  main:
    environment: {{STORE: "http://store/"}}
    depends_on:
      store: {{condition: service_healthy}}
      filled: {{condition: service_completed_successfully}}
  store:
    image: {IMAGE}
    entrypoint: [sh, -c]
    command: ["mkdir -p /srv && echo $$WORD > /srv/word && exec python3 -c \\"$$PROGRAM\\""]
    environment:
      WORD: ${{JUDGE_WORD:-mush}}
      PROGRAM: {json.dumps(STORE)}
    healthcheck:
      test: ["CMD", "python3", "-c", "import urllib.request; urllib.request.urlopen('http://localhost/')"]
      interval: 1s
      retries: 60
  filled:
    image: {IMAGE}
    command: [python3, -c, "import urllib.request; urllib.request.urlopen('http://store/').read()"]
    depends_on:
      store: {{condition: service_healthy}}
"""


def harbor_task(folder: Path, toml: str, solve: str, test: str | None, **files: str) -> Path:
    write(folder / "task.toml", toml)
    write(folder / "instruction.md", "Do what is to be done.\n")
    write(folder / "environment" / "README", "Its image is there.\n")
    write(folder / "solution" / "solve.sh", f"#!/bin/bash\n{solve}\n", 0o755)
    if test is not None:
        write(folder / "tests" / "test.sh", REWARD.format(test), 0o755)
    for path, text in files.items():
        write(folder / path, text)
    return folder


def tasks(root: Path) -> dict[str, Path]:
    """Name -> folder."""
    is_answered = '[ "$(cat /app/answer)" = "$(cat /tests/wanted)" ]'
    compose = {"environment/docker-compose.yaml": COMPOSE}
    of_store = f'reward=0; [ "$({CALL} GET)" = sled ] && reward=1'
    of_both = f'reward=0; {is_answered} && reward=0.5; [ "$({CALL} GET)" = mush ] && reward=1$reward'
    made: dict[str, tuple[str, str, str | None, dict[str, str]]] = {
        "shared": (TOML, "echo red > answer", f"reward=0.25; {is_answered} && reward=1; true", {"tests/wanted": "red"}),
        "several": (
            TOML + '[verifier.env]\nWANTED = "red"\n',
            "echo red > answer",
            'r=0; [ "$(cat /app/answer)" = $WANTED ] && r=1\n'
            'echo "{\\"reward\\": $r, \\"steps\\": 3}" > /logs/verifier/reward.json\nreward=0.125; exit 7',
            {},
        ),
        "separate": (
            ARTIFACTS + SEPARATE,
            "mkdir out; echo red > answer; touch out/a out/b.log /logs/artifacts/c /app/lost",
            f"reward=0; {is_answered} && reward=$(ls /app/out /logs/artifacts /app/lost | grep -cE '^(a|b.log|c)$')",
            {"tests/wanted": "red"},
        ),
        "own_image": (
            ARTIFACTS + SEPARATE + f'[verifier.environment]\ndocker_image = "{WITH_TESTS}"\n',
            "echo red > answer",
            None,
            {},
        ),
        "services": (TOML, f"{CALL} PUT", of_store, compose),
        "fresh_services": (
            ARTIFACTS + SEPARATE,
            f"{CALL} PUT; echo red > answer",
            of_both,
            {**compose, "tests/wanted": "red"},
        ),
        "collected_from_services": (
            OF_STORE + SEPARATE + HOOK,
            f"{CALL} PUT",
            'reward=0; [ "$(cat /srv/kept/word)" = sled ] && [ ! -e /srv/kept/a.log ] && reward=1; true',
            compose,
        ),
        "steps_with_services": (
            ARTIFACTS + TOML + STEPS,
            "false",
            None,
            {
                **compose,
                "steps/fill/instruction.md": "Fill the store.\n",
                "steps/fill/solution/solve.sh": f"#!/bin/bash\n{CALL} PUT\n",
                "steps/fill/tests/test.sh": REWARD.format(f'reward=0.25; [ "$({CALL} GET)" = sled ] && reward=1; true'),
                "steps/ask/instruction.md": "Ask the store.\n",
                "steps/ask/solution/solve.sh": f"#!/bin/bash\n{CALL} GET > answer\n",
                "steps/ask/tests/test.sh": REWARD.format(of_both),
                "steps/ask/tests/wanted": "sled",
            },
        ),
    }
    return {name: harbor_task(root / name, *parts[:3], **parts[3]) for name, parts in made.items()}


@pytest.fixture
def images(docker: None) -> Generator[None]:
    """An image with a working folder, and one with tests."""
    test = REWARD.format('reward=0; [ "$(cat /app/answer)" = red ] && reward=0.75')
    script = f"mkdir -p /app /tests && printf %s {shlex.quote(test)} > /tests/test.sh && chmod 755 /tests/test.sh"
    for image, program in ((BASE, "mkdir /app"), (WITH_TESTS, script)):
        engine("docker", "run", "--network", "none", "--name", "gangline-test-judge", IMAGE, "sh", "-c", program)
        engine("docker", "commit", "--change", "WORKDIR /app", "gangline-test-judge", image)
        engine("docker", "rm", "gangline-test-judge")
    yield
    engine("docker", "rmi", BASE, WITH_TESTS)


def judged(folder: Path, folders: dict[str, Path]) -> dict[tuple[str, str], float | None]:
    """(task, agent) -> reward, as Harbor's runner gives it."""
    command = shlex.split(os.environ["GANGLINE_DOCKER"])
    env = {**os.environ, "DOCKER_HOST": command[command.index("--host") + 1], "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    job = {
        "job_name": "judged",
        "jobs_dir": str(folder / "jobs"),
        "n_concurrent_trials": 2,
        "agents": [{"name": "oracle"}, {"name": "nop"}],
        "tasks": [{"path": str(path)} for path in folders.values()],
    }
    config = write(folder / "job.json", json.dumps(job))
    harbor = [HARBOR, "-m", "harbor.cli.main", "run", "--config", str(config), "--yes"]
    done = subprocess.run(harbor, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[tuple[str, str], float | None] = {}
    for path in (folder / "jobs" / "judged").glob("*/result.json"):
        trial: dict[str, Any] = json.loads(path.read_text())
        assert trial["exception_info"] is None, trial["exception_info"]
        found[Path(trial["task_id"]["path"]).name, trial["agent_info"]["name"]] = trial["verifier_result"]["rewards"][
            "reward"
        ]
    return found


@pytest.mark.timeout(1800)
async def test_harbors_runner_and_gangline_give_the_same_rewards(images: None, tmp_path: Path) -> None:
    need(HARBOR, "GANGLINE_HARBOR_PYTHON names no Python with Harbor: run make test-peers")
    compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    need(compose.returncode == 0, "docker has no plug-in `compose`: run make test-peers")
    folders = tasks(tmp_path / "tasks")
    wanted = judged(tmp_path, folders)
    up = service(tmp_path / "up")
    try:
        assert up.ready(), "the service did not start"
        bodies = {name: imported(path, "--network", "proxy") for name, path in folders.items()}
        runs = {(name, "oracle"): solved(body) for name, body in bodies.items()}
        runs |= {(name, "nop"): with_command(body, NOTHING) for name, body in bodies.items()}
        given = dict(zip(runs, await ended(up, *runs.values()), strict=True))
    finally:
        up.close()
    same("Harbor, in Docker", {key: ("completed", reward) for key, reward in wanted.items()}, given)
    oracle = {"shared": 1, "several": 1, "separate": 2, "own_image": 0.75, "services": 1, "fresh_services": 10.5}
    oracle |= {"collected_from_services": 1, "steps_with_services": (1 + 10.5) / 2}
    nop = {"shared": 0.25, "several": 0, "separate": 0, "own_image": 0, "services": 0, "fresh_services": 10}
    nop |= {"collected_from_services": 0, "steps_with_services": (0.25 + 10) / 2}
    assert wanted == {(name, "oracle"): r for name, r in oracle.items()} | {(name, "nop"): r for name, r in nop.items()}
    assert engine("docker", "ps", "--all", "--quiet") == ""
