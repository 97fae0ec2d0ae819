"""An agent for rough times: `python agent.py NUM_CALLS [WORD]`, each call made again until it is answered.

Its messages are other ones in each run, unless it is given a word to make them from.

It is quick to start, for it does so thousands of times. A retry carries its call's idempotency key, as those of the
official SDKs do. Every second call streams. An answer that is not the scripted one ends it with code 3.
"""

import http.client
import json
import os
import sys
import time

PATIENCE_S = 150.0
HOST, _, PATH = os.environ["OPENAI_BASE_URL"].removeprefix("http://").partition("/")


def ask(messages, stream, key):
    """The answer's text; None when it did not come whole."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 64, "stream": stream}
    headers = {
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "Content-Type": "application/json",
        "Idempotency-Key": key,
    }
    connection = http.client.HTTPConnection(HOST, timeout=90)
    try:
        connection.request("POST", f"/{PATH}/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        answer = reply.read().decode()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if reply.status >= 500 or reply.status in (408, 409, 429):
        return None
    if reply.status != 200:
        sys.exit(f"HTTP {reply.status}: {answer}")
    return streamed(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]


def streamed(answer):
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    deltas = [choice["delta"] for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def main(num_calls, word=None):
    messages = []
    for turn in range(num_calls):
        mark = os.urandom(8).hex() if word is None else f"{word}-{turn}"
        messages.append({"role": "user", "content": f"turn {turn} {mark}"})
        deadline = time.monotonic() + PATIENCE_S
        while (text := ask(messages, turn % 2 == 1, mark)) is None:
            if time.monotonic() > deadline:
                sys.exit("no answer came")
            time.sleep(0.2)
        if text != f"answer {turn}":
            print(f"turn {turn} was answered {text!r}", file=sys.stderr)
            sys.exit(3)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
