import pytest

from gangline.agents.harnesses.shared.environment import PLACEHOLDERS, fill, mentions, shell_text

VALUES = dict.fromkeys(PLACEHOLDERS, "x") | {"instruction": "say {model}", "model": "m"}


def test_known_names_are_filled_and_other_braces_stay() -> None:
    assert fill('{model} {"a": {b}} ${model} {models}', VALUES) == 'm {"a": {b}} ${model} {models}'


def test_a_value_that_looks_like_a_placeholder_is_not_filled_again() -> None:
    assert fill("{instruction}", VALUES) == "say {model}"


def test_a_placeholder_after_a_dollar_sign_is_the_shells() -> None:
    assert not mentions("echo ${instruction}", "instruction")
    assert mentions("echo {instruction}", "instruction")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("run {model}", 'run "${GANGLINE_MODEL}"'),
        ('run "for {model}"', 'run "for ${GANGLINE_MODEL}"'),
        (r"run \" {model}", r'run \" "${GANGLINE_MODEL}"'),
        (r"run 'a\' {model}", "run 'a\\' \"${GANGLINE_MODEL}\""),
        ("run 'it''s' {model}", "run 'it''s' \"${GANGLINE_MODEL}\""),
        ("# don't\nrun {model}", '# don\'t\nrun "${GANGLINE_MODEL}"'),
        ("run 'a # b' {model}", "run 'a # b' \"${GANGLINE_MODEL}\""),
        ("cp a.{txt,md} ${HOME}", "cp a.{txt,md} ${HOME}"),
    ],
)
def test_a_shell_command_gets_expansions_quoted_for_their_place(command: str, expected: str) -> None:
    assert shell_text(command) == expected


def test_a_placeholder_between_single_quotes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"single quotes.*\$GANGLINE_MODEL"):
        shell_text("python3 -c 'print({model})'")
