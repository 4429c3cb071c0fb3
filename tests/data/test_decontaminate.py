import random
import re

import numpy as np
import pytest

import dwslm.data.decontaminate
from dwslm.data.decontaminate import HeldOutRuns, RunCollector, ngrams, write_runs

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"


def held_out(folder, *texts):
    collector = RunCollector()
    for text in texts:
        collector.add(text)
    write_runs(folder, [collector.runs()])
    return HeldOutRuns(folder)


def test_thirteen_words_make_one_run_and_twelve_none(tmp_path):
    runs = held_out(tmp_path, THIRTEEN)
    assert runs.count(THIRTEEN) == (1, 1)
    assert runs.count(THIRTEEN.rpartition(" ")[0]) == (0, 0)
    assert runs.count(f"zero {THIRTEEN} fourteen") == (1, 3)
    assert runs.count(THIRTEEN.replace("seven", "seventh")) == (0, 1)
    assert runs.count(THIRTEEN.replace("one two", "two one")) == (0, 1)


def test_case_and_what_stands_between_words_count_for_nothing(tmp_path):
    runs = held_out(tmp_path, THIRTEEN)
    assert runs.count("«One, two;\n\n" + THIRTEEN.upper()[8:].replace(" ", " - ") + "!»") == (1, 1)
    assert runs.count(THIRTEEN.replace("three four", "threefour") + " x") == (0, 1)
    assert len(ngrams("Straße " + THIRTEEN)) == 2
    assert np.array_equal(ngrams("Straße " + THIRTEEN), ngrams("STRASSE " + THIRTEEN))
    # A vowel sign is part of its word: 13 words, not more.
    assert len(ngrams("हिन्दी " * 13)) == 1


def test_characters_are_words_where_there_are_no_spaces(tmp_path):
    runs = held_out(tmp_path, "今日はとても良い天気ですね")  # 13 characters
    assert runs.count("ああ今日はとても良い天気ですね。") == (1, 3)
    assert len(ngrams("ภาษาไทยภาษาไทย")) == 2  # 14 characters
    assert len(ngrams("abc今日はとても良い天気ですdef")) == 2  # 14 words


def test_counts_are_those_of_a_plain_search(tmp_path):
    draw = random.Random(0)

    # Two-letter vocabulary: common runs do occur by chance.
    def some(count):
        return " ".join(draw.choices(["ab", "ba"], k=count))

    texts = [some(draw.randint(1, 400)) for _ in range(30)]
    known = [some(draw.randint(1, 3000)) for _ in range(6)]

    def plain(text):
        words = re.findall(r"\w+", text)
        return [tuple(words[i : i + 13]) for i in range(len(words) - 12)]

    there = {run for text in known for run in plain(text)}
    runs = held_out(tmp_path, *known)
    expected = [(sum(run in there for run in plain(text)), len(plain(text))) for text in texts]
    assert [runs.count(text) for text in texts] == expected
    assert 0 < sum(found for found, _ in expected) < sum(count for _, count in expected)
    distinct = len(np.unique(np.concatenate([ngrams(text) for text in texts])))
    assert distinct == len({run for text in texts for run in plain(text)})


def test_nothing_held_out(tmp_path):
    assert held_out(tmp_path, "short").count(THIRTEEN) == (0, 1)
    assert held_out(tmp_path).count("") == (0, 0)


def test_a_long_text_is_looked_at_in_blocks(monkeypatch):
    monkeypatch.setattr(dwslm.data.decontaminate, "_BLOCK", 50)
    text = " ".join(f"word{number:04d}" for number in range(100))  # 8 letters and a space: no block ends on a space
    assert len(ngrams(text)) >= 100 - 12
    monkeypatch.undo()
    assert len(ngrams(text)) == 88


def test_too_much_held_out_text(monkeypatch):
    monkeypatch.setattr(dwslm.data.decontaminate, "_MAX_NGRAMS", 80)
    collector = RunCollector()
    with pytest.raises(ValueError, match="the held-out text has more than 80 runs of 13 words"):
        for number in range(20):
            collector.add(" ".join(f"{number}x{word}" for word in range(30)))
