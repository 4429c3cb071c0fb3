"""Counting and arithmetic, as questions with numbers for options.

The options are drawn first, then which of them is to be right, and then a question that has it for its answer.
"""

from dwslm.evaluate.items import Draw, Question, Test, Words

OPTIONS = 4
OFFSETS = (0, 1, 10, 11)  # of the options of a sum: wrong in the ones, in the tens, or in both


def count_letters(draw: Draw, words: Words) -> Question | None:
    options = _stretch(draw.between(3, 6))
    right = options[answer := draw.below(OPTIONS)]
    if not (among := words.of_length(right, right)):
        return None
    return _question(f'How many letters does the word "{draw.choice(among)}" have?', options, answer)


def count_letter(draw: Draw, words: Words) -> Question | None:
    word, other = draw.choice(words.all), draw.choice(words.all)
    letters = [[one for one in dict.fromkeys(word + other) if word.count(one) == count] for count in range(3)]
    if not all(letters):  # the same words for every answer
        return None
    answer = draw.below(3)
    text = f'How many times does the letter "{draw.choice(letters[answer])}" occur in "{word}"?'
    return _question(text, [0, 1, 2], answer)


def count_words(draw: Draw, words: Words) -> Question | None:
    options = _stretch(draw.between(3, 9))
    right = options[answer := draw.below(OPTIONS)]
    listed = ", ".join(draw.sample(words.all, right))
    return _question(f"How many words are in this list: {listed}?", options, answer)


def next_number(draw: Draw, words: Words) -> Question | None:
    options = _near(draw.between(45, 88))
    right = options[answer := draw.below(OPTIONS)]
    step = draw.choice((1, 2, 3, 5, 10))
    shown = ", ".join(str(right - step * n) for n in (4, 3, 2, 1))
    return _question(f"Which number comes next: {shown}?", options, answer)


def add(draw: Draw, words: Words) -> Question | None:
    options = _near(draw.between(10, 88))
    right = options[answer := draw.below(OPTIONS)]
    one = draw.between(1, right - 1)
    return _question(f"What is {one} + {right - one}?", options, answer)


def subtract(draw: Draw, words: Words) -> Question | None:
    options = _near(draw.between(1, 80))
    right = options[answer := draw.below(OPTIONS)]
    one = draw.between(right + 1, 99)
    return _question(f"What is {one} - {one - right}?", options, answer)


def multiply(draw: Draw, words: Words) -> Question | None:
    one, first = draw.between(2, 12), draw.between(2, 9)
    answer = draw.below(OPTIONS)
    options = [one * two for two in _stretch(first)]
    return _question(f"What is {one} * {first + answer}?", options, answer)


TESTS: dict[str, Test] = {
    "counting/letters of a word": count_letters,
    "counting/one letter": count_letter,
    "counting/words of a list": count_words,
    "counting/next number": next_number,
    "arithmetic/add": add,
    "arithmetic/subtract": subtract,
    "arithmetic/multiply": multiply,
}


def _stretch(first: int) -> list[int]:
    return [first + n for n in range(OPTIONS)]


def _near(first: int) -> list[int]:
    return [first + offset for offset in OFFSETS]


def _question(text: str, options: list[int], answer: int) -> Question:
    return Question(text, tuple(map(str, options)), answer)
