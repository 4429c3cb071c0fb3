"""Random splits: tables by hand, a slow reference of the method, and what must hold for any text."""

import itertools
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from dwslm.data.stochastok import SplitTable, StochasTokSettings, expand, expanded_length, split_table
from dwslm.data.tokenizer import EOD, _byte_alphabet, eod_id, token_bytes, train_tokenizer
from dwslm.evaluate.baselines import token_spellings
from dwslm.evaluate.bits_per_byte import EvalSettings, score, text_dataset

TEXTS = [
    f"The {noun} of {count} {noun}s, naïve or not; Größe {count * 37}, 日本語の文章です。 Привет, мир!\n"
    for count, noun in enumerate(["river", "house", "letter", "winter", "garden", "engine"] * 20)
]
TOKENIZER = train_tokenizer(TEXTS, 500)
TABLE = split_table(TOKENIZER)
SPELLINGS = token_spellings(TOKENIZER)


def hand_made(*entries: str) -> Tokenizer:
    """A byte-level vocabulary of the bytes, these entries and eod. It never encodes, so it has no merges."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(_byte_alphabet()))}
    for entry in entries:
        vocabulary[entry] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOD])
    return tokenizer


ABCD = hand_made("ab", "bc", "cd", "abc", "abcd")
ABCD_TABLE = split_table(ABCD)


def splits_of(table: SplitTable, token: int) -> list[tuple[int, int]]:
    rows = slice(table.starts[token], table.starts[token + 1])
    return list(zip(table.first[rows].tolist(), table.second[rows].tolist(), strict=True))


def ids(*entries: str) -> list[int]:
    return [ABCD.token_to_id(entry) for entry in entries]


# ---- the table ------------------------------------------------------------------------------------------


def test_the_splits_of_a_small_vocabulary_by_hand():
    a, b, c, d, ab, bc, cd, abc, abcd = ids("a", "b", "c", "d", "ab", "bc", "cd", "abc", "abcd")
    assert splits_of(ABCD_TABLE, a) == []
    assert splits_of(ABCD_TABLE, ab) == [(a, b)]
    assert splits_of(ABCD_TABLE, abc) == [(a, bc), (ab, c)]
    assert splits_of(ABCD_TABLE, abcd) == [(ab, cd), (abc, d)]  # "bcd" is no entry
    assert splits_of(ABCD_TABLE, eod_id(ABCD)) == []
    assert len(ABCD_TABLE.first) == len(ABCD_TABLE.second) == ABCD_TABLE.starts[-1] == 3 + 2 + 2


def test_a_trained_table_holds_every_split_and_no_other():
    known = {spelling: token for token, spelling in enumerate(SPELLINGS) if spelling}
    for token, spelling in enumerate(SPELLINGS):
        pairs = [(spelling[:cut], spelling[cut:]) for cut in range(1, len(spelling))]
        expected = [(known[one], known[two]) for one, two in pairs if one in known and two in known]
        assert splits_of(TABLE, token) == expected
        assert bool(expected) == (len(spelling) > 1)
    assert np.array_equal(TABLE.bytes, token_bytes(TOKENIZER))


def test_an_entry_that_cannot_be_split_is_refused():
    with pytest.raises(
        ValueError,
        match=r"entry 'xyz' \(id 256\).* is not two other entries joined.*"
        r"leave out data\.stochastok\.enabled, and data\.stochastok\.proportion with it",
    ):
        split_table(hand_made("xyz"))


def test_added_tokens_are_split_by_their_bytes_unless_special():
    tokenizer = hand_made("bé")  # in the byte alphabet é is the byte E9
    tokenizer.add_tokens([AddedToken("abé")])  # in plain characters it is two bytes, C3 A9
    with pytest.raises(ValueError, match="is not two other entries joined"):
        split_table(tokenizer)
    tokenizer = hand_made("ab")
    tokenizer.add_tokens([AddedToken("abc")])
    assert splits_of(split_table(tokenizer), tokenizer.token_to_id("abc")) == [
        (tokenizer.token_to_id("ab"), tokenizer.token_to_id("c"))
    ]


# ---- expansion ------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 499), min_size=1, max_size=60)


@given(tokens=TOKENS, share=st.floats(0, 1), seed=st.integers(-(2**70), 2**70))
def test_text_and_special_tokens_stay_and_the_length_is_exact(tokens, share, seed):
    tokens = np.array(tokens)
    most = int(np.maximum(TABLE.bytes[tokens], 1).sum())
    target = len(tokens) + round(share * (most - len(tokens)))
    before = tokens.copy()
    expanded = expand(tokens, target, TABLE, seed)
    assert expanded.dtype == np.int32 and expanded.shape == (target,)
    assert np.array_equal(tokens, before)
    eod = eod_id(TOKENIZER)

    def stretches(of: np.ndarray) -> list[bytes]:  # the text between special tokens
        parts = itertools.groupby(of.tolist(), key=lambda token: token == eod)
        return [
            b"*" * len(list(part)) if special else b"".join(map(SPELLINGS.__getitem__, part)) for special, part in parts
        ]

    assert stretches(expanded) == stretches(tokens)
    assert np.array_equal(expanded, expand(tokens, target, TABLE, seed))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=200), seed=st.integers(0, 2**64))
def test_a_document_decodes_to_the_same_text(text, seed):
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.uint16)
    target = int(expanded_length(len(tokens), len(text.encode()), 0.5))
    assert TOKENIZER.decode(expand(tokens, target, TABLE, seed).tolist()) == text


def test_all_the_way_down_are_the_bytes():
    tokens = np.arange(499)
    everything = expand(tokens, int(np.maximum(TABLE.bytes[tokens], 1).sum()), TABLE, 3)
    assert (TABLE.bytes[everything] <= 1).all()


def test_seeds_differ_and_no_split_changes_nothing():
    tokens = np.array(TOKENIZER.encode(TEXTS[0] * 3).ids)
    target = len(tokens) + 20
    results = {tuple(expand(tokens, target, TABLE, seed).tolist()) for seed in range(20)}
    assert len(results) == 20
    assert np.array_equal(expand(tokens, len(tokens), TABLE, 1), tokens)
    assert expand(np.zeros(0, np.uint16), 0, TABLE, 1).shape == (0,)


def test_the_result_of_a_seed_is_fixed():
    # Runs are resumed on other machines and later versions: their text must not change.
    tokens = np.array(ids("abcd", "abc", "a", "cd", "abcd", "ab"))
    entries = [ABCD.id_to_token(token) for token in expand(tokens, 11, ABCD_TABLE, 1234).tolist()]
    assert "".join(entries) == "abcdabcacdabcdab"
    assert entries == ["a", "b", "cd", "abc", "a", "c", "d", "ab", "cd", "a", "b"]


def test_what_cannot_be_had_is_refused():
    tokens = np.array(ids("abc", "a"))
    for target in (1, 5):
        with pytest.raises(ValueError, match=f"2 tokens can't be split into {target}: give 2 to 4"):
            expand(tokens, target, ABCD_TABLE, 0)


# ---- how often --------------------------------------------------------------------------------------------


def outcomes(tokens: tuple[int, ...], splits: int) -> dict[tuple[int, ...], float]:
    """The method written out: a token uniformly among those that can be split, a split uniformly among its own."""
    if splits == 0:
        return {tokens: 1.0}
    able = [place for place, token in enumerate(tokens) if splits_of(ABCD_TABLE, token)]
    result: dict[tuple[int, ...], float] = defaultdict(float)
    for place in able:
        pairs = splits_of(ABCD_TABLE, tokens[place])
        for pair in pairs:
            rest = outcomes((*tokens[:place], *pair, *tokens[place + 1 :]), splits - 1)
            for outcome, probability in rest.items():
                result[outcome] += probability / len(able) / len(pairs)
    return result


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
def test_outcomes_are_as_likely_as_in_the_method(splits):
    tokens = tuple(ids("abcd", "a", "abc", "cd"))
    expected = outcomes(tokens, splits)
    draws = 8000
    document = np.array(tokens)
    seen = Counter(tuple(expand(document, len(tokens) + splits, ABCD_TABLE, seed).tolist()) for seed in range(draws))
    assert set(seen) <= set(expected) and sum(expected.values()) == pytest.approx(1)
    # Pearson's chi-square has mean f and variance 2 f for f = outcomes - 1; five deviations are never passed.
    chi = sum((seen[key] - draws * p) ** 2 / (draws * p) for key, p in expected.items())
    freedom = len(expected) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_a_long_document_is_split_evenly_and_as_a_loop_would():
    draw = random.Random(5)
    tokens = np.array(draw.choices(ids("abcd", "abc", "ab", "a"), k=20_000))
    expanded = expand(tokens, 22_000, ABCD_TABLE, 9)
    halves = np.searchsorted(np.cumsum(ABCD_TABLE.bytes[expanded]), ABCD_TABLE.bytes[tokens[:10_000]].sum())
    assert abs(int(halves) + 1 - 11_000) < 5 * (2000 / 4) ** 0.5

    # The loop of the paper on the same document: its counts of each entry, within five deviations of counts.
    slow = tokens.tolist()
    made = 0
    while made < 2000:
        place = draw.randrange(len(slow))
        if pairs := splits_of(ABCD_TABLE, slow[place]):
            slow[place : place + 1] = draw.choice(pairs)
            made += 1
    one, two = Counter(expanded.tolist()), Counter(slow)
    for token in set(one) | set(two):
        assert abs(one[token] - two[token]) < 5 * (2 * 2000) ** 0.5


def test_scoring_reads_the_tokenizers_own_tokens(tmp_path, monkeypatch):
    """Bits per byte are of the text as it is tokenized: each of its tokens once, in order, and none that was split."""

    def never(*arguments):
        raise AssertionError("scoring expanded a text")

    monkeypatch.setattr("dwslm.data.stochastok.expand", never)
    text = "".join(TEXTS[:40])
    (tmp_path / "own.txt").write_text(text, encoding="utf-8")
    dataset = text_dataset(tmp_path / "own.txt", TOKENIZER, eod_id(TOKENIZER))
    pieces: dict[int, list[int]] = {}

    def nats(batch):
        for n in np.flatnonzero(batch.docs >= 0):
            segment = batch.tokens[batch.cu_seqlens[n] : batch.cu_seqlens[n + 1]]
            pieces[int(batch.starts[n])] = segment[1:].tolist()
        return np.ones(len(batch.tokens), np.float32)

    scores = score(nats, dataset, EvalSettings(micro_batch_tokens=128), training_context=64)
    seen = [token for start in sorted(pieces) for token in pieces[start]]
    assert seen == TOKENIZER.encode(text, add_special_tokens=False).ids
    assert scores.documents["tokens"].tolist() == [len(seen)] and scores.documents["bytes"].tolist() == [
        len(text.encode())
    ]


def test_lengths_of_documents():
    lengths = expanded_length(np.array([1000, 9, 10, 50, 0]), np.array([3300, 30, 30, 52, 0]), 0.1)
    assert lengths.tolist() == [1100, 9, 11, 52, 0]
    assert int(expanded_length(457, 1500, 0.0)) == 457


def test_settings_are_off_by_default_and_checked():
    assert StochasTokSettings().splits_per_token == 0.0
    assert StochasTokSettings(enabled=True).splits_per_token == 0.1
    assert StochasTokSettings(enabled=True, proportion=0.25).splits_per_token == 0.25
    with pytest.raises(ValueError, match=r"proportion=0\.25 has no effect without data\.stochastok\.enabled=true"):
        StochasTokSettings(proportion=0.25)
    for wrong in (0.0, -0.1, float("nan"), float("inf")):
        with pytest.raises(
            ValueError, match=r"proportion=.*must be above 0.*leave out both it and data\.stochastok\.enabled"
        ):
            StochasTokSettings(enabled=True, proportion=wrong)
