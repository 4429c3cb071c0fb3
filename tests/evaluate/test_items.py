"""Draws, word lists, and questions put into words."""

import re

import pytest

from dwslm.evaluate.items import Draw, Question, Words, load_words, make_items

WORDS = ["oak", "elm", "fir", "yew", "ash"]


def test_draws_are_fixed_by_their_seed():
    draw = Draw("0 a test")
    assert [draw.below(1000) for _ in range(5)] == [75, 269, 625, 927, 786]
    draw = Draw("1")
    assert all(2 <= draw.between(2, 4) <= 4 for _ in range(100))
    assert {draw.between(2, 4) for _ in range(100)} == {2, 3, 4}


def test_samples_hold_nothing_twice_and_every_order_is_as_likely():
    draw = Draw("orders")
    seen: dict[tuple[str, ...], int] = {}
    for _ in range(6000):
        taken = tuple(draw.sample("abcd", 2))
        seen[taken] = seen.get(taken, 0) + 1
    assert len(seen) == 12 and all(one != two for one, two in seen)
    assert all(abs(count - 500) < 5 * 500**0.5 for count in seen.values())


def test_words_by_length():
    words = Words(["to", "bee", "ant", "wasp", "to"])
    assert words.all == ("to", "bee", "ant", "wasp")
    assert words.of_length(3, 3) == ["bee", "ant"]
    assert words.of_length(3) == ["bee", "ant", "wasp"]
    assert words.of_length(1, 2) == ["to"] and words.of_length(7) == []


def test_the_shipped_words():
    words = load_words(None)
    assert len(words.all) == 2050
    assert all(word.isascii() and word.isalpha() and word.islower() for word in words.all)
    assert len(words.of_length(1, 3)) > 100 and len(words.of_length(7)) > 500


def test_a_word_list_of_ones_own(tmp_path):
    own = tmp_path / "own.txt"
    letters = "abcdefghijklmnopqrstuvwxyzäöüß"
    made = [one + two + three for one in letters[:3] for two in letters for three in letters[:4]]
    own.write_text("# comment With Capitals\n" + "\n".join(made[:180]) + "\n" + " ".join(made[180:]), encoding="utf-8")
    assert load_words(own).all == tuple(made)
    own.write_text("too few", encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.txt has 2 words: the tests need 300 or more"):
        load_words(own)
    own.write_text("Upper case", encoding="utf-8")
    with pytest.raises(ValueError, match=r"own\.txt: 'Upper' is no word of lower-case letters"):
        load_words(own)
    own.write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"own\.txt is not UTF-8 \(byte 3\)"):
        load_words(own)
    with pytest.raises(FileNotFoundError, match="no such word list"):
        load_words(tmp_path / "none.txt")


def which(draw: Draw, words: Words) -> Question | None:
    word = draw.choice(words.all)
    if word == "ash":
        return None
    return Question(f"Is it {word}?", ("yes", "no"), draw.below(2), shown=True)


def test_a_question_as_the_model_reads_it():
    (item,) = make_items("which", which, Words(["oak"] + ["ash"]), count=1, shots=0, seed=0)
    assert item.prompt == "Question: Is it oak?\nOptions: yes, no\nAnswer:"
    assert item.unasked == "Options: yes, no\nAnswer:"
    assert item.options == (" yes\n\n", " no\n\n") and item.answer == 0


def test_examples_come_first_and_are_never_the_question_itself():
    items = make_items("which", which, Words(WORDS), count=50, shots=3, seed=4)
    for number, item in enumerate(items):
        assert item.answer == number % 2
        *examples, asked = item.prompt.split("\n\n")
        assert len(examples) == 3 and asked.endswith("\nAnswer:")
        assert all(re.search("\nAnswer: (yes|no)$", example) for example in examples)
        assert asked not in [example.removesuffix(" yes").removesuffix(" no") for example in examples]
    assert items == make_items("which", which, Words(WORDS), count=50, shots=3, seed=4)
    assert items != make_items("which", which, Words(WORDS), count=50, shots=3, seed=5)
    assert items[:20] == make_items("which", which, Words(WORDS), count=20, shots=3, seed=4)


def test_a_list_that_a_test_can_do_nothing_with_is_named():
    with pytest.raises(ValueError, match="too few words of the kinds that the test 'which' needs"):
        make_items("which", which, Words(["ash"]), count=1, shots=0, seed=0)
