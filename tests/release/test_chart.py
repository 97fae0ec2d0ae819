"""The Helm chart, linted and rendered by Helm's own library, and its objects checked by the schemas of their kinds."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator
from uv import find_uv_bin

from gangline.cli.commands import load_command
from gangline.domain.views import ServiceStatus
from release.installed import ROOT
from release.test_deployment import closed, lint

CHART = ROOT / "deploy" / "helm" / "gangline"
KEDA = json.loads((ROOT / "tests" / "data" / "keda-scaling.json").read_text())
"""What a chart may use of KEDA 2's custom resources (Apache-2.0), without descriptions."""
LEAST: dict[str, Any] = {
    "image": {"repository": "registry.example/gangline"},
    "engines": ["http://vllm:8000", "http://vllm-2:8000"],
    "database": {"url": "postgresql://gangline@postgres/gangline"},
    "secret": {"databasePassword": "a"},
}
KINDS = ("none", "keda", "hpa")
VALUES: dict[str, dict[str, Any]] = {
    "the least": LEAST,
    **{f"autoscaling by {kind}": LEAST | {"autoscaling": {"kind": kind}} for kind in KINDS},
    "down to none": LEAST | {"autoscaling": {"kind": "keda", "minNodes": 0}},
    "a secret that exists": {name: LEAST[name] for name in ("image", "engines", "database")}
    | {"existingSecret": "mine"},
    "several servers": LEAST | {"server": {"replicas": 2, "results": "s3://rollouts/gangline"}},
    "without user namespaces": LEAST
    | {
        "node": {
            "hostUsers": None,
            "securityContext": {
                "privileged": True,
                **dict.fromkeys(["procMount", "seccompProfile", "appArmorProfile"]),
            },
        }
    },
    "everything": LEAST
    | {
        "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "ENGINE_KEY", "valueFrom": {"secretKeyRef": {"name": "engine", "key": "key"}}}],
        "server": {
            "arguments": ["--keep-days=14"],
            "nodeSelector": {"pool": "small"},
            "storage": {"className": "fast"},
        },
        "node": {
            "arguments": ["--runtimes=sandbox"],
            "podAnnotations": {"a.example/b": "c"},
            "tolerations": [{"key": "agents", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
        },
        "networkPolicy": {"enabled": False},
    },
}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"image": {"repository": ""}}, "image.repository"),
    "no engine": ({"engines": []}, "engines"),
    "no database": ({"database": {"url": ""}}, "database.url"),
    "SQLite": ({"database": {"url": "sqlite:///data"}}, "/database/url"),
    "no secret": ({"secret": {}}, "existingSecret"),
    "servers without common results": ({"server": {"replicas": 2}}, "server.results"),
    "bounds the wrong way round": ({"autoscaling": {"kind": "keda", "minNodes": 5, "maxNodes": 4}}, "minNodes"),
    "none by hpa": ({"autoscaling": {"kind": "hpa", "minNodes": 0}}, "keda"),
    "another kind": ({"autoscaling": {"kind": "vpa"}}, "autoscaling/kind"),
}


@cache
def rendered() -> dict[str, tuple[Any, str]]:
    """By case."""
    cases = {**VALUES, **{case: LEAST | changes for case, (changes, _) in WRONG.items()}}
    program = Path(__file__).with_name("render_chart.py")
    command = [
        find_uv_bin(),
        "run",
        "--no-project",
        "--with",
        "helm-python-sdk==0.2.2",
        "python",
        str(program),
        str(CHART),
    ]
    done = subprocess.run(
        command, input=json.dumps([*cases.values()]), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def objects(case: str) -> dict[tuple[str, str], Any]:
    """(kind, name) -> object."""
    text = rendered()[case][1]
    assert not text.startswith("error"), text
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text) if one}


