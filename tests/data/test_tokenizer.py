import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

import dwslm.data.tokenizer
from dwslm.data.tokenizer import EOD, eod_id, load_tokenizer, token_bytes, tokenizer_hash, train_tokenizer

TEXTS = [
    f"The {noun} of {count} {noun}s, naïve or not; Größe {count * 37}, 日本語の文章です。 Привет, мир!\n"
    f"\tif x == {count}:\n"
    for count, noun in enumerate(["river", "house", "letter", "winter", "garden", "engine"] * 20)
]
TOKENIZER = train_tokenizer(TEXTS, 400)


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_unicode_comes_back_and_bytes_add_up(text):
    ids = encode(text)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert int(token_bytes(TOKENIZER)[ids].sum()) == len(text.encode("utf-8"))


@pytest.mark.parametrize(
    "text", ["\x00\x01\x7f", "e\u0301 \ufb01 \uff21", " lead", "  a  ", "\r\n\r\n", "\ufffd", "🏳️‍🌈"]
)
def test_nothing_is_normalised(text):
    assert TOKENIZER.decode(encode(text)) == text


def test_exact_vocabulary_with_every_byte_and_one_special():
    assert TOKENIZER.get_vocab_size() == 400
    lengths = token_bytes(TOKENIZER)
    assert lengths.dtype == np.int32 and lengths.shape == (400,)
    assert (lengths == 0).nonzero()[0].tolist() == [eod_id(TOKENIZER)]
    assert (lengths == 1).sum() == 256


def test_token_bytes_by_hand():
    # A space is worth 1, and so is one of the three bytes of U+65E5, though it decodes to U+FFFD.
    lengths = token_bytes(TOKENIZER)
    assert lengths[TOKENIZER.token_to_id("Ġ")] == 1
    assert lengths[TOKENIZER.token_to_id("æ")] == 1  # 0xE6, the first byte of U+65E5
    assert lengths[TOKENIZER.token_to_id("Ġriver")] == 6


def test_special_token_in_a_text_is_plain_text():
    ids = encode(f"before {EOD} after")
    assert eod_id(TOKENIZER) not in ids
    assert TOKENIZER.decode(ids) == f"before {EOD} after"


def test_digits_stay_short_and_words_keep_their_space():
    pieces = [piece for piece, _ in TOKENIZER.pre_tokenizer.pre_tokenize_str("on 1234567 days")]
    assert pieces == ["on", "Ġ", "123", "456", "7", "Ġdays"]


def test_vowel_signs_stay_in_their_word():
    word = "हिन्दी"
    assert len(TOKENIZER.pre_tokenizer.pre_tokenize_str(word)) == 1


def test_same_text_same_file_in_another_process(tmp_path):
    TOKENIZER.save(str(tmp_path / "here.json"))
    code = (
        "import sys; from dwslm.data.tokenizer import train_tokenizer\n"
        f"train_tokenizer({TEXTS!r}, 400).save(sys.argv[1])"
    )
    for name in ("one.json", "two.json"):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / name)], check=True)
        assert (tmp_path / name).read_bytes() == (tmp_path / "here.json").read_bytes()
    assert tokenizer_hash(tmp_path / "one.json") == hashlib.sha256((tmp_path / "here.json").read_bytes()).hexdigest()


def test_a_loaded_tokenizer_encodes_alike(tmp_path):
    TOKENIZER.enable_padding(length=50)
    TOKENIZER.save(str(tmp_path / "padded.json"))
    TOKENIZER.no_padding()
    loaded = load_tokenizer(tmp_path / "padded.json")
    text = f"one {EOD} text"
    assert loaded.encode(text, add_special_tokens=False).ids == encode(text)


@pytest.mark.parametrize(
    ("character", "merges"),
    [("x", 12), ("-", 12), (" ", 12), ("\n", 13), ("\u5b57", 2 + 12), ("\u0e01", 2 + 12), ("\u0301", 1 + 12)],
)
def test_a_run_without_breaks_is_cut_for_training(character, merges):
    # Doubled again and again, an entry gets as long as the pieces: 2 ** 12 = 4096 characters, line ends twice as many.
    with pytest.raises(ValueError, match=f"only gives {257 + merges} entries"):
        train_tokenizer([character * 16384], 1000)
    assert encoded_pieces(character * 16384) == [16384]  # the tokenizer itself cuts nothing


def encoded_pieces(text: str) -> list[int]:
    return [end - start for _, (start, end) in TOKENIZER.pre_tokenizer.pre_tokenize_str(text)]


def test_ordinary_text_is_trained_on_as_it_is(monkeypatch):
    texts = [*TEXTS, *(f"a{c * n}b" for c in "x\u5b57 -\n" for n in (1, 2, 999, 4000))]
    cut = train_tokenizer(texts, 420).to_str()
    monkeypatch.setattr("dwslm.data.tokenizer._TRAINED_PIECES", dwslm.data.tokenizer._PIECES)
    assert train_tokenizer(texts, 420).to_str() == cut


def test_too_little_text():
    with pytest.raises(
        ValueError,
        match=r"vocab_size=5000: the training text only gives (\d+) entries.* with --vocab-size N \(up to \1\)",
    ):
        train_tokenizer(["a few words"], 5000)


def test_vocabulary_below_the_bytes():
    with pytest.raises(ValueError, match="vocab_size=256"):
        train_tokenizer(TEXTS, 256)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json: no such tokenizer"):
        load_tokenizer(tmp_path / "nowhere.json")


def test_not_a_tokenizer_file(tmp_path):
    (tmp_path / "broken.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"broken\.json is not a tokenizer file"):
        load_tokenizer(tmp_path / "broken.json")


def test_a_normalising_tokenizer_is_refused(tmp_path):
    tokenizer = Tokenizer.from_str(TOKENIZER.to_str())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(tmp_path / "nfc.json"))
    with pytest.raises(ValueError, match=r"nfc\.json normalises text"):
        load_tokenizer(tmp_path / "nfc.json")


def test_a_word_tokenizer_is_refused(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"日本": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    with pytest.raises(ValueError, match=r"words\.json: not a byte-level tokenizer"):
        load_tokenizer(tmp_path / "words.json")


def test_end_of_document_must_be_a_special_token():
    with pytest.raises(ValueError, match="no special token 'river'"):
        eod_id(TOKENIZER, "river")
