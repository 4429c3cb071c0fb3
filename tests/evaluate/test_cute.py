"""CUTE's character tasks: an item of each by hand, and the task done again for many drawn ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dwslm.evaluate import cute
from dwslm.evaluate.cute import TESTS, edit_distance
from dwslm.evaluate.items import Words
from tests.evaluate.scripted import WORDS, Scripted, check_places, many, scripted


def test_items_by_hand():
    alike = ["cake", "cave", "lake", "milk"]
    # A first word; the three others in order; the four in order; which is asked.
    question = scripted(cute.spell, alike, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert question.text == 'Spell the word "lake".'
    assert question.options == ("c a k e", "c a v e", "l a k e", "m i l k") and question.answer == 2
    question = scripted(cute.spell_inverse, alike, 0, 0, 0, 0, 0, 0, 0, 0, 1)
    assert question.text == 'Which word is spelled "c a v e"?'
    assert question.options == tuple(alike) and question.answer == 1

    # Two words, a letter of each, and which of the letters.
    question = scripted(cute.contains_letter, ["there", "climb"], 0, 1, 1, 0, 0)
    assert (question.text, question.answer) == ('Is there a "h" in "there"?', 0)
    question = scripted(cute.contains_letter, ["there", "climb"], 0, 1, 1, 0, 1)
    assert (question.text, question.answer) == ('Is there a "c" in "there"?', 1)
    assert question.options == ("yes", "no")

    # The word, four of its letters, the one asked for, a letter that it lacks.
    letters = (0, 1, 1, 0)  # out of c, o, a, h: c, a, h, o
    question = scripted(cute.add_letter, ["coach"], 0, *letters, 1, 0)
    assert question.text == 'Add "b" after every "a" in "coach".'
    assert question.options == ("cboacbh", "coabch", "coachb", "cobach") and question.answer == 1
    question = scripted(cute.remove_letter, ["coach"], 0, *letters, 0, 0)
    assert question.text == 'Remove every "c" from "coach".'
    assert question.options == ("oah", "coch", "coac", "cach") and question.answer == 0
    question = scripted(cute.replace_letter, ["coach"], 0, *letters, 3, 1)
    assert question.text == 'Replace every "o" in "coach" with "d".'
    assert question.options == ("doadh", "codch", "coacd", "cdach") and question.answer == 3
    # The word, four of the six pairs of t, h, r and y as they stand, and which of these.
    question = scripted(cute.swap_letters, ["thry", "three"], 0, 0, 0, 0, 0, 1)
    assert question.text == 'Swap "t" and "r" in "thry".'
    assert question.options == ("htry", "rhty", "yhrt", "trhy") and question.answer == 1


def test_closer_by_hand():
    words = ["silver", "banana", "sliver", "cabana", *(f"x{a}{b}xxx" for a in "bcdfgh" for b in "bcdfg")]
    # The length of "silver", it and thirty-one more as they stand, which is asked for. "sliver" is 2 from "silver".
    question = scripted(cute.closer, words, 0, *[0] * 32, 0)
    assert question.text == 'Which word is closer in spelling to "sliver"?' and question.shown
    assert question.options == ("silver", "banana") and question.answer == 0
    question = scripted(cute.closer, words, 0, *[0] * 32, 1)
    assert question.text == 'Which word is closer in spelling to "cabana"?' and question.answer == 1
    # Nothing is near the second word: not asked, though the first has one.
    words[3] = "xxxxxx"
    assert cute.closer(Scripted(0, *[0] * 32), Words(words)) is None


def test_edit_distance_of_known_pairs():
    for one, two, distance in (("kitten", "sitting", 3), ("flaw", "lawn", 2), ("", "abc", 3), ("same", "same", 0)):
        assert edit_distance(one, two) == edit_distance(two, one) == distance


@given(one=st.text("ab", max_size=6), two=st.text("ab", max_size=6), three=st.text("ab", max_size=6))
def test_edit_distance_is_a_distance(one, two, three):
    assert edit_distance(one, three) <= edit_distance(one, two) + edit_distance(two, three)
    assert max(len(one), len(two)) >= edit_distance(one, two) >= abs(len(one) - len(two))
    assert (edit_distance(one, two) == 0) == (one == two)


def answer_of(name: str, text: str) -> str:
    """What a reader would write."""
    quoted = re.findall('"([a-z ]+)"', text)
    match name.removeprefix("cute/"):
        case "spell":
            return " ".join(quoted[0])
        case "spell inverse":
            return quoted[0].replace(" ", "")
        case "contains letter":
            return "yes" if quoted[0] in quoted[1] else "no"
        case "add letter":
            new, letter, word = quoted
            return "".join(one + new if one == letter else one for one in word)
        case "remove letter":
            letter, word = quoted
            return "".join(one for one in word if one != letter)
        case "replace letter":
            letter, word, new = quoted
            return "".join(new if one == letter else one for one in word)
        case "swap letters":
            first, second, word = quoted
            return "".join({first: second, second: first}.get(one, one) for one in word)
    raise AssertionError(name)


@pytest.mark.parametrize("name", [name for name in TESTS if "closer" not in name])
def test_the_answer_is_what_the_task_asks_for(name):
    questions = many(TESTS[name])
    check_places(questions)
    for question in questions:
        assert question.options[question.answer] == answer_of(name, question.text)
        assert not question.shown
    assert len({question.text for question in questions}) > 200


def test_the_closer_word_is_closer():
    questions = many(TESTS["cute/closer spelling"])
    check_places(questions)
    for question in questions:
        (word,) = re.findall('"([a-z]+)"', question.text)
        near, far = question.options[question.answer], question.options[1 - question.answer]
        assert edit_distance(word, near) + 2 <= edit_distance(word, far)
        assert len(word) == len(near) == len(far) and word not in (near, far)


def test_letters_that_are_there_and_that_are_not_are_as_common():
    questions = many(TESTS["cute/contains letter"], 1000)
    vowels = [[], []]
    for question in questions:
        vowels[question.answer].append(re.findall('"([a-z]+)"', question.text)[0] in "aeiou")
    there, absent = (sum(kind) / len(kind) for kind in vowels)
    assert there - absent < 0.25  # a letter drawn from the alphabet would be a vowel in 5 of 26 cases


def test_words_are_of_the_list():
    for name in ("cute/spell inverse", "cute/closer spelling"):
        assert all(option in WORDS.all for question in many(TESTS[name], 50) for option in question.options)
