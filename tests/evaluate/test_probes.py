"""Counting and arithmetic: items by hand, and the answers of many drawn ones worked out again."""

import re

import pytest

from dwslm.evaluate import probes
from dwslm.evaluate.items import Words
from dwslm.evaluate.probes import TESTS
from tests.evaluate.scripted import Scripted, check_places, many, scripted


def test_items_by_hand():
    # The first option (its range begins at the number in brackets), which is right, and what is still free.
    question = scripted(probes.count_letters, ["there", "cow", "climb"], 0, 2, 1)  # (3), a word of five letters
    assert question.text == 'How many letters does the word "climb" have?'
    assert question.options == ("3", "4", "5", "6") and question.answer == 2
    # "there" and "climb": none of c l i m b, one of t h r, two of e.
    for answer, letter in ((0, "c"), (1, "t"), (2, "e")):
        question = scripted(probes.count_letter, ["there", "climb"], 0, 1, answer, 0)
        assert question.text == f'How many times does the letter "{letter}" occur in "there"?'
        assert question.options == ("0", "1", "2") and question.answer == answer
    question = scripted(probes.count_words, ["one", "two", "three", "four", "five"], 0, 1, 0, 0, 0, 0)  # (3)
    assert question.text == "How many words are in this list: one, two, three, four?"
    assert question.options == ("3", "4", "5", "6") and question.answer == 1
    question = scripted(probes.next_number, [], 6, 1, 2)  # (45), in threes
    assert question.text == "Which number comes next: 40, 43, 46, 49?"
    assert question.options == ("51", "52", "61", "62") and question.answer == 1
    question = scripted(probes.add, [], 58, 0, 22)  # (10), the first summand (1)
    assert question.text == "What is 23 + 45?"
    assert question.options == ("68", "69", "78", "79") and question.answer == 0
    question = scripted(probes.subtract, [], 11, 2, 40)  # (1), the minuend (23)
    assert question.text == "What is 63 - 41?"
    assert question.options == ("12", "13", "22", "23") and question.answer == 2
    question = scripted(probes.multiply, [], 5, 3, 3)  # (2), (2)
    assert question.text == "What is 7 * 8?"
    assert question.options == ("35", "42", "49", "56") and question.answer == 3


def test_a_length_that_no_word_has_is_not_asked():
    assert probes.count_letters(Scripted(0, 1), Words(["there"])) is None


ARITHMETIC = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


def answer_of(text: str) -> int:
    if match := re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", text):
        return ARITHMETIC[match[2]](int(match[1]), int(match[3]))
    if match := re.fullmatch(r'How many letters does the word "([a-z]+)" have\?', text):
        return len(match[1])
    if match := re.fullmatch(r'How many times does the letter "([a-z])" occur in "([a-z]+)"\?', text):
        return match[2].count(match[1])
    if match := re.fullmatch(r"How many words are in this list: ([a-z, ]+)\?", text):
        return len(match[1].split(", "))
    match = re.fullmatch(r"Which number comes next: ([0-9, ]+)\?", text)
    numbers = [int(number) for number in match[1].split(", ")]
    (step,) = {after - before for before, after in zip(numbers, numbers[1:], strict=False)}
    return numbers[-1] + step


@pytest.mark.parametrize("name", TESTS)
def test_answers_are_right(name):
    questions = many(TESTS[name])
    check_places(questions)
    for question in questions:
        assert question.options[question.answer] == str(answer_of(question.text))
        assert all(int(option) >= 0 for option in question.options) and not question.shown
