"""LangGame's six kinds: an item of each by hand, and its rule held against many drawn ones."""

import re

import pytest

from dwslm.evaluate.items import Words
from dwslm.evaluate.langgame import TESTS, contains, ends_with, longest, most_of_letter, shortest, starts_with
from tests.evaluate.scripted import Scripted, check_places, many, scripted

FOUR = ["cake", "milk", "road", "tree"]
AS_LISTED = (0, 0, 0, 0, 0)  # a word of four letters, then four words in the order of the list


def test_items_by_hand():
    # The draws after AS_LISTED: which option, how many letters (less one), where they start, which wording.
    question = scripted(contains, FOUR, *AS_LISTED, 0, 1, 1, 0)
    assert question.text == 'Which word contains "ak"?'
    assert question.options == ("cake", "milk", "road", "tree") and question.answer == 0 and question.shown
    question = scripted(starts_with, FOUR, *AS_LISTED, 3, 2, 1)
    assert question.text == 'Which word has "tre" at its beginning?' and question.answer == 3
    question = scripted(ends_with, FOUR, *AS_LISTED, 2, 0, 0)
    assert question.text == 'Which word ends with "d"?' and question.answer == 2
    # Letters that each has twice or more: banana a n, better e t, coffee f e, pepper p e;
    # its own, then, are a n, t, f and p.
    question = scripted(most_of_letter, ["banana", "better", "coffee", "pepper"], *AS_LISTED, 0, 1, 0)
    assert question.text == 'Which word has the most letter "n"?' and question.answer == 0
    # Place of the answer, three wrong words, the right one, the wording.
    question = scripted(longest, ["cow", "milk", "road", "kitchen"], 1, 0, 1, 0, 0, 0)
    assert question.text == "Which word is the longest?"
    assert question.options == ("cow", "kitchen", "road", "milk") and question.answer == 1
    question = scripted(shortest, ["cow", "milker", "kitchen", "gardens"], 3, 0, 0, 0, 0, 1)
    assert question.text == "Which of these words has the fewest letters?"
    assert question.options == ("milker", "kitchen", "gardens", "cow") and question.answer == 3


def test_what_would_have_two_answers_or_none_is_not_asked():
    # "e" ends two of the words.
    assert ends_with(Scripted(*AS_LISTED, 0, 0), Words(FOUR)) is None
    # "eleven" has only "e" more than once, which others have as well.
    words = Words(["banana", "pepper", "coffee", "eleven"])
    assert most_of_letter(Scripted(*AS_LISTED), words) is None
    # Only one word has a letter twice: it would be known without the question.
    words = Words(["better", "silver", "garden", "market"])
    assert most_of_letter(Scripted(*AS_LISTED), words) is None


RULES = {
    "langgame/most of a letter": lambda word, letter: word.count(letter) >= 2,
    "langgame/contains": lambda word, piece: piece in word,
    "langgame/starts with": lambda word, piece: word.startswith(piece),
    "langgame/ends with": lambda word, piece: word.endswith(piece),
}


@pytest.mark.parametrize("name", RULES)
def test_the_right_option_alone_keeps_the_rule(name):
    questions = many(TESTS[name])
    check_places(questions)
    sizes = set()
    for question in questions:
        (piece,) = re.findall('"([a-z]+)"', question.text)
        sizes.add(len(piece))
        assert [RULES[name](word, piece) for word in question.options] == [n == question.answer for n in range(4)]
        assert len({len(word) for word in question.options}) == 1
    assert sizes == ({1} if "most" in name else {1, 2, 3})


@pytest.mark.parametrize(("name", "right", "wrong"), [("longest", (7, 99), (1, 4)), ("shortest", (1, 3), (6, 99))])
def test_lengths(name, right, wrong):
    questions = many(TESTS[f"langgame/{name}"])
    check_places(questions)
    for question in questions:
        for n, word in enumerate(question.options):
            low, high = right if n == question.answer else wrong
            assert low <= len(word) <= high


def test_there_are_six_kinds():
    assert len(TESTS) == 6
