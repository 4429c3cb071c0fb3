"""Draws that a test writes down, and looks at many drawn questions."""

from dwslm.evaluate.items import Draw, Question, Test, Words, load_words

WORDS = load_words(None)


class Scripted(Draw):
    """Gives the numbers it was made with, one for each draw."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = list(numbers)

    def below(self, count: int) -> int:
        number = self.numbers.pop(0)
        assert 0 <= number < count, (number, count)
        return number


def scripted(test: Test, words: list[str], *numbers: int) -> Question:
    """The question that these draws make, all of them used."""
    draw = Scripted(*numbers)
    question = test(draw, Words(words))
    assert question is not None and not draw.numbers, draw.numbers
    return question


def many(test: Test, count: int = 300) -> list[Question]:
    """Questions about the shipped words."""
    draw, found = Draw("many"), []
    while len(found) < count:
        if question := test(draw, WORDS):
            found.append(question)
    return found


def check_places(questions: list[Question]) -> None:
    """Options are all different, and the right one is equally often in each place (five deviations)."""
    count = len(questions[0].options)
    for question in questions:
        assert len(question.options) == count == len(set(question.options))
        assert 0 <= question.answer < count
    expected = len(questions) / count
    for place in range(count):
        found = sum(question.answer == place for question in questions)
        assert abs(found - expected) < 5 * (expected * (1 - 1 / count)) ** 0.5, (place, found)
