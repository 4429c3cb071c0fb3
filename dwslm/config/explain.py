"""One line for the user out of what Hydra, OmegaConf and YAML raise."""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, YAMLError
from yaml.reader import ReaderError

from dwslm.config.check import GROUPS, MOST_INTEGER, names, unknown
from dwslm.config.schema import DICTIONARIES, RunConfig, ScoreConfig

CONFIG_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
"""What is raised for a command line or file that does not fit."""
NAME = re.compile(r"[+~]*([\w./@:$-]+)", re.ASCII)
NO_FILE = re.compile(r"[-+.\d_e]+|true|false|null|inf|nan|[\[{].*", re.IGNORECASE)
"""What Hydra takes for another kind of value than a word."""
HEADER = "# @package _global_"


def explain(error: BaseException, wanted: str = "experiment", words: Sequence[str] = ()) -> str:
    """One line out of an error of Hydra, OmegaConf or YAML, with the nearest name where a setting is misspelt.

    Args:
        wanted: the setting that a word without a name may have been meant for.
        words: the command line, where the error may lie in one that it does not name.
    """
    if isinstance(error, YAMLError):
        return _not_yaml(error)
    if isinstance(error, UnicodeDecodeError):
        return f"a configuration file is no UTF-8 text ({error}): save it as UTF-8"
    word = getattr(error, "override", None)
    if isinstance(error, OverrideParseException) and isinstance(word, str):
        return _not_parsed(word, wanted)
    if not isinstance(error, CONFIG_ERRORS):
        for word in words:  # Hydra's own check of a group's value does not say whose it is
            name, equals, value = word.partition("=")
            name = name.lstrip("+~").partition("@")[0]
            if equals and (not name or (name in GROUPS and NO_FILE.fullmatch(value))):
                return (
                    f"{word}: a setting is name=value, and the value of {' or '.join(GROUPS)} a file's name in configs/"
                )
    text = str(error)
    cause = error.__cause__
    if cause is not None and str(cause) and str(cause) not in text:
        text = f"{text}\n{cause}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    full_key = next((part.split(":", 1)[1].strip() for part in lines if part.startswith("full_key")), "")
    return _unknown(lines, full_key, wanted) or _said(lines, full_key)


def _not_yaml(error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark, begun = error.problem_mark, error.context_mark
        since = f" {error.context}" + (f" from line {begun.line + 1} on" if begun else "") if error.context else ""
        return f"{mark.name}, line {mark.line + 1}: not YAML{since}: {error.problem}; see to indentation, quotes and brackets"
    if isinstance(error, ReaderError):
        return f"{error.name}: not YAML: character {error.position + 1} is no text: {error.reason}"
    return f"not YAML: {error}"


def _not_parsed(word: str, wanted: str) -> str:
    """Why a word of the command line is none that Hydra reads."""
    name, equals, value = word.partition("=")
    if not word.strip():
        return "the command line holds an empty word: leave it out, or give a setting as name=value"
    if not equals:
        return f"{word} is not name=value: did you mean {wanted}={word.lstrip('+~')}?"
    if not NAME.fullmatch(name):
        return f"unknown setting {name.lstrip('+~')}; see docs/settings.md"
    if value[:1] in ("[", "{", "'", '"'):
        return (
            f"{word} does not read as a value: every bracket and quote must be closed, and inside of them words that hold other "
            'signs than ASCII letters, digits and -_./ stand in "quotes"'
        )
    quoted = re.sub(r'(\\*)("|$)', lambda found: 2 * found[1] + (found[2] and '\\"'), value)  # else a backslash is one
    return f"the value of {word} must be quoted: " + shlex.quote(f'{name}="{quoted}"')


def _unknown(lines: Sequence[str], full_key: str, wanted: str) -> str | None:
    """For a name that the settings lack; None where the error is another."""
    scores = wanted == "checkpoint"
    root, other = (ScoreConfig, RunConfig) if scores else (RunConfig, ScoreConfig)
    text = " ".join(lines)
    lacks = re.search(r"Key '([^']+)' (?:not in '(\w+)'|is not in struct)", text)
    file = re.search(r"In '([\w./-]+)'", text)
    given = re.search(r"(?:Could not override|Error merging override) '?[+~]*([\w.]*)", text)
    if lacks and file:
        if lacks[1] == file[1].split("/")[0] or lacks[1].startswith("_"):
            return f"the first line of {file[1]}.yaml must be {HEADER}, or its settings are taken for those of a part"
        where = f" in {file[1]}.yaml"
    elif given and (lacks or text.startswith("Could not override")):
        where = ""
    else:
        return None
    name = given[1] if given else full_key
    if given and name in DICTIONARIES:
        return f"{name}: a dictionary is given with a plus, +{name}={{key:value}}"
    if given and name.rpartition(".")[0] in DICTIONARIES:
        return f"{name}: a key of a dictionary is given with a plus, +{name}=VALUE"
    if scores and name in GROUPS:
        return f"{name} is a setting of train.py: eval.py takes checkpoint=RUN"
    if name in names(other) and name not in names(root):
        return f"{name} is a setting of {'train.py' if scores else 'eval.py'}; see docs/settings.md"
    if not scores and name in GROUPS:
        return f"the value of {name} must be a file's name in configs/{name}"
    of = _kinds().get(lacks[2] or "") if lacks else None
    if lacks and (not given or name in names(root)):  # inside of what the setting is given
        name = full_key
        if of is not None and of is not root and "." not in full_key:  # in a list, whose name is not told
            near = difflib.get_close_matches(lacks[1], get_type_hints(of), n=1)
            way_out = f"did you mean {near[0]}?" if near else f"there are {', '.join(get_type_hints(of))}"
            return f"unknown setting {lacks[1]}{f' in {given[1]}' if given else where}: {way_out}"
    return unknown(name, root, where)


def _said(lines: Sequence[str], full_key: str) -> str:
    """Their own words, in one line that begins with the setting."""
    line = "; ".join(
        line for line in lines if not line.startswith(("full_key", "object_type", "reference_type", "To append"))
    )
    line = re.sub(r"^In '([\w./-]+)': \w+ raised while composing config:; ", r"\1.yaml: ", line)
    line = line.replace("is incompatible with type hint 'Union[int, str]'", "could not be converted to Integer")
    fraction = re.search(r"Value '([^']+)' of type 'float' could not be converted to Integer", line)
    if fraction and abs(float(fraction[1])) <= MOST_INTEGER and float(fraction[1]).is_integer():  # 1e6
        line += f": write {int(float(fraction[1])):_}"
    below = re.match(r"Error merging override \+*([\w.]+)\.(\w+)=(.*)", lines[0]) if lines else None
    if below and below[1] in names(RunConfig) and "'dict'" in line:  # a setting below one that is a value
        return f"unknown setting {below[1]}.{below[2]}: did you mean {below[1]}={below[3]}?"
    return f"{full_key}: {line}" if full_key and full_key not in line else line


def _kinds() -> dict[str, type]:
    """The dataclasses of all settings by name."""
    return {kind.__name__: kind for root in (RunConfig, ScoreConfig) for kind in _inside(root)}


def _inside(kind: Any) -> Iterator[type]:
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        yield kind
        for inner in get_type_hints(kind).values():
            yield from _inside(inner)
    for inner in get_args(kind):
        yield from _inside(inner)
