"""`dwslm bench report` and `compare` from the command line's side."""

import argparse

import pytest

from dwslm.cli.bench_report import add_arguments_compare, add_arguments_report, run_compare, run_report
from dwslm.cli.errors import one_line_errors
from tests.page.bench_json import find, report, save, stat


def call(add_arguments, run, *words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with one_line_errors():
        return run(parser.parse_args([str(word) for word in words]))


def test_report_writes_two_files_and_says_where(tmp_path, capsys):
    assert call(add_arguments_report, run_report, save(tmp_path, report()), "--out", tmp_path / "page") == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "page" / name) for name in ("report.md", "report.html")]
    assert (tmp_path / "page" / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_what_is_wrong_with_a_file_is_one_line(tmp_path, capsys):
    (tmp_path / "torn.json").write_text('{"format": 1,')
    for words in ([tmp_path / "torn.json"], [tmp_path / "absent.json"], [save(tmp_path, {"loss": 1})]):
        with pytest.raises(SystemExit) as left:
            call(add_arguments_report, run_report, *words, "--out", tmp_path / "page")
        error = capsys.readouterr().err
        assert left.value.code == 1
        assert error.startswith("error: ") and error.count("\n") == 1 and str(words[0]) in error


def test_compare_leaves_with_1_where_something_got_worse(tmp_path, capsys):
    before, after = report(), report()
    find(after, "head", "softcap 20", "compiled")["forward_backward_ms"] = stat(7.0)
    a, b = save(tmp_path, before, "a.json"), save(tmp_path, after, "b.json")
    assert call(add_arguments_compare, run_compare, a, a) == 0
    assert call(add_arguments_compare, run_compare, a, b) == 1
    assert (
        "loss head softcap 20, 16,384 tokens: compiled, forward + backward: 6.40 to 7.00 ms" in capsys.readouterr().out
    )
    assert call(add_arguments_compare, run_compare, b, a) == 0
    assert call(add_arguments_compare, run_compare, a, b, "--ignore-below", "10") == 0
