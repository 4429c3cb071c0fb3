"""The character tasks of CUTE (arXiv:2409.15452) as questions with options, so that base models can be scored.

Spelling a word and reading a spelt one, whether a letter occurs, which of two words is closer in spelling, and adding
after, removing, replacing and swapping letters. The paper has models write the answer; here they choose between the
true answer and others that the same task gives for another word like it, or for other letters of the same word.
"""

from collections.abc import Callable

from dwslm.evaluate.items import Draw, Question, Test, Words

OPTIONS = 4
SHORTEST, LONGEST = 4, 8  # letters of the words used
THIRDS = 30  # words among which the one to compare with is looked for
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def spell(draw: Draw, words: Words) -> Question | None:
    if (alike := _alike(draw, words)) is None:
        return None
    answer = draw.below(OPTIONS)
    return Question(f'Spell the word "{alike[answer]}".', tuple(map(" ".join, alike)), answer)


def spell_inverse(draw: Draw, words: Words) -> Question | None:
    if (alike := _alike(draw, words)) is None:
        return None
    answer = draw.below(OPTIONS)
    return Question(f'Which word is spelled "{" ".join(alike[answer])}"?', tuple(alike), answer)


def contains_letter(draw: Draw, words: Words) -> Question | None:
    word, other = (draw.choice(words.of_length(SHORTEST, LONGEST)) for _ in range(2))
    letters = draw.choice(word), draw.choice(other)  # as frequent among words either way
    if letters[1] in word:
        return None
    answer = draw.below(2)
    return Question(f'Is there a "{letters[answer]}" in "{word}"?', ("yes", "no"), answer)


def closer(draw: Draw, words: Words) -> Question | None:
    """Which of two words is nearer to a third, in insertions, deletions and replacements of letters, by two or more."""
    size = len(draw.choice(words.of_length(SHORTEST, LONGEST)))
    if len(among := words.of_length(size, size)) < 2 + THIRDS:
        return None
    one, two, *thirds = draw.sample(among, 2 + THIRDS)
    lead = [edit_distance(third, two) - edit_distance(third, one) for third in thirds]  # of the first word
    if max(lead) < 2 or min(lead) > -2:  # each must have its turn: words of common letters are near to more words
        return None
    answer = draw.below(2)
    third = thirds[lead.index(min(lead) if answer else max(lead))]
    return Question(f'Which word is closer in spelling to "{third}"?', (one, two), answer, shown=True)


def add_letter(draw: Draw, words: Words) -> Question | None:
    return _every(
        draw,
        words,
        'Add "{new}" after every "{letter}" in "{word}".',
        lambda word, letter, new: word.replace(letter, letter + new),
    )


def remove_letter(draw: Draw, words: Words) -> Question | None:
    return _every(
        draw, words, 'Remove every "{letter}" from "{word}".', lambda word, letter, new: word.replace(letter, "")
    )


def replace_letter(draw: Draw, words: Words) -> Question | None:
    return _every(
        draw,
        words,
        'Replace every "{letter}" in "{word}" with "{new}".',
        lambda word, letter, new: word.replace(letter, new),
    )


def swap_letters(draw: Draw, words: Words) -> Question | None:
    word = draw.choice(words.of_length(SHORTEST, LONGEST))
    single = [letter for letter in word if word.count(letter) == 1]
    pairs = [(one, two) for n, one in enumerate(single) for two in single[n + 1 :]]
    if len(pairs) < OPTIONS:
        return None
    pairs, answer = draw.sample(pairs, OPTIONS), draw.below(OPTIONS)
    options = tuple(word.translate(str.maketrans(one + two, two + one)) for one, two in pairs)
    one, two = pairs[answer]
    return Question(f'Swap "{one}" and "{two}" in "{word}".', options, answer)


TESTS: dict[str, Test] = {
    "cute/spell": spell,
    "cute/spell inverse": spell_inverse,
    "cute/contains letter": contains_letter,
    "cute/closer spelling": closer,
    "cute/add letter": add_letter,
    "cute/remove letter": remove_letter,
    "cute/replace letter": replace_letter,
    "cute/swap letters": swap_letters,
}


def edit_distance(one: str, two: str) -> int:
    """The fewest insertions, deletions and replacements of a letter that turn one word into the other (Levenshtein)."""
    row = list(range(len(two) + 1))
    for above, letter in enumerate(one):
        before, row = row, [above + 1]
        for n, other in enumerate(two):
            row.append(min(row[n] + 1, before[n + 1] + 1, before[n] + (letter != other)))
    return row[-1]


def _alike(draw: Draw, words: Words) -> list[str] | None:
    """Four words of one length: one, and of forty others the three that have the most letters in the same places."""
    first = draw.choice(words.of_length(SHORTEST, LONGEST))
    among = [word for word in words.of_length(len(first), len(first)) if word != first]
    if len(among) < OPTIONS - 1:
        return None
    others = draw.sample(among, min(40, len(among)))
    others.sort(key=lambda word: sum(map(str.__ne__, word, first)))
    return draw.sample([first, *others[: OPTIONS - 1]], OPTIONS)


def _every(draw: Draw, words: Words, text: str, change: Callable[[str, str, str], str]) -> Question | None:
    """Do something to one of four letters of a word wherever it stands, with a letter that the word lacks."""
    word = draw.choice(words.of_length(SHORTEST, LONGEST))
    letters = list(dict.fromkeys(word))
    if len(letters) < OPTIONS:
        return None
    letters, answer = draw.sample(letters, OPTIONS), draw.below(OPTIONS)
    new = draw.choice([letter for letter in ALPHABET if letter not in word])
    options = tuple(change(word, letter, new) for letter in letters)
    return Question(text.format(word=word, letter=letters[answer], new=new), options, answer)
