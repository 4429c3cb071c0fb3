"""Arrow's columns against the plain reader, on sound and on odd files."""

import json
import math

import numpy as np
import pytest

from dwslm.page import columns
from dwslm.page.columns import Columns
from dwslm.runs.durable import to_json
from dwslm.runs.reader import read_rows

FIELDS = ("step", "attempt", "loss", "power.mean")
SOUND = [{"step": i, "attempt": 1, "loss": 1 / (i + 1), "power": {"mean": i, "max": 2}, "extra": "x"} for i in range(9)]


def lines(rows):
    return "".join(to_json(row) + "\n" for row in rows).encode()


def expect(path):
    """The same by the plain reader."""
    table = []
    for row in read_rows(path)[0]:
        power = row.get("power")
        values = [
            row.get("step"),
            row.get("attempt"),
            row.get("loss"),
            power.get("mean") if isinstance(power, dict) else None,
        ]
        whole = [isinstance(v, int | float) and (i > 1 or isinstance(v, int)) for i, v in enumerate(values)]
        if all(whole[:2]):
            table.append([float(v) if ok else math.nan for v, ok in zip(values, whole, strict=True)])
    return np.array(table, float).reshape(-1, 4)


ODD = {
    "sound": lines(SOUND),
    "empty": b"",
    "no newline yet": lines(SOUND)[:-1],
    "torn tail": lines(SOUND) + b'{"step": 10, "att',
    "zero tail": lines(SOUND) + b"\0" * 100,
    "zeros inside": lines(SOUND[:3]) + b"\0\0\0\n" + lines(SOUND[3:]),
    "damaged line": lines(SOUND[:3]) + b'{"step": 4, "lo\n' + lines(SOUND[3:]),
    "no object": lines(SOUND[:3]) + b"17\n[1]\n" + lines(SOUND[3:]),
    "not utf-8": lines(SOUND[:3]) + b'{"step": 4, "attempt": 1, "x": "\xff"}\n' + lines(SOUND[3:]),
    "not finite": lines([{**SOUND[0], "loss": v} for v in (math.nan, math.inf, -math.inf, 1.0)]),
    "nan alone": lines([{**SOUND[0], "loss": v} for v in (math.nan, 2.0)]),
    "text": lines([{**SOUND[0], "loss": "high"}, {**SOUND[1], "step": "2"}, {**SOUND[2], "power": 3}]),
    "missing": lines([{"step": 1, "attempt": 1}, {"loss": 1.0}, {"step": 1.5, "attempt": 1}, {}]),
    "huge": lines([{**SOUND[0], "loss": 10**400}, {**SOUND[1], "step": 2**70}]),
    "null": lines([{**SOUND[0], "loss": None, "power": None}, {**SOUND[1], "power": {"mean": None}}]),
}


@pytest.mark.parametrize("kind", ODD)
def test_columns_are_what_the_plain_reader_gives(kind, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(ODD[kind])
    found = Columns(path, FIELDS, needs=("step", "attempt"))
    found.read()
    # What no float can hold is not there; the plain reader keeps Python's whole number.
    wanted = np.array([[0, 1, math.nan, 0], [2.0**70, 1, 0.5, 1]]) if kind == "huge" else expect(path)
    np.testing.assert_array_equal(np.stack([found[name] for name in FIELDS], 1), wanted)
    assert len(found) == len(wanted)


def test_a_growing_file_is_read_on_from_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    whole = lines(SOUND)
    found = Columns(path, FIELDS)
    path.write_bytes(b"")
    assert not found.read()
    parsed = []
    monkeypatch.setattr(
        columns.Columns, "_arrow", lambda self, chunk: parsed.append(bytes(chunk)) or self._python(bytes(chunk))
    )
    for end in (10, 100, 101, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:end])
        found.read()
        assert len(found) == whole[:end].count(b"\n")
    assert b"".join(parsed) == whole  # nothing twice
    assert not found.read()


def test_a_file_that_was_replaced_is_read_anew(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(SOUND))
    found = Columns(path, FIELDS)
    found.read()
    new = tmp_path / "b.jsonl"
    new.write_bytes(lines(SOUND[:2]) + b" " * 4096)
    new.replace(path)
    found.read()
    assert found["step"].tolist() == [0, 1]


def test_lines_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "CHUNK", 64)
    path = tmp_path / "a.jsonl"
    rows = [{**row, "text": "y" * 200} for row in SOUND]
    path.write_bytes(lines(rows))
    found = Columns(path, FIELDS)
    found.read()
    assert found["loss"].tolist() == [row["loss"] for row in rows]
    assert json.loads(lines(rows[:1]))["loss"] == found["loss"][0]
