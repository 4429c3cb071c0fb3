"""What a composed configuration may hold, whatever it is for: known names, and values of the right kind."""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any

from dwslm.config.schema import RunConfig, flatten

GROUPS = ("experiment", "test")
"""Folders of configs/, given on the command line as settings are."""
MOST_INTEGER = 2**63 - 1
"""What 64 bits hold."""


def check(tree: Mapping[Any, Any], kind: type, values: bool = True) -> None:
    """Refuses what OmegaConf lets pass into typed settings: names they lack, lists and dictionaries inside of lists,
    numbers that are not finite or too large to count with.

    Args:
        tree: a configuration as plain data. kind: its dataclass. values: look at values, not at names alone.

    Raises:
        ValueError: one line that names the setting.
    """
    _check(tree, kind, "", kind, values)


def _check(value: Any, kind: Any, name: str, root: type, values: bool) -> None:
    inner = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        for key, one in value.items():
            full = f"{name}.{key}" if name else str(key)
            if key not in hints:
                raise ValueError(unknown(full, root))
            _check(one, hints[key], full, root, values)
    elif typing.get_origin(kind) is list and isinstance(value, list):
        for number, one in enumerate(value):
            _check(one, inner[0], f"{name}[{number}]", root, values)
    elif typing.get_origin(kind) is dict and isinstance(value, dict):
        for key, one in value.items():
            _check(one, inner[1], f"{name}.{key}", root, values)
    elif values and isinstance(value, dict | list):
        raise ValueError(f"{name}={value} must be {_in_words(kind)}")
    elif values and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={value} must be a finite number{' (or null)' if type(None) in inner else ''}")
    elif values and isinstance(value, int) and abs(value) > MOST_INTEGER:
        raise ValueError(f"{name}={value} is out of range: whole numbers go up to {MOST_INTEGER}")


def unknown(name: str, root: type, where: str = "") -> str:
    """That `root` has no such setting, and which may have been meant: one of that name elsewhere, one of the same part whose
    name is nearly that, or one that is like it.

    where: words that say where the name stands.
    """
    known = names(root)
    part, _, leaf = name.rpartition(".")
    found = sorted(
        (one for one in known if one.rpartition(".")[2] == leaf),
        key=lambda one: difflib.SequenceMatcher(None, one, name).ratio(),
        reverse=True,
    )
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == part}
    found += [beside[one] for one in difflib.get_close_matches(leaf, beside, n=1)]
    found += difflib.get_close_matches(name, [one for one in known if not name.startswith(f"{one}.")], n=1, cutoff=0.75)
    return f"unknown setting {name}{where}" + (f": did you mean {found[0]}?" if found else "; see docs/settings.md")


def names(root: type) -> list[str]:
    """Names of all settings, of the parts that hold them, and of the groups of files."""
    settings = list(flatten(dataclasses.asdict(root())))
    parts = {name[:place] for name in settings for place, letter in enumerate(name) if letter == "."}
    return [*settings, *sorted(parts), *(GROUPS if root is RunConfig else ())]


def _in_words(kind: Any) -> str:
    words = {str: "a word", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    return " or ".join(words.get(one, "of another kind") for one in typing.get_args(kind) or (kind,))
