"""One task of tau2-bench: the agent serves a simulated user through the domain's tools.

tau2's own orchestrator runs the conversation and its own evaluator judges it, in a thread that blocks while the agent
acts. Model calls of the user and the judge go to the node, under the roles `user` and `judge`, with the key that the
node gave to the environment. The reward belongs to the step that ends the conversation.

Source: tau2-bench at a2c0247 (2026-08-18), `tau2/runner/simulation.py`, `tau2/orchestrator/orchestrator.py`,
`tau2/gym/gym_agent.py`.
"""

from __future__ import annotations

import json
import os
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .episode import over
from .protocol import Refused, Result, Tool

_STOP = "###STOP###"
_RESPOND, _DONE, _FINISH = "respond", "done", "finish"
_NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
_MESSAGE = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
_ABOUT = """\
You are a customer service agent that helps the user according to the <policy> below.
The user reads only what you send by the tool `respond`, whose result is the user's answer; nobody reads your other \
words.
The talk ends when the user ends it, or when you call `done`. End it in no other way.
<policy>
{policy}
</policy>
The talk so far:
{talk}"""
_NO_PACKAGE = """\
this Python has no tau2-bench ({error}). Clone https://github.com/sierra-research/tau2-bench into the folder of a \
Python 3.12 or 3.13 environment, install it (pip install -e FOLDER/tau2-bench) and name FOLDER in \
the environment's `runtime.python`. The package `tau2` of PyPI is another one."""
_NO_MODEL = """\
tau2's user is played by a model, and this sandbox does not reach the node that answers its calls: give the \
environment's `runtime` the network `proxy`."""


