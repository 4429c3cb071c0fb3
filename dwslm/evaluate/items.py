"""What a spelling test is made of: questions with options, about words that a seed draws.

Wherever a test allows it, the options are drawn first and the one that is asked for afterwards, by chance. Who
looks at the options alone then does no better than chance, however much likelier some of them are than others.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

MOST_TRIES = 20_000
FEWEST_WORDS = 300


class Draw:
    """Draws that follow from a seed. Only `random.random` is used, which Python promises to keep as it is."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        """One of 0 .. count - 1."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """One of low .. high, both included."""
        return low + self.below(high - low + 1)

    def choice(self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def sample(self, among: Sequence[T], count: int) -> list[T]:
        """`count` of them, each at most once, in random order."""
        taken = list(among)
        for place in range(count):
            other = place + self.below(len(taken) - place)
            taken[place], taken[other] = taken[other], taken[place]
        return taken[:count]


class Words:
    """A word list, also by length."""

    def __init__(self, words: Sequence[str]) -> None:
        self.all = tuple(dict.fromkeys(words))
        self._by_length: dict[int, list[str]] = {}
        for word in self.all:
            self._by_length.setdefault(len(word), []).append(word)

    def of_length(self, low: int, high: int | None = None) -> list[str]:
        """Words of `low` to `high` letters; of `low` or more where `high` is None."""
        lengths = sorted(self._by_length)
        chosen = [n for n in lengths if n >= low and (high is None or n <= high)]
        return [word for n in chosen for word in self._by_length[n]]


@dataclass(frozen=True)
class Question:
    """A question, the options for its answer, and the number of the right one.

    `shown` puts the options into the prompt; otherwise the model sees only the question.
    """

    text: str
    options: tuple[str, ...]
    answer: int
    shown: bool = False


Test = Callable[[Draw, Words], Question | None]
"""Draws one question, or None where what it drew makes none; it is then called again."""


@dataclass(frozen=True)
class Item:
    """A question as a model reads it.

    A text is a prompt and an option after it. `prompt` holds answered examples and the question, `unasked`
    neither: the options, where they are shown, and "Answer:". An option begins with a blank and ends with the
    empty line that ends every answer, so that none is the beginning of another.
    """

    test: str
    prompt: str
    unasked: str
    options: tuple[str, ...]
    answer: int


def load_words(path: str | Path | None) -> Words:
    """A word list from a file of words apart by blanks or line ends, lines with # left out; None is the one shipped.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is not UTF-8, too short, or holds something other than lower-case letters.
    """
    if path is None:
        text = (files("dwslm.evaluate") / "words.txt").read_text(encoding="utf-8")
    elif not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such word list")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 (byte {error.start}): convert it before using it") from None
    found = [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    for word in found:
        if not word.isalpha() or word != word.lower():
            raise ValueError(f"{path}: {word!r} is no word of lower-case letters alone")
    words = Words(found)
    if len(words.all) < FEWEST_WORDS:
        raise ValueError(f"{path} has {len(words.all)} words: the tests need {FEWEST_WORDS} or more")
    return words


def make_items(name: str, test: Test, words: Words, *, count: int, shots: int, seed: int) -> list[Item]:
    """`count` items of one test, each with `shots` answered examples of the same kind, none of them its own question.

    The right answer takes every place in turn, so that always saying yes, say, is worth exactly chance.

    Raises ValueError if the word list is too poor for the test.
    """
    draw = Draw(f"{seed} {name}")

    def question(item: int | None = None) -> Question:
        for _ in range(MOST_TRIES):
            found = test(draw, words)
            if found and (item is None or found.answer == item % len(found.options)):
                return found
        raise ValueError(f"the word list has too few words of the kinds that the test {name!r} needs")

    items = []
    for number in range(count):
        asked = question(number)
        examples: list[str] = []
        while len(examples) < shots:
            example = question()
            if (example.text, example.options) != (asked.text, asked.options):
                examples.append(f"{_head(example)}{_tail(example.options[example.answer])}")
        items.append(
            Item(
                name,
                "".join(examples) + _head(asked),
                f"{_shown(asked)}Answer:",
                tuple(map(_tail, asked.options)),
                asked.answer,
            )
        )
    return items


def _shown(question: Question) -> str:
    return f"Options: {', '.join(question.options)}\n" if question.shown else ""


def _head(question: Question) -> str:
    return f"Question: {question.text}\n{_shown(question)}Answer:"


def _tail(option: str) -> str:
    return f" {option}\n\n"
