"""A handler as its authors write it for ProRL Agent, ported: a math task with a tool call, in its folder of methods.

The shape is that of ProRL Agent's own handlers: a `name`, optional arguments after the job, results with `messages`,
`finish` and `resolved`. The model is asked with the official SDK.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

from gangline.interop.handlers import AgentHandler, JobDetails
from gangline.settings import plugins

_ENTRY_POINTS = """[gangline.handlers]
ported-math = support.node.handlers:PortedMathHandler
"""


class PortedMathHandler(AgentHandler):
    """`instance["fail"]` names a stage that fails."""

    @property
    def name(self) -> str:
        return "ported-math"

    async def init(self, job_details: JobDetails, sid: str | None = None) -> tuple[Any, Any, Any]:
        self._fail(job_details, "init")
        await job_details.runtime.upload("problem.txt", job_details.instance["prompt"][0]["content"].encode())
        return job_details.runtime, {"agent_class": "ported"}, object()

    async def run(self, job_details: JobDetails, sid: str | None = None) -> dict[str, Any]:
        assert type(job_details.config) is object, "the job keeps what init returned"
        messages: list[Any] = [{"role": "user", "content": job_details.instance["prompt"][0]["content"]}]
        access = job_details.llm_config
        async with openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
            for _ in range(job_details.agent_config["max_iterations"]):
                reply = await client.chat.completions.create(model=access.model, messages=messages)
                messages.append({"role": "assistant", "content": reply.choices[0].message.content})
                self._fail(job_details, "run")
                if "boxed" in messages[-1]["content"]:
                    return {"success": True, "finish": True, "messages": messages, "error": None}
                done = await job_details.runtime.exec(messages[-1]["content"])
                messages.append({"role": "user", "content": done.stdout.decode()})
        return {"success": True, "finish": False, "messages": messages, "error": None}

    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True, reward: Any = None
    ) -> dict[str, Any]:
        self._fail(job_details, "eval")
        assert job_details.run_results is not None
        said = job_details.run_results["messages"][-1]["content"]
        truth = job_details.instance["reward_model"]["ground_truth"]
        return {"resolved": f"\\boxed{{{truth}}}" in said}

    def run_exception(self, job_details: JobDetails, exc: Exception) -> dict[str, Any]:
        return {**super().run_exception(job_details, exc), "messages": []}

    def _fail(self, job_details: JobDetails, stage: str) -> None:
        if job_details.instance.get("fail") == stage:
            raise ValueError(f"planted in {stage}")


def install_handlers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the handler known as an installed distribution's, for the rest of a test."""
    metadata = folder / "ported_handlers-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ported-handlers\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(plugins, "_installed", cache(plugins._installed.__wrapped__))
