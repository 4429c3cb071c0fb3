"""LangGame: six kinds of question about the letters of words, after the one of StochasTok's paper (arXiv:2506.01687).

Which of four words has the most of a letter (two or more, the others one at most), contains, starts with or ends
with one to three given letters, is the longest (seven letters or more, the others four at most), or the shortest
(three at most, the others six or more). The options stand in the question. In the first four kinds all four words
are of one length.
"""

from collections.abc import Callable, Sequence

from dwslm.evaluate.items import Draw, Question, Test, Words

OPTIONS = 4
LONGEST_PIECE = 3


def most_of_letter(draw: Draw, words: Words) -> Question | None:
    options = _of_one_length(draw, words)
    if options is None:
        return None
    repeated = [_repeated(word) for word in options]
    letters = [[one for one in own if sum(one in others for others in repeated) == 1] for own in repeated]
    if not all(letters):  # each must have its turn, or the right one would stand out
        return None
    answer = draw.below(OPTIONS)
    letter = draw.choice(letters[answer])
    text = draw.choice(('Which word has the most letter "{}"?', 'In which word does the letter "{}" occur most often?'))
    return Question(text.format(letter), tuple(options), answer, shown=True)


def contains(draw: Draw, words: Words) -> Question | None:
    return _about_piece(
        draw,
        words,
        ('Which word contains "{}"?', 'In which word can "{}" be found?'),
        lambda word, size: draw.below(len(word) - size + 1),
        lambda word, piece: piece in word,
    )


def starts_with(draw: Draw, words: Words) -> Question | None:
    return _about_piece(
        draw,
        words,
        ('Which word starts with "{}"?', 'Which word has "{}" at its beginning?'),
        lambda word, size: 0,
        lambda word, piece: word.startswith(piece),
    )


def ends_with(draw: Draw, words: Words) -> Question | None:
    return _about_piece(
        draw,
        words,
        ('Which word ends with "{}"?', 'Which word has "{}" at its end?'),
        lambda word, size: len(word) - size,
        lambda word, piece: word.endswith(piece),
    )


def longest(draw: Draw, words: Words) -> Question | None:
    texts = ("Which word is the longest?", "Which of these words has the most letters?")
    return _about_length(draw, texts, words.of_length(7), words.of_length(1, 4))


def shortest(draw: Draw, words: Words) -> Question | None:
    texts = ("Which word is the shortest?", "Which of these words has the fewest letters?")
    return _about_length(draw, texts, words.of_length(1, 3), words.of_length(6))


TESTS: dict[str, Test] = {
    "langgame/most of a letter": most_of_letter,
    "langgame/contains": contains,
    "langgame/starts with": starts_with,
    "langgame/ends with": ends_with,
    "langgame/longest": longest,
    "langgame/shortest": shortest,
}


def _of_one_length(draw: Draw, words: Words) -> list[str] | None:
    """Four words of a length that a word drawn at random has; longer ones don't contain more by being longer."""
    among = words.of_length(size := len(draw.choice(words.all)), size)
    return draw.sample(among, OPTIONS) if len(among) >= OPTIONS else None


def _repeated(word: str) -> list[str]:
    """The letters that a word has twice or more."""
    return [letter for letter in dict.fromkeys(word) if word.count(letter) > 1]


def _others(options: Sequence[str], answer: int) -> list[str]:
    return [*options[:answer], *options[answer + 1 :]]


def _about_piece(
    draw: Draw,
    words: Words,
    texts: Sequence[str],
    start_of: Callable[[str, int], int],
    fits: Callable[[str, str], bool],
) -> Question | None:
    """Which word has a piece, taken from one of them where `start_of` says, that `fits` no other."""
    options = _of_one_length(draw, words)
    if options is None:
        return None
    answer, size = draw.below(OPTIONS), draw.between(1, LONGEST_PIECE)
    word = options[answer]
    if size >= len(word):
        return None
    start = start_of(word, size)
    piece = word[start : start + size]
    if any(fits(other, piece) for other in _others(options, answer)):
        return None
    return Question(draw.choice(texts).format(piece), tuple(options), answer, shown=True)


def _about_length(draw: Draw, texts: Sequence[str], right: list[str], wrong: list[str]) -> Question | None:
    if not right or len(wrong) < OPTIONS - 1:
        return None
    answer = draw.below(OPTIONS)
    options = draw.sample(wrong, OPTIONS - 1)
    options.insert(answer, draw.choice(right))
    return Question(draw.choice(texts), tuple(options), answer, shown=True)
