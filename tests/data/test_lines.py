import gzip

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

import dwslm.data.lines
from dwslm.data.lines import read_chunks_of_lines, split_lines


def written(tmp_path, name, content):
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}.get(name.rpartition(".")[2], bytes)
    (tmp_path / name).write_bytes(pack(content))
    return tmp_path / name


@given(st.lists(st.binary(max_size=9).map(lambda raw: raw.replace(b"\n", b"")), max_size=30), st.integers(1, 30))
def test_chunks_end_with_the_first_line_that_fills_them(tmp_path_factory, lines, size):
    folder = tmp_path_factory.mktemp("lines")
    content = b"".join(line + b"\n" for line in lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dwslm.data.lines, "CHUNK_BYTES", size)
        expected, number, kept = [], 1, b""
        for at, line in enumerate(lines, start=1):
            kept += line + b"\n"
            if len(kept) >= size:
                expected.append((number, kept))
                number, kept = at + 1, b""
        if kept:
            expected.append((number, kept))
        for block in (3, 1000):  # however the file is read
            patch.setattr(dwslm.data.lines, "_BLOCK", block)
            path = written(folder, "a.jsonl", content)
            chunks = list(read_chunks_of_lines(path))
            assert [(chunk.first, chunk.raw) for chunk in chunks] == expected
            assert [line for chunk in chunks for line in split_lines(chunk.raw)] == lines
            assert not chunks or chunks[-1].offset == len(content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_compression_makes_no_difference(tmp_path, monkeypatch, name):
    monkeypatch.setattr(dwslm.data.lines, "CHUNK_BYTES", 1000)
    content = b"".join(b"line %d %s\n" % (number, b"x" * (number % 70)) for number in range(900)) + b"no end"
    path = written(tmp_path, name, content)
    chunks = list(read_chunks_of_lines(path))
    assert b"".join(chunk.raw for chunk in chunks) == content
    assert [chunk.first for chunk in chunks][:2] == [1, chunks[0].raw.count(b"\n") + 1]
    assert chunks[-1].offset == path.stat().st_size
    assert split_lines(chunks[-1].raw)[-1] == b"no end"


def test_lines_before_the_damage_come_first(tmp_path):
    content = b"".join(b"line %d\n" % number for number in range(400_000))  # several reads
    path = written(tmp_path, "a.jsonl.gz", content)
    path.write_bytes(path.read_bytes()[:-2000])
    seen = []
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz:\d+: the compressed file is damaged or cut short") as error:
        for chunk in read_chunks_of_lines(path):
            seen += split_lines(chunk.raw)
    assert seen == content.split(b"\n")[: len(seen)] and len(seen) > 1000
    assert f":{len(seen) + 1}:" in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_every_cut_of_a_compressed_file_is_damage_and_no_text_is_none(tmp_path, name):
    for content in (b"", b'{"text": "a"}\n'):
        path = written(tmp_path, name, content)
        assert b"".join(chunk.raw for chunk in read_chunks_of_lines(path)) == content
        whole = path.read_bytes()
        for size in range(len(whole)):  # from a download of which nothing arrived on
            path.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=rf"{name}:1: the compressed file is damaged or cut short"):
                list(read_chunks_of_lines(path))


def test_a_line_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(dwslm.data.lines, "_LONGEST_LINE", 1 << 20)
    path = written(tmp_path, "a.jsonl", b"short\n" + b"x" * (3 << 20))
    with pytest.raises(ValueError, match="a line of more than 1 MiB; is this JSON lines"):
        list(read_chunks_of_lines(path))


def test_split_lines():
    assert split_lines(b"") == [] and split_lines(b"\n") == [b""] and split_lines(b"a\n\nb") == [b"a", b"", b"b"]
