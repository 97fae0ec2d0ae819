"""The laboratory itself: its recordings, its tokenizer, its judge."""

from __future__ import annotations

import getpass
import re
import socket

import pytest

from gangline.domain.errors import InvalidRequest
from support.templates.characters import Characters
from support.templates.judge import keeps_sampled_turns
from support.templates.recordings import FOLDER

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("name", list(PAGES))
def test_a_recording_names_no_machine_and_no_user(name: str) -> None:
    text = PAGES[name]
    assert len(text) < 100_000
    own = {socket.gethostname(), getpass.getuser(), str(FOLDER.parents[2])} - {"vm", "root", "user", "localhost"}
    found = re.findall(r"/root\b|\.tools\b|gls-\w+|sk-\w{8,}|\b(?:\d{1,3}\.){3}\d{1,3}\b", text)
    assert [*found, *(one for one in own if re.search(rf"\b{re.escape(one)}\b", text))] == []


def test_the_tokenizer_reads_what_it_writes() -> None:
    tokenizer = Characters(CHATML)
    text = "<|im_start|>user\nGröße 🙂<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len("user\nGröße 🙂\n") + 2


def test_turns_alone_may_be_written_otherwise() -> None:
    pieces = ["A:<p>", "B:<p>", "C:<p>"]
    assert keeps_sampled_turns(pieces, "A:oneB:twoC:<p>", "<p>")
    assert not keeps_sampled_turns(pieces, "A:oneX:twoC:<p>", "<p>")
    assert not keeps_sampled_turns(pieces, "S A:oneB:twoC:<p>", "<p>")
    assert not keeps_sampled_turns(["A:<p>"], "B:<p>", "<p>")


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ messages[9].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{% for",
    ],
)
def test_a_template_that_fails_in_any_way_refuses_the_messages(template: str) -> None:
    tokenizer = Characters(template).chat_tokenizer()
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        tokenizer.render([{"role": "user", "content": "x"}])