def pod(case: str, which: str) -> Any:
    return objects(case)["Deployment", f"prod-gangline-{which}"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("case", VALUES)
def test_helm_finds_no_fault(case: str) -> None:
    found = rendered()[case][0]
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("case", VALUES)
def test_every_object_is_one_of_its_kind(case: str, tmp_path: Path) -> None:
    found = objects(case).values()
    for one in found:
        if one["kind"] in KEDA:
            Draft202012Validator(closed(KEDA[one["kind"]])).validate(one)
    path = tmp_path / "objects.yaml"
    path.write_text(yaml.safe_dump_all([one for one in found if one["kind"] not in KEDA]))
    lint("kubernetes-validate==1.37.0", "kubernetes-validate", "--strict", path)


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_work_is_refused_with_what_to_set(case: str) -> None:
    text = rendered()[case][1]
    assert text.startswith("error")
    assert WRONG[case][1] in text


@pytest.mark.parametrize("case", VALUES)
def test_containers_call_options_that_there_are(case: str) -> None:
    for which in ("server", "node"):
        (container,) = pod(case, which)["containers"]
        command, *given = container["args"]
        assert command == which
        params: list[Any] = load_command(command).params
        known = {name for param in params for name in param.opts}
        assert {word.partition("=")[0] for word in given} <= known


@pytest.mark.parametrize("case", VALUES)
def test_a_pod_drains_and_then_has_time_to_give_back_what_runs(case: str) -> None:
    spec = pod(case, "node")
    (container,) = spec["containers"]
    words = container["lifecycle"]["preStop"]["exec"]["command"][-1].split()
    assert words[:-1] == ["kill", "-USR1", "1;", "exec", "sleep"]
    assert spec["terminationGracePeriodSeconds"] - int(words[-1]) >= 25
    assert 'ENTRYPOINT ["gangline"]' in (ROOT / "Dockerfile").read_text(), "it is process 1"


def test_no_pod_is_privileged_unless_it_is_asked_for() -> None:
    for case in VALUES:
        for which in ("server", "node"):
            spec = pod(case, which)
            (container,) = spec["containers"]
            privileged = container["securityContext"].get("privileged", False)
            assert privileged == (case == "without user namespaces" and which == "node")
            assert spec["securityContext"]["runAsUser"] == 10001
            assert spec.get("hostUsers", True) == (which == "server" or privileged)


@pytest.mark.parametrize("case", VALUES)
def test_secrets_and_services_that_are_named_exist(case: str) -> None:
    found = objects(case)
    names = {name for kind, name in found if kind == "Secret"} | {"mine", "engine"}
    for which in ("server", "node"):
        (container,) = pod(case, which)["containers"]
        asked = [
            one["valueFrom"]["secretKeyRef"] for one in container["env"] if "secretKeyRef" in one.get("valueFrom", {})
        ]
        assert {one["name"] for one in asked} <= names
        labels = found["Deployment", f"prod-gangline-{which}"]["spec"]["template"]["metadata"]["labels"]
        selects = found["Deployment", f"prod-gangline-{which}"]["spec"]["selector"]["matchLabels"]
        assert selects.items() <= labels.items()
    service = found["Service", "prod-gangline"]
    server = found["Deployment", "prod-gangline-server"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= server.items()
    assert "--server=http://prod-gangline:8700" in pod(case, "node")["containers"][0]["args"]


def test_scaling_follows_the_figure_that_the_server_gives() -> None:
    trigger = objects("autoscaling by keda")["ScaledObject", "prod-gangline-node"]["spec"]["triggers"][0]["metadata"]
    assert trigger["valueLocation"] in {field.name for field in msgspec.structs.fields(ServiceStatus)}
    assert trigger["url"].endswith(".svc:8700/v1/status")
    metric = objects("autoscaling by hpa")["HorizontalPodAutoscaler", "prod-gangline-node"]["spec"]["metrics"][0]
    name = metric["external"]["metric"]["name"]
    assert f"`{name}`" in (ROOT / "docs" / "reference" / "metrics.md").read_text()
    assert trigger["targetValue"] == metric["external"]["target"]["averageValue"] == "16"
    for case in ("autoscaling by keda", "autoscaling by hpa"):
        assert "replicas" not in objects(case)["Deployment", "prod-gangline-node"]["spec"], "scaling would be undone"
