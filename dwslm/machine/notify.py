"""A command of the user's, run when something happens that a person wants to know of."""

import json
import shlex
import subprocess
from collections.abc import Mapping
from typing import Any

FIELDS = ("event", "run", "reason", "step", "host")
"""May stand in the command in braces. All of the event is JSON on its standard input."""
TIMEOUT_S = 30.0
WORD_LIMIT = 500


def parse(command: str) -> list[str]:
    """The words of the command, as a shell would split them; no shell ever sees it.

    Raises:
        ValueError: for a command that cannot be split, or a name in braces that is no field.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--notify-command {command!r}: {error}") from None
    if not words:
        raise ValueError("--notify-command is empty: name a program")
    for word in words:
        rest = word
        for field in FIELDS:
            rest = rest.replace(f"{{{field}}}", "")
        if "{" in rest or "}" in rest:
            raise ValueError(f"--notify-command: {word!r} holds braces around none of {', '.join(FIELDS)}")
    return words


def fill(words: list[str], event: Mapping[str, Any]) -> list[str]:
    """The words with fields put in. A field's text stays inside its word whatever it holds, and begins no option."""
    filled = []
    for word in words:
        for field in FIELDS:
            text = str(event.get(field, "")).replace("\0", "").replace("\n", " ")[:WORD_LIMIT]
            if word.startswith(f"{{{field}}}"):
                text = text.lstrip("-")
            # A field's own text is not looked through again: braces in it are its own.
            word = word.replace(f"{{{field}}}", text.replace("{", "\ue000").replace("}", "\ue001"))
        filled.append(word.replace("\ue000", "{").replace("\ue001", "}"))
    return filled


def notify(words: list[str], event: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> str | None:
    """Runs the command to its end. Returns what went wrong, None if nothing did; a command that fails must not end a run."""
    try:
        done = subprocess.run(
            fill(words, event),
            input=json.dumps(event, default=str),
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return f"{words[0]} took more than {timeout_s:g} s"
    except OSError as error:
        return f"{words[0]}: {error.strerror}"
    if done.returncode:
        said = done.stderr.strip().split("\n")[-1][:200]
        return f"{words[0]} ended with code {done.returncode}" + (f": {said}" if said else "")
    return None
