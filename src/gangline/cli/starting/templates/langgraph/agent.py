"""An agent on LangGraph: one node looks into a file with a command, the next says the word in it."""

import os
import subprocess
import sys

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

# One worked example: without it, a small model never answers with a bare command.
EXAMPLE = [
    ("system", "You read files for the user."),
    ("user", "Which word is in the file notes.txt?"),
    ("assistant", "cat notes.txt"),
    ("user", "river"),
    ("assistant", "river"),
]
model = ChatOpenAI(model=os.environ["OPENAI_MODEL"], temperature=0.7)


def look(state: MessagesState) -> dict:
    command = model.bind(max_tokens=12).invoke([*EXAMPLE, *state["messages"]])
    done = subprocess.run(str(command.content), shell=True, capture_output=True, text=True, timeout=10)
    return {"messages": [command, ("user", (done.stdout + done.stderr).strip()[:200] or "(no output)")]}


def answer(state: MessagesState) -> dict:
    return {"messages": [model.bind(max_tokens=6).invoke([*EXAMPLE, *state["messages"]])]}


graph = StateGraph(MessagesState)
graph.add_node("look", look)
graph.add_node("answer", answer)
graph.add_edge(START, "look")
graph.add_edge("look", "answer")
graph.add_edge("answer", END)
print(graph.compile().invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
