"""The exported folder: what is in it without a browser, what the next export makes again, and what is refused."""

import json
import re
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dwslm.page import export as exporting
from dwslm.page.export import export
from dwslm.page.site import PACKAGE, static_files
from dwslm.runs.writer import RunWriter
from tests.page.run_folders import BEGAN, add_scores, append, make_run, report

BUDGET = 150_000  # bytes of code in all
MARKUP = "<img src=x onerror=alert(1)>\"'&</script><script>alert(2)</script>"


class Tags(HTMLParser):
    """Every tag with its attributes, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def page(out, name="index.html"):
    return (out / name).read_text(encoding="utf-8")


def test_index_holds_results_runs_and_figures(tmp_path):
    runs = tmp_path / "runs"
    first = make_run(runs, "first", losses=[4.0, 3.0, 2.0])
    add_scores(first, 3, 1.5, wiki=1.25)
    make_run(runs, "second", losses=[5.0], end="failed", began=BEGAN + 10)
    decisions = tmp_path / "decisions.toml"
    decisions.write_text(
        '[[decision]]\ntest = "t"\ntitle = "first test"\nresult = "1.50 it is"\ndecision = "take it"\nnumber = "K7"\n'
        f'runs = ["{first.id}"]\nfigures = [{{ printed = "1.50", run = "{first.id}", metric = "bits_per_byte" }}]\n'
    )
    done = export(runs, tmp_path / "out", decisions, now=BEGAN + 100)
    assert (done.runs, done.made) == (2, 2)
    text = Tags(page(done.index.parent)).text
    for wanted in (
        "first test",
        "1.50 it is",
        "take it",
        "K7",
        "first",
        "second",
        "failed",
        "done",
        "3.0000",
        "As of 2026-11-29",
    ):
        assert wanted in text
    names = [
        attrs["data-run"] for tag, attrs in Tags(page(tmp_path / "out")).tags if tag == "tr" and "data-run" in attrs
    ]
    assert [name.split("-")[2] for name in names] == ["second", "first"]  # newest first
    own = Tags(page(tmp_path / "out", f"runs/{first.path.name}.html"))
    drawings = [attrs for tag, attrs in own.tags if tag == "svg" and attrs.get("class") == "chart"]
    assert len(drawings) >= 8 and all(attrs["role"] == "img" for attrs in drawings)
    assert "wiki" in own.text and "1.2500" in own.text
    ids = [attrs["id"] for tag, attrs in own.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    index = [attrs["id"] for tag, attrs in Tags(page(tmp_path / "out")).tags if "id" in attrs]
    assert len(index) == len(set(index))


def test_the_printed_loss_is_the_mean_of_the_last_twenty(tmp_path):
    losses = [4 - i / 100 for i in range(50)]
    make_run(tmp_path / "runs", losses=losses)
    export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN + 1000)
    listed = json.loads(page(tmp_path / "out", "data/runs.json"))["runs"][0]["cells"]
    assert listed[3][0] == f"{sum(losses[-20:]) / 20:.4f}"


def test_only_what_changed_is_made_again(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    made = [make_run(runs, f"r{i}", losses=[4.0, 3.0], began=BEGAN + i) for i in range(3)]
    pair = [make_run(runs, f"p{i}", losses=[4.0, 3.0], test="t", began=BEGAN + 9 + i) for i in range(2)]
    assert export(runs, out, None, now=BEGAN).made == 5
    assert export(runs, out, None, now=BEGAN + 1).made == 0
    append(made[0], [report(3, 2.0)], BEGAN + 30)
    assert export(runs, out, None, now=BEGAN + 1).made == 1
    assert json.loads(page(out, f"data/{made[0].path.name}.json"))["own"]["sets"]["reports"]["loss"] == [4, 3, 2]
    append(pair[0], [report(3, 2.0)], BEGAN + 30)
    assert export(runs, out, None, now=BEGAN + 1).made == 2  # both of the test, since each shows the other
    (out / "runs" / f"{made[1].path.name}.html").unlink()
    assert export(runs, out, None, now=BEGAN + 1).made == 1
    made[2].path.rename(tmp_path / "elsewhere")
    assert export(runs, out, None, now=BEGAN + 1).made == 0
    assert not (out / "data" / f"{made[2].path.name}.json").exists()


def test_an_export_is_the_same_in_one_thread_and_in_several(tmp_path):
    runs = tmp_path / "runs"
    for i in range(4):
        make_run(runs, f"r{i}", losses=[4.0, 3.0 - i], test="t", arm=str(i), began=BEGAN + i)
    for threads in (1, 2):
        export(runs, tmp_path / str(threads), None, now=BEGAN + 99, threads=threads)
    files = sorted(p.relative_to(tmp_path / "1") for p in (tmp_path / "1").rglob("*") if p.is_file())
    assert len(files) > 10
    for name in files:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes(), name


def test_an_export_that_was_cut_short_is_made_whole(tmp_path, monkeypatch):
    runs, out = tmp_path / "runs", tmp_path / "out"
    run = make_run(runs, losses=[4.0])
    export(runs, out, None, now=BEGAN)
    append(run, [report(2, 3.0)], BEGAN)
    whole = exporting._replace

    def torn(path, content):
        if path.suffix == ".html":
            raise OSError(28, "No space left on device")
        whole(path, content)

    monkeypatch.setattr(exporting, "_replace", torn)
    with pytest.raises(OSError, match="No space"):
        export(runs, out, None, now=BEGAN)
    monkeypatch.setattr(exporting, "_replace", whole)
    assert export(runs, out, None, now=BEGAN).made == 1


def test_what_runs_say_is_never_markup(tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    run = make_run(
        runs,
        MARKUP,
        losses=[4.0],
        test=MARKUP,
        arm=MARKUP,
        command=[MARKUP],
        commit=MARKUP,
        hardware={"device": MARKUP},
    )
    add_scores(run, 1, 1.5, **{MARKUP: 1.0})
    with RunWriter(run, 2) as writer:
        writer.event("failed", error=MARKUP, reason=MARKUP)
        writer.event(MARKUP, **{MARKUP: MARKUP})
    make_run(runs, "mate", losses=[4.0], test=MARKUP, began=BEGAN + 1)
    decisions = tmp_path / "d.toml"
    quoted = json.dumps(MARKUP)
    decisions.write_text(
        "[[decision]]\n"
        + "".join(f"{key} = {quoted}\n" for key in ("test", "title", "question", "result", "decision", "number"))
    )
    (runs / "bad").mkdir()
    (runs / "bad" / "run.json").write_text("{" + MARKUP)
    export(runs, out, decisions, now=BEGAN)
    for path in out.rglob("*.html"):
        found = Tags(path.read_text(encoding="utf-8"))
        assert "img" not in {tag for tag, _ in found.tags}
        scripts = [attrs for tag, attrs in found.tags if tag == "script"]
        assert [s["src"].split("/")[-1] for s in scripts] == ["uplot.js", "plots.js", "page.js"]
        assert not [attrs for _, attrs in found.tags if any(name.startswith("on") or name == "style" for name in attrs)]
        assert MARKUP in found.text
    assert MARKUP.split("<")[0] in page(out)


def test_no_file_names_another_host(tmp_path):
    make_run(tmp_path / "runs", losses=[4.0])
    export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN)
    for path in (tmp_path / "out").rglob("*.html"):
        found = Tags(path.read_text(encoding="utf-8"))
        for _, attrs in found.tags:
            for name in ("src", "href"):
                assert "//" not in attrs.get(name, "")


@pytest.mark.parametrize("count", [0, 1])
def test_no_run_and_one(count, tmp_path):
    (tmp_path / "runs").mkdir()
    for _ in range(count):
        make_run(tmp_path / "runs")
    done = export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN)
    text = page(tmp_path / "out")
    assert done.runs == count
    assert ("No runs yet." in text) == (count == 0)
    assert f"As of 2026-11-29 19:20:00 UTC. {count} run{'' if count == 1 else 's'}." in text


def test_a_folder_that_cannot_be_read_is_shown_as_such(tmp_path):
    make_run(tmp_path / "runs", "good")
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text('{"format_version": 99}')
    export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN)
    text = Tags(page(tmp_path / "out")).text
    assert "good" in text and "bad: " in text and "format version 99" in text


def test_export_fails_where_a_decision_prints_another_figure(tmp_path):
    run = make_run(tmp_path / "runs", losses=[4.0])
    decisions = tmp_path / "d.toml"
    decisions.write_text(
        '[[decision]]\ntest = "t"\ntitle = "t"\nresult = "4.10"\ndecision = "x"\nnumber = "K1"\n'
        f'runs = ["{run.id}"]\nfigures = [{{ printed = "4.10", run = "{run.id}", metric = "loss" }}]\n'
    )
    with pytest.raises(ValueError, match=r"printed as 4\.10, found 4\.00"):
        export(tmp_path / "runs", tmp_path / "out", decisions, now=BEGAN)
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_folder_of_other_things(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds files that are no exported page"):
        export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN)
    with pytest.raises(ValueError, match="no folder of runs"):
        export(tmp_path / "nowhere", tmp_path / "new", None, now=BEGAN)


def test_vendored_files_are_those_of_the_release():
    told = json.loads((PACKAGE / "static" / "vendored.json").read_text())
    assert set(told) == {"uplot.js", "uplot.css"}
    for name, facts in told.items():
        assert sha256((PACKAGE / "static" / name).read_bytes()).hexdigest() == facts["sha256"]
    assert "v1.6.32" in static_files()["uplot.js"][:80].decode()
    assert "The MIT License" in (PACKAGE / "static" / "uplot.LICENSE").read_text()


def test_code_stays_in_its_budget():
    assert sum(len(content) for content in static_files().values()) <= BUDGET


def test_static_files_are_in_the_package():
    """What pyproject.toml lists as package data is every file there is."""
    import tomllib

    settings = tomllib.loads(Path("pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["dwslm.page"]
    listed = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert {path for path in (PACKAGE / "static").iterdir() if path.is_file()} <= listed


def test_scripts_never_make_markup_of_text():
    for name in ("plots.js", "page.js"):
        text = static_files()[name].decode()
        assert not re.search(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
            name
        )
