"""Scoring of options: nats by hand, models that know, that guess and that don't care, and a run's own table."""

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from dwslm.data.batch import IGNORE, Batch
from dwslm.data.tokenizer import eod_id, train_tokenizer
from dwslm.evaluate.baselines import token_spellings
from dwslm.evaluate.bits_per_byte import EvalSettings
from dwslm.evaluate.items import Item
from dwslm.evaluate.spelling import (
    TESTS,
    SpellingSettings,
    credit,
    option_nats,
    score_spelling,
    spelling_items,
    spelling_table,
    wilson_interval,
)
from tests.evaluate.scripted import WORDS

ITEMS = spelling_items(SpellingSettings(items=40, shots=1))
SETTINGS = EvalSettings(micro_batch_tokens=16_384, segments_per_row=64)
CONTEXT = 1024


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([item.prompt + item.options[item.answer] for item in ITEMS], 700)


def segments(batch: Batch):
    """(place of its slots, its tokens without the opening eod) of each segment of text."""
    for n in np.flatnonzero(batch.docs >= 0):
        place = slice(batch.cu_seqlens[n], batch.cu_seqlens[n + 1])
        yield place, batch.tokens[place][1:]


def text_model(tokenizer, nats_of):
    """A model that gives each token of a text the nats that `nats_of` says for the whole text; eod costs 9."""
    spellings = token_spellings(tokenizer)

    def nats(batch: Batch) -> np.ndarray:
        result = np.full(len(batch.tokens), np.nan, np.float32)
        for place, tokens in segments(batch):
            text = b"".join(map(spellings.__getitem__, tokens.tolist())).decode()
            result[place] = [nats_of(text)] * len(tokens) + [9.0]
        return result

    return nats


def spelling_report(nats, tokenizer, items=ITEMS, settings=SETTINGS, context=CONTEXT):
    return score_spelling(nats, items, tokenizer, settings, eod=eod_id(tokenizer), training_context=context)


# ---- nats of options ------------------------------------------------------------------------------------


def test_nats_are_those_of_the_tokens_in_which_options_differ(make_table_model):
    # Only bytes in the vocabulary: ids are those of the byte alphabet, and text has a token a byte.
    tokenizer = train_tokenizer([], 257)
    table = np.zeros(257)
    costs = {" ": 64.0, "a": 1.0, "b": 2.0, "c": 4.0, ".": 0.5, "x": 32.0}
    for letter, cost in costs.items():
        table[tokenizer.encode(letter).ids] = cost
    found = option_nats(
        make_table_model(table),
        ["xx", "x"],
        [[" ab.", " ac.", " acb."], [" b.", " a."]],
        tokenizer,
        SETTINGS,
        eod=eod_id(tokenizer),
        context=16,
    )
    # The prompt, the blank and the first "a" are the same for each; "b." is 2 + 1/2.
    assert found == [[int(nats * 2**32) for nats in (2.5, 4.5, 6.5)], [int(nats * 2**32) for nats in (2.5, 1.5)]]


def test_nats_do_not_depend_on_how_rows_are_filled(tokenizer):
    def nats(batch: Batch) -> np.ndarray:  # depends on the token, its target and its place in the segment
        place = np.arange(len(batch.tokens)) - np.repeat(batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens))
        mixed = batch.tokens * 7 + batch.targets * 13 + place * 3
        return np.where(batch.targets == IGNORE, np.nan, mixed % 101 / 16).astype(np.float32)

    items = ITEMS[::20]
    reports = [
        spelling_report(nats, tokenizer, items, replace(SETTINGS, **change), context)
        for context, change in ((CONTEXT, {}), (512, {"micro_batch_tokens": 1}), (700, {"segments_per_row": 3}))
    ]
    assert reports[0].scores == reports[1].scores == reports[2].scores


def test_an_item_longer_than_a_row_is_refused(tokenizer):
    with pytest.raises(
        ValueError, match=r"holds 19: give evaluate\.context=\d+ or more, or fewer spelling_tests\.shots"
    ):
        spelling_report(lambda batch: None, tokenizer, ITEMS[:1], SETTINGS, 20)


def test_nats_that_are_not_finite_are_refused(tokenizer):
    with pytest.raises(ValueError, match="document 0 of spelling tests .* nan nats"):
        spelling_report(lambda batch: np.full(len(batch.tokens), np.nan, np.float32), tokenizer, ITEMS[:1])


# ---- accuracies -----------------------------------------------------------------------------------------


def test_ties_are_shared():
    assert credit([3, 1, 2], 1) == 1 and credit([3, 1, 2], 0) == 0
    assert credit([1, 1, 2, 1], 3) == 1 / 3 and credit([1, 1, 2, 1], 2) == 0


def test_wilson_interval_by_hand():
    # 0 of 10: z^2 / (10 + z^2) = 3.8415 / 13.8415; 8 of 10 is a textbook case.
    assert wilson_interval(0, 10) == pytest.approx([0, 0.27753], abs=1e-5)
    assert wilson_interval(10, 10) == pytest.approx([0.72247, 1], abs=1e-5)
    assert wilson_interval(8, 10) == pytest.approx([0.4902, 0.9433], abs=1e-4)


