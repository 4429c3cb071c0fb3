"""Does a model know the letters inside its tokens, and does it count? Questions with options, scored by likelihood.

A model's answer is the option with the least nats: the sum of -ln p over the option's tokens after the prompt, not
divided by its length. The tokens that all options of a question begin with are left out, since they are the same
nats for each. Items are packed and scored as documents are, in the tokenizer's own tokens.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from dwslm.data.shards import DOC_DTYPE, Dataset, token_dtype
from dwslm.evaluate import cute, langgame, probes
from dwslm.evaluate.bits_per_byte import (
    EvalSettings,
    NatsFn,
    Progress,
    batches,
    cut_pieces,
    fill_rows,
    segment_sums,
    text_nats,
)
from dwslm.evaluate.items import Item, load_words, make_items

MOST_ITEMS = 100_000
TESTS = langgame.TESTS | cute.TESTS | probes.TESTS
NORMAL_95 = 1.959964  # 97.5 % point of the standard normal distribution


@dataclass
class SpellingSettings:
    """The spelling, counting and arithmetic tests. Every setting changes the items: keep them for what you compare."""

    items: int = 200
    """Questions of each test."""

    shots: int = 4
    """Answered examples before each question."""

    seed: int = 0
    """Of the draws that make the questions."""

    words: str | None = None
    """Word list: a file of lower-case words apart by blanks or line ends. null is the one shipped, 2,050 common
    English words."""

    def __post_init__(self) -> None:
        if not 1 <= self.items <= MOST_ITEMS:
            raise ValueError(f"spelling_tests.items={self.items} must be from 1 to {MOST_ITEMS}")
        if self.shots < 0:
            raise ValueError(f"spelling_tests.shots={self.shots} must be 0 or more")


@dataclass(frozen=True)
class Accuracy:
    """One test, or a family of tests, whose name ends in "all".

    `correct` is the number of items answered rightly; where k options tie for the least nats, the right one among
    them, an item counts 1/k. `interval` is Wilson's, 95 %, of `accuracy`. `chance` is what guessing gives. `without_question` is
    the accuracy where only the options are shown and nothing is asked: what the options' own likelihood is worth.
    """

    test: str
    items: int
    correct: float
    accuracy: float
    interval: list[float]
    chance: float
    without_question: float


@dataclass(frozen=True)
class SpellingReport:
    """All tests, each family after its tests. `items_hash` names the questions, whatever made them."""

    scores: list[Accuracy]
    context: int
    items_hash: str

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain row per test for a run's evals file."""
        about = {"context": self.context, "items_hash": self.items_hash}
        return [{"slice": "spelling"} | asdict(score) | about for score in self.scores]


def spelling_items(settings: SpellingSettings) -> list[Item]:
    """The items of every test, test by test. The same settings and word list give the same items.

    Raises FileNotFoundError or ValueError for a word list that is missing or won't do.
    """
    words = load_words(settings.words)
    count, shots, seed = settings.items, settings.shots, settings.seed
    return [
        item
        for name, test in TESTS.items()
        for item in make_items(name, test, words, count=count, shots=shots, seed=seed)
    ]


def score_spelling(
    nats_fn: NatsFn,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    settings: EvalSettings,
    *,
    eod: int,
    training_context: int,
    progress: Progress | None = None,
) -> SpellingReport:
    """Accuracies of a model on the items.

    Args:
        tokenizer: the model's own; `eod` is the id of its end-of-document token.
        settings: context, batch size and segments, as for documents.

    Raises ValueError if an item does not fit the context, or if a token's nats are not finite.
    """
    context = settings.context or training_context
    prompts = [prompt for item in items for prompt in (item.prompt, item.unasked)]
    options = [item.options for item in items for _ in range(2)]
    nats = option_nats(nats_fn, prompts, options, tokenizer, settings, eod=eod, context=context, progress=progress)
    credits = [
        (credit(asked, item.answer), credit(unasked, item.answer))
        for item, asked, unasked in zip(items, nats[::2], nats[1::2], strict=True)
    ]
    digest = hashlib.sha256(json.dumps([asdict(item) for item in items]).encode()).hexdigest()
    return SpellingReport(_summary(items, credits), context, digest)


