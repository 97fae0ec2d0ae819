"""Small agents as the SDKs' own documentation writes them: `python sdks.py NAME BASE_URL KEY`. Needs only that SDK.

Each asks with a system text and two tools, answers the calls, and asks again.
"""

# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json
import sys
from typing import Any

SYSTEM = "You are a careful reader.\n\nRead files before you answer."
FIRST, SECOND = "Which word is in a.txt?", "And how many letters has it?"
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "Path of the file."}, "lines": {"type": "integer"}},
    "required": ["path"],
}
OTHER = {"type": "object", "properties": {"pattern": {"type": "string"}, "deep": {"type": "boolean"}}}
TOOLS = [("read_file", "Read a file.", SCHEMA), ("find", "Find files by a pattern.", OTHER)]


def read_file(path: str, lines: int = 1) -> str:
    """Read a file.

    Args:
        path: Path of the file.
        lines: How many lines.
    """
    return f"sledge of {path}\n"


def openai_chat(url: str, key: str, role: str = "system", late: bool = False) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools = [{"type": "function", "function": {"name": n, "description": d, "parameters": p}} for n, d, p in TOOLS]
    messages: list[Any] = [{"role": role, "content": SYSTEM}, {"role": "user", "content": FIRST}]
    for question in (SECOND, None):
        while True:
            reply = client.chat.completions.create(model="m", messages=messages, tools=tools)
            message = reply.choices[0].message
            messages.append(message)
            for call in message.tool_calls or []:
                said = read_file(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
            if not message.tool_calls:
                break
            if late:
                messages.append({"role": role, "content": "Two steps are left."})
        if question:
            messages.append({"role": "user", "content": question})


def openai_developer(url: str, key: str) -> None:
    openai_chat(url, key, "developer")


def openai_late_system(url: str, key: str) -> None:
    openai_chat(url, key, "system", late=True)


def openai_responses(url: str, key: str, stateful: bool = False) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    tools = [{"type": "function", "name": n, "description": d, "parameters": p, "strict": False} for n, d, p in TOOLS]
    items: list[Any] = [{"role": "user", "content": FIRST}]
    more: dict[str, Any] = {}
    for question in (SECOND, None):
        while True:
            reply = client.responses.create(model="m", instructions=SYSTEM, input=items, tools=tools, **more)
            calls = [item for item in reply.output if item.type == "function_call"]
            items = [] if stateful else [*items, *reply.output]
            more = {"previous_response_id": reply.id} if stateful else {}
            for call in calls:
                said = read_file(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": said})
            if not calls:
                break
        if question:
            items.append({"role": "user", "content": question})


def openai_stateful(url: str, key: str) -> None:
    openai_responses(url, key, stateful=True)


def anthropic_messages(url: str, key: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    tools = [{"name": n, "description": d, "input_schema": p} for n, d, p in TOOLS]
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    messages: list[Any] = [{"role": "user", "content": FIRST}]
    for question in (SECOND, None):
        while True:
            reply = client.messages.create(model="m", max_tokens=500, system=system, messages=messages, tools=tools)
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": b.id, "content": read_file(**b.input)}
                for b in reply.content
                if b.type == "tool_use"
            ]
            if not results:
                break
            messages.append({"role": "user", "content": results})
        if question:
            messages.append({"role": "user", "content": question})


def google_genai(url: str, key: str) -> None:
    from google import genai
    from google.genai import types

    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, timeout=60_000))
    declarations = [types.FunctionDeclaration(name=n, description=d, parameters_json_schema=p) for n, d, p in TOOLS]
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM, tools=[types.Tool(function_declarations=declarations)]
    )
    contents: list[Any] = [types.Content(role="user", parts=[types.Part(text=FIRST)])]
    for question in (SECOND, None):
        while True:
            content = client.models.generate_content(model="m", contents=contents, config=config).candidates[0].content
            contents.append(content)
            calls = [part.function_call for part in content.parts if part.function_call]
            if not calls:
                break
            answers = [
                types.Part(
                    function_response=types.FunctionResponse(
                        id=call.id, name=call.name, response={"result": read_file(**call.args)}
                    )
                )
                for call in calls
            ]
            contents.append(types.Content(role="user", parts=answers))
        if question:
            contents.append(types.Content(role="user", parts=[types.Part(text=question)]))


def openai_agents(url: str, key: str, chat: bool = False) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    kind = agents.OpenAIChatCompletionsModel if chat else agents.OpenAIResponsesModel
    agent = agents.Agent(
        name="reader",
        instructions=SYSTEM,
        model=kind(model="m", openai_client=client),
        tools=[agents.function_tool(read_file)],
    )
    first = agents.Runner.run_sync(agent, FIRST)
    agents.Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": SECOND}])


def openai_agents_chat(url: str, key: str) -> None:
    openai_agents(url, key, chat=True)


def _langchain(model: Any) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    bound = model.bind_tools([read_file])
    messages: list[Any] = [SystemMessage(SYSTEM), HumanMessage(FIRST)]
    for question in (SECOND, None):
        while True:
            reply = bound.invoke(messages)
            messages.append(reply)
            messages += [ToolMessage(read_file(**call["args"]), tool_call_id=call["id"]) for call in reply.tool_calls]
            if not reply.tool_calls:
                break
        if question:
            messages.append(HumanMessage(question))


def langchain_openai(url: str, key: str) -> None:
    from langchain_openai import ChatOpenAI

    _langchain(ChatOpenAI(model="m", base_url=f"{url}/v1", api_key=key, max_retries=0))


def langchain_anthropic(url: str, key: str) -> None:
    from langchain_anthropic import ChatAnthropic

    _langchain(ChatAnthropic(model_name="m", base_url=url, api_key=key, max_retries=0))


def pydantic_ai(url: str, key: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    agent = Agent(model, instructions=SYSTEM, tools=[read_file])
    first = agent.run_sync(FIRST)
    agent.run_sync(SECOND, message_history=first.all_messages())


AGENTS = {
    one.__name__: one
    for one in (
        openai_chat,
        openai_developer,
        openai_late_system,
        openai_responses,
        openai_stateful,
        anthropic_messages,
        google_genai,
        openai_agents,
        openai_agents_chat,
        langchain_openai,
        langchain_anthropic,
        pydantic_ai,
    )
}
"""Name -> the agent."""

PACKAGES = {
    "anthropic_messages": "anthropic",
    "google_genai": "google-genai",
    "openai_agents": "openai-agents",
    "openai_agents_chat": "openai-agents",
    "langchain_openai": "langchain-openai",
    "langchain_anthropic": "langchain-anthropic",
    "pydantic_ai": "pydantic-ai-slim",
}
"""Name -> the package that makes its requests; others use `openai`."""

if __name__ == "__main__":
    from importlib.metadata import version

    name, url, key = sys.argv[1:]
    AGENTS[name](url, key)
    print(version(PACKAGES.get(name, "openai")))