def test_a_model_that_knows_has_everything_right_and_one_that_errs_nothing(tokenizer):
    right = {item.prompt + item.options[item.answer] for item in ITEMS}
    report = spelling_report(text_model(tokenizer, lambda text: 0.0 if text in right else 1.0), tokenizer)
    assert all(row.accuracy == 1 and row.correct == row.items for row in report.scores)
    wrong = spelling_report(text_model(tokenizer, lambda text: 8.0 if text in right else 0.0), tokenizer)
    assert all(row.accuracy == 0 for row in wrong.scores)


def test_a_model_to_which_all_is_alike_is_at_chance_exactly(tokenizer):
    report = spelling_report(text_model(tokenizer, lambda text: 0.0), tokenizer)
    for row in report.scores:
        assert row.accuracy == pytest.approx(row.chance) and row.without_question == pytest.approx(row.chance)
    chance = {row.test: row.chance for row in report.scores}
    assert chance["langgame/longest"] == 1 / 4 and chance["cute/contains letter"] == 1 / 2
    assert chance["counting/one letter"] == pytest.approx(1 / 3)
    assert chance["cute/all"] == pytest.approx((6 / 4 + 2 / 2) / 8)


def test_a_model_that_guesses_is_at_chance(tokenizer):
    def guess(text: str) -> float:
        return hashlib.sha256(text.encode()).digest()[0] / 16

    report = spelling_report(text_model(tokenizer, guess), tokenizer)
    for row in report.scores:
        deviation = (row.chance * (1 - row.chance) / row.items) ** 0.5
        assert abs(row.accuracy - row.chance) < 4 * deviation, row


def test_options_alone_do_not_tell_the_answer(tokenizer):
    """A model that likes some letters and digits, and short answers, but doesn't read the question."""
    items = spelling_items(SpellingSettings(items=250, shots=0))

    def taste(text: str) -> float:
        option = text.rsplit("Answer:", 1)[1]
        return sum(hashlib.sha256(letter.encode()).digest()[0] for letter in option) / 64 + 3

    report = spelling_report(text_model(tokenizer, taste), tokenizer, items)
    for row in report.scores:
        deviation = (row.chance * (1 - row.chance) / row.items) ** 0.5
        if row.test.split("/")[1] not in ("longest", "shortest", "all"):
            assert abs(row.accuracy - row.chance) < 4.5 * deviation, row
        assert row.accuracy == row.without_question  # the question made no difference
    by_name = {row.test: row.accuracy for row in report.scores}
    assert by_name["langgame/longest"] < 0.1 and by_name["langgame/shortest"] > 0.9


# ---- items, rows, table ---------------------------------------------------------------------------------


def test_items_are_fixed_by_their_settings(tokenizer, tmp_path):
    assert [item.test for item in ITEMS] == [name for name in TESTS for _ in range(40)]
    assert spelling_items(SpellingSettings(items=40, shots=1)) == ITEMS
    assert spelling_items(SpellingSettings(items=40, shots=1, seed=1)) != ITEMS
    own = tmp_path / "own.txt"
    own.write_text("\n".join(WORDS.all), encoding="utf-8")
    assert spelling_items(SpellingSettings(items=40, shots=1, words=str(own))) == ITEMS
    text = json.dumps([[item.prompt, *item.options, item.answer] for item in ITEMS])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "fa9a015bdc641b92"  # other items are another test


def test_rows_and_table(tokenizer):
    items = [
        Item("a/one", "Question: 1?\nAnswer:", "Answer:", (" yes\n\n", " no\n\n"), 0),
        Item("b/two", "Question: 2?\nAnswer:", "Answer:", (" yes\n\n", " no\n\n"), 1),
        Item("a/one", "Question: 3?\nAnswer:", "Answer:", (" yes\n\n", " no\n\n"), 1),
    ]
    # Right on the first question, wrong on the third, tied on the second and where nothing is asked.
    nats = {"Question: 1?\nAnswer: no\n\n": 2.0, "Question: 3?\nAnswer: no\n\n": 3.0}
    report = spelling_report(text_model(tokenizer, lambda text: nats.get(text, 1.0)), tokenizer, items)
    rows = report.to_rows()
    assert [row["test"] for row in rows] == ["a/one", "a/all", "b/two", "b/all"]
    first = rows[0]
    assert first["slice"] == "spelling" and first["items"] == 2 and first["context"] == CONTEXT
    assert first["accuracy"] == 0.5 and first["correct"] == 1.0 and first["chance"] == 0.5
    assert first["interval"] == pytest.approx(wilson_interval(1, 2)) and len(first["items_hash"]) == 64
    assert [row["accuracy"] for row in rows] == [0.5] * 4 and rows[2]["correct"] == 0.5
    assert [row["without_question"] for row in rows] == [0.5] * 4
    assert json.loads(json.dumps(rows)) == rows
    console = Console(width=200, record=True)
    console.print(spelling_table(report))
    said = console.export_text()
    assert "a/one" in said and "50.0%" in said and "without the question" in said and "50.0% +" not in said
    sure = replace(
        report, scores=[replace(report.scores[0], interval=[0.6, 1.0], without_question=w) for w in (0.5, 0.7)]
    )
    console.print(spelling_table(sure))
    assert console.export_text().count("50.0% +") == 1


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"spelling_tests\.items=0"):
        SpellingSettings(items=0)
    with pytest.raises(ValueError, match=r"spelling_tests\.shots=-1"):
        SpellingSettings(shots=-1)