def option_nats(
    nats_fn: NatsFn,
    prompts: Sequence[str],
    options: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
    settings: EvalSettings,
    *,
    eod: int,
    context: int,
    progress: Progress | None = None,
) -> list[list[int]]:
    """Nats of each prompt's options, in units of 2^-32, over the tokens in which the prompt's options differ.

    Prompt and option are tokenized as one text, so that no token is one that text would not have. Raises as
    `score_spelling`.
    """
    texts = [prompt + option for prompt, of_prompt in zip(prompts, options, strict=True) for option in of_prompt]
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    longest = max(range(len(texts)), key=lambda n: len(encoded[n]))
    if len(encoded[longest]) > context - 1:
        raise ValueError(
            f"a spelling question has {len(encoded[longest])} tokens and a row of context {context} holds "
            f"{context - 1}: give evaluate.context={len(encoded[longest]) + 1} or more, or fewer spelling_tests.shots"
        )
    skipped = np.zeros(len(texts), dtype=np.int64)  # tokens of each text before its options differ
    first = 0
    for of_prompt in options:
        stop = first + len(of_prompt)
        skipped[first:stop] = common = _common(encoded[first:stop])
        assert all(len(ids) > common for ids in encoded[first:stop]), "an option is the beginning of another"
        first = stop

    dataset = _dataset(texts, encoded, tokenizer.get_vocab_size(with_added_tokens=True), eod)
    totals = np.zeros(len(texts), dtype=np.int64)
    segments, at_once = settings.segments_per_row, settings.micro_batch_tokens
    rows = fill_rows(cut_pieces(dataset.docs, np.arange(len(texts)), context - 1), context, segments)
    for batch in batches(dataset, rows, context, segments, at_once, progress):
        fixed, text = text_nats(nats_fn, batch, dataset)
        used = batch.docs >= 0
        # Slot s of a segment predicts token s of its text.
        lengths = np.diff(batch.cu_seqlens)
        place = np.arange(len(text)) - np.repeat(batch.cu_seqlens[:-1], lengths)
        counted = place >= np.repeat(np.where(used, skipped[batch.docs], 0), lengths)
        np.add.at(totals, batch.docs[used], segment_sums(np.where(counted, fixed, 0), batch)[used])
    per_text = iter(totals.tolist())
    return [[next(per_text) for _ in of_prompt] for of_prompt in options]


def credit(nats: Sequence[int], answer: int) -> float:
    """1 if the answer has the least nats, 1/k if k options share them and it is one of these, else 0."""
    least = min(nats)
    return 1 / nats.count(least) if nats[answer] == least else 0.0


def wilson_interval(correct: float, items: int) -> list[float]:
    """95 % interval of a proportion (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    share, z2 = correct / items, NORMAL_95**2
    middle = (share + z2 / (2 * items)) / (1 + z2 / items)
    half = NORMAL_95 * math.sqrt(share * (1 - share) / items + z2 / (4 * items**2)) / (1 + z2 / items)
    return [max(0.0, middle - half), min(1.0, middle + half)]


def spelling_table(report: SpellingReport) -> Table:
    """Every test for a terminal; "+" marks accuracies whose interval lies above chance and above `without_question`."""
    table = Table(title=f"Spelling and counting, context {report.context:,}", title_justify="left")
    table.add_column("test")
    for name in ("accuracy", "95 % interval", "chance", "without the question", "items"):
        table.add_column(name, justify="right")
    for row in report.scores:
        low, high = row.interval
        mark = " +" if low > max(row.chance, row.without_question) else "  "
        table.add_row(
            Text(row.test),
            f"{row.accuracy:.1%}{mark}",
            f"{low:.1%} to {high:.1%}",
            f"{row.chance:.1%}",
            f"{row.without_question:.1%}",
            f"{row.items:,}",
            end_section=row.test.endswith("/all"),
        )
    table.caption = "+ the interval lies above chance and above the accuracy without the question"
    table.caption_justify = "left"
    return table


def _summary(items: Sequence[Item], credits: Sequence[tuple[float, float]]) -> list[Accuracy]:
    """A score for each test in the order of its first item, and after the tests of a family one for all of them."""
    members: dict[str, dict[str, list[int]]] = {}
    for n, item in enumerate(items):
        family = members.setdefault(item.test.split("/")[0], {})
        family.setdefault(item.test, []).append(n)
    scores = []
    for name, tests in members.items():
        everything = [n for numbers in tests.values() for n in numbers]
        for test, numbers in [*tests.items(), (f"{name}/all", everything)]:
            correct = math.fsum(credits[n][0] for n in numbers)
            scores.append(
                Accuracy(
                    test,
                    items=len(numbers),
                    correct=correct,
                    accuracy=correct / len(numbers),
                    interval=wilson_interval(correct, len(numbers)),
                    chance=math.fsum(1 / len(items[n].options) for n in numbers) / len(numbers),
                    without_question=math.fsum(credits[n][1] for n in numbers) / len(numbers),
                )
            )
    return scores


def _common(sequences: Sequence[Sequence[int]]) -> int:
    """How many first elements all sequences share."""
    for n, elements in enumerate(zip(*sequences, strict=False)):
        if len(set(elements)) > 1:
            return n
    return min(map(len, sequences))


def _dataset(texts: Sequence[str], encoded: Sequence[Iterable[int]], vocab_size: int, eod: int) -> Dataset:
    """The texts as documents in memory."""
    docs = np.zeros(len(texts), dtype=DOC_DTYPE)
    tokens = [np.fromiter(ids, dtype=token_dtype(vocab_size)) for ids in encoded]
    docs["tokens"] = [len(ids) for ids in tokens]
    docs["bytes"] = [len(text.encode()) for text in texts]
    docs["start"] = np.cumsum(docs["tokens"], dtype=np.int64) - docs["tokens"]
    flat: NDArray[Any] = np.concatenate(tokens)
    manifest: dict[str, Any] = {
        "sources": ["spelling"],
        "languages": [""],
        "vocab_size": vocab_size,
        "eod": eod,
        "tokenizer_hash": "",
        "shards": [{"documents": len(texts)}],
    }
    return Dataset(Path("spelling tests"), manifest, "", docs, [flat])