class Talk:
    """Runs the conversation until it is the agent's turn, at the start and after each step."""

    def __init__(self, config: dict[str, Any]) -> None:
        _check_package()
        self._config = config
        self._task = _task_of(config)
        self._environment: Any = import_module("tau2.registry").registry.get_env_constructor(config["domain"])()
        self._actions: SimpleQueue[Any] = SimpleQueue()
        self._news: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self._run: Any = None
        """The finished and evaluated simulation."""
        self._error: Exception | None = None
        """The error that broke the conversation."""
        Thread(target=self._talked, daemon=True).start()
        begun = self._next()
        self._owed = begun.reward
        """The reward of a conversation that ended before the agent's first step."""
        self.instructions = _ABOUT.format(policy=self._environment.get_policy(), talk=begun.text)
        self.tools = self._offered()

    def _offered(self) -> tuple[Tool, ...]:
        """Raises: ValueError if a tool of the domain has the same name as one defined here."""
        own = (
            Tool(_RESPOND, "Send a message to the user. Returns the user's answer.", _MESSAGE, self._respond),
            Tool(_DONE, "End the talk, when the user needs nothing more.", _NOTHING, self._done),
            Tool(_FINISH, "Report the evaluation.", _NOTHING, self._finish),
        )
        schemas = [tool.openai_schema["function"] for tool in self._environment.get_tools()]
        if taken := {tool.name for tool in own} & {schema["name"] for schema in schemas}:
            raise ValueError(f"the domain {self._config['domain']!r} has a tool `{min(taken)}` of its own")
        theirs = [
            Tool(one["name"], one.get("description", ""), one["parameters"], partial(self._use, one["name"]))
            for one in schemas
        ]
        return (*theirs, *own)

    # -- the agent's steps -----------------------------------------------------------------------------------------

    def _respond(self, arguments: dict[str, Any]) -> Result:
        """Raises: Refused."""
        text = str(arguments.get("message") or "")
        if not text.strip():
            raise Refused("the argument `message` is missing")
        return self._acted(content=text)

    def _done(self, _: dict[str, Any]) -> Result:
        """Raises: Refused."""
        return self._acted(content=_STOP)

    def _use(self, name: str, arguments: dict[str, Any]) -> Result:
        """Raises: Refused with the tool's own error."""
        call = {"id": f"call_{name}", "name": name, "arguments": arguments}
        return self._acted(tool_calls=[import_module("tau2.data_model.message").ToolCall(**call)])

    def _acted(self, **message: Any) -> Result:
        """Raises: Refused."""
        if self._run is not None:
            raise Refused(over(""))
        if self._error is not None:
            raise self._error
        self._actions.put(import_module("tau2.data_model.message").AssistantMessage(role="assistant", **message))
        return self._next()

    def _next(self) -> Result:
        """Wait for the agent's turn or the end of the conversation.

        Raises: Refused, and the error that ended the conversation.
        """
        kind, news = self._news.get()
        if kind == "broken":
            self._error = news
            raise news
        if kind == "turn":
            if len(news) == 1 and getattr(news[0], "error", False):
                raise Refused(news[0].content)
            return Result(_shown(news))
        self._run = news
        last = [message for message in news.messages if message.role == "user"][-1:]
        ends = last if news.termination_reason.value == "user_stop" else []
        return Result(over(_shown(ends)), float(news.reward_info.reward), done=True)

    def _finish(self, _: dict[str, Any]) -> Result:
        """The parts of the reward. A conversation that neither side ended gets 0, as in tau2."""
        if self._run is None:
            note = "neither the agent nor the user ended the talk"
            return Result(json.dumps({"reward": 0.0, "note": note}), 0.0, done=True)
        info: dict[str, Any] = self._run.reward_info.model_dump(mode="json")
        parts = {key: info[key] for key in ("reward", "reward_basis", "reward_breakdown") if info[key] is not None}
        notes: dict[str, Any] = info["info"] or {}
        note = notes.get("note")
        ended = {"termination_reason": self._run.termination_reason.value}
        return Result(json.dumps({**parts, **ended, **({"note": note} if note else {})}), self._owed, done=True)

    # -- tau2's side -----------------------------------------------------------------------------------------------

    def _talked(self) -> None:
        """The thread's target: tau2's run of the conversation and its evaluation."""
        try:
            run = import_module("tau2.runner.simulation").run_simulation(self._orchestrator())
        except Exception as error:
            self._news.put(("broken", error))
        else:
            self._news.put(("end", run))

    def _orchestrator(self) -> Any:
        environment, task = self._environment, self._task
        user_tools = environment.get_user_tools(include=task.user_tools) if environment.user_tools else None
        access = {"api_base": f"{os.environ['GANGLINE_BASE_URL']}/v1", "api_key": os.environ["GANGLINE_API_KEY"]}
        user_calls, judge_calls = (
            {**self._config[f"{role}_args"], **access, "extra_headers": {"x-gangline-role": role}}
            for role in ("user", "judge")
        )
        judge: Any = import_module("tau2.evaluator.evaluator_nl_assertions")
        judge.DEFAULT_LLM_NL_ASSERTIONS, judge.DEFAULT_LLM_NL_ASSERTIONS_ARGS = "openai/judge", judge_calls
        user = import_module("tau2.user.user_simulator").UserSimulator(
            llm="openai/user", llm_args=user_calls, tools=user_tools or None, instructions=task.user_scenario
        )
        return import_module("tau2.orchestrator.orchestrator").Orchestrator(
            domain=self._config["domain"],
            agent=self._agent(),
            user=user,
            environment=environment,
            task=task,
            max_steps=self._config["max_steps"],
            max_errors=self._config["max_errors"],
        )

    def _agent(self) -> Any:
        """A tau2 agent that forwards our agent's actions."""
        base: Any = import_module("tau2.agent.base_agent").HalfDuplexAgent
        actions, news = self._actions, self._news

        class Waiting(base):
            def get_init_state(self, message_history: Any = None) -> list[Any]:
                return list(message_history or [])

            def generate_next_message(self, message: Any, state: list[Any]) -> tuple[Any, list[Any]]:
                news.put(("turn", [*state, *getattr(message, "tool_messages", [message])]))
                return actions.get(), []

            @classmethod
            def is_stop(cls, message: Any) -> bool:
                return _STOP in (message.content or "")

        return Waiting(tools=self._environment.get_tools(), domain_policy=self._environment.get_policy())


def _check_package() -> None:
    """Raises: RuntimeError with installation instructions."""
    try:
        import_module("tau2.runner.simulation")
    except ImportError as error:
        raise RuntimeError(_NO_PACKAGE.format(error=error)) from error
    if "GANGLINE_BASE_URL" not in os.environ:
        raise RuntimeError(_NO_MODEL)


def _task_of(config: dict[str, Any]) -> Any:
    """Raises: ValueError listing the known domains or tasks."""
    registry, domain = import_module("tau2.registry").registry, config["domain"]
    if domain not in registry.get_domains():
        raise ValueError(f"tau2-bench has no domain {domain!r}; it has: {', '.join(registry.get_domains())}")
    tasks = {task.id: task for task in registry.get_tasks_loader(config["task_set"] or domain)()}
    if config["task"] not in tasks:
        raise ValueError(f"domain {domain!r} has no task {config['task']!r}; its tasks are: {', '.join(tasks)[:500]}")
    return tasks[config["task"]]


def _shown(messages: list[Any]) -> str:
    """A single message's content, or several messages with their roles."""
    if len(messages) == 1:
        return messages[0].content or ""
    calls = import_module("tau2.utils.tools").to_functional_format
    texts = [
        message.content or ", ".join(map(calls, getattr(message, "tool_calls", None) or [])) for message in messages
    ]
    return "\n".join(f"{one.role}: {text}" for one, text in zip(messages, texts, strict=True))


begin = Talk
