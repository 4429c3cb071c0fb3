"""The server by its answers: what it gives, to whom, and nothing else."""

import http.client
import json
import re

import pytest

from dwslm.cli import page as command
from dwslm.page.export import export
from dwslm.page.server import is_loopback
from tests.page.run_folders import BEGAN, Now, append, make_run, report, served


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    return answer, answer.read()


def test_it_answers_what_export_writes(tmp_path):
    run = make_run(tmp_path / "runs", losses=[4.0, 3.0], test="t")
    make_run(tmp_path / "runs", losses=[4.0, 2.0], test="t", began=BEGAN + 1)
    export(tmp_path / "runs", tmp_path / "out", None, now=BEGAN + 100)
    with served(tmp_path / "runs", Now(BEGAN + 100)) as server:
        for path in sorted((tmp_path / "out").rglob("*.*")):
            name = path.relative_to(tmp_path / "out").as_posix()
            if name in ("made.json", "static/uplot.LICENSE", "index.html"):
                continue
            answer, content = ask(server, f"/{name}")
            assert (answer.status, content) == (200, path.read_bytes()), name
        answer, content = ask(server, "/")
        assert run.path.name in content.decode() and 'data-live="1"' in content.decode()


def test_it_reads_on(tmp_path):
    now = Now(BEGAN + 100)
    run = make_run(tmp_path / "runs", losses=[4.0], end=None)
    with run.lock(), served(tmp_path / "runs", now) as server:
        _, before = ask(server, f"/data/{run.path.name}.json")
        append(run, [report(2, 3.5)], now())
        now.now += 5
        _, after = ask(server, f"/data/{run.path.name}.json")
        assert [json.loads(text)["own"]["sets"]["reports"]["loss"] for text in (before, after)] == [[4], [4, 3.5]]
        listed = json.loads(ask(server, "/data/runs.json")[1])
        assert listed["runs"][0]["mark"] == json.loads(after)["mark"] != json.loads(before)["mark"]


def test_unchanged_files_are_not_sent_twice(tmp_path):
    run = make_run(tmp_path / "runs", losses=[4.0] * 100)
    with served(tmp_path / "runs", Now()) as server:
        answer, content = ask(server, f"/data/{run.path.name}.json", Accept_Encoding="gzip")
        assert answer.headers["Content-Encoding"] == "gzip" and len(content) < 5000
        again, content = ask(server, f"/data/{run.path.name}.json", If_None_Match=answer.headers["ETag"])
        assert (again.status, content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/static/", "/static/../site.py", "/static/%2e%2e/site.py", "/static/vendored.json",
     "/runs/..%2f..%2fetc%2fpasswd.html",
     "/data/../../../../etc/passwd", "/data/made.json", "//etc/passwd", "/runs/.html"],
)  # fmt: skip
def test_there_is_nothing_else(path, tmp_path):
    with served(tmp_path / "runs", Now()) as server:
        assert ask(server, path)[0].status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:1", 200), ("LOCALHOST:9", 200), ("evil.example", 421),
     ("localhost.evil.example", 421),
     ("", 421), ("127.0.0.1.evil.example:8250", 421)],
)  # fmt: skip
def test_a_page_of_another_site_cannot_read_runs_through_a_name_of_its_own(host, status, tmp_path):
    with served(tmp_path / "runs", Now()) as server:
        assert ask(server, "/", Host=host)[0].status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed_through_it(method, tmp_path):
    with served(tmp_path / "runs", Now()) as server:
        assert ask(server, "/", method)[0].status == 501


def test_every_answer_carries_the_policy(tmp_path):
    run = make_run(tmp_path / "runs")
    with served(tmp_path / "runs", Now()) as server:
        for path in ("/", "/data/runs.json", f"/runs/{run.path.name}.html", "/static/page.js", "/no"):
            for method in ("GET", "HEAD"):
                answer, content = ask(server, path, method)
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert (content == b"") == (method == "HEAD")
                assert int(answer.headers["Content-Length"]) > 0


def test_decisions_that_do_not_hold_are_not_shown_and_the_runs_are(tmp_path):
    make_run(tmp_path / "runs", "still-here")
    decisions = tmp_path / "d.toml"
    decisions.write_text('[[decision]]\ntest = "t"\ntitle = "t"\nresult = "4.10"\ndecision = "secret"\nnumber = "K1"\n')
    with served(tmp_path / "runs", Now(), decisions) as server:
        text = ask(server, "/")[1].decode()
        assert "still-here" in text and "4.10 in the result is no figure" in text and "secret" not in text


def test_a_run_that_goes_away_is_gone_and_the_rest_stays(tmp_path):
    now = Now()
    run, _ = make_run(tmp_path / "runs", "gone"), make_run(tmp_path / "runs", "stays")
    with served(tmp_path / "runs", now) as server:
        assert ask(server, f"/runs/{run.path.name}.html")[0].status == 200
        run.path.rename(tmp_path / "elsewhere")
        now.now += 5
        assert ask(server, f"/runs/{run.path.name}.html")[0].status == 404
        assert [one["run"].split("-")[2] for one in json.loads(ask(server, "/data/runs.json")[1])["runs"]] == ["stays"]


@pytest.mark.parametrize(("host", "own"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
                                           ("0.0.0.0", False),
                                           ("::", False), ("192.168.0.7", False), ("example.org", False)])  # fmt: skip
def test_which_addresses_are_this_machine_alone(host, own):
    assert is_loopback(host) is own


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--host", "0.0.0.0"], r"add --allow-remote"),
        (["--runs", "nowhere"], "no folder of runs at nowhere; give it with --runs"),
        (["--runs", ".", "--port", "99999"], "port 99999: .*must be 0-65535.; give another with --port N"),
        (["--runs", ".", "--port", "-1"], "port -1: .*; give another with --port N"),
    ],
)
def test_the_command_refuses_in_one_line(words, wanted, tmp_path, monkeypatch):
    import argparse

    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["page", "serve", *words])
    with pytest.raises(ValueError, match=wanted) as caught:
        arguments.run(arguments)
    assert not re.search(r"\n", str(caught.value))


def test_a_port_that_is_taken_names_the_way_out(tmp_path, monkeypatch):
    import argparse

    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with served(tmp_path / "runs", Now()) as server:
        port = str(server.server_address[1])
        arguments = parser.parse_args(["page", "serve", "--port", port])
        with pytest.raises(ValueError, match=f"port {port}: .*; give another with --port N"):
            arguments.run(arguments)


def test_decisions_are_looked_at_again_when_they_or_their_runs_change(tmp_path):
    now = Now(BEGAN + 100)
    run = make_run(tmp_path / "runs", losses=[4.0])
    decisions = tmp_path / "d.toml"
    decisions.write_text(
        '[[decision]]\ntest = "t"\ntitle = "t"\nresult = "4.00"\ndecision = "it holds"\nnumber = "K1"\n'
        f'runs = ["{run.id}"]\nfigures = [{{ printed = "4.00", run = "{run.id}", metric = "loss" }}]\n'
    )
    with served(tmp_path / "runs", now, decisions) as server:
        assert "it holds" in ask(server, "/")[1].decode()
        append(run, [report(2, 3.0)], now())
        now.now += 5
        assert "it holds" not in ask(server, "/")[1].decode()
        decisions.unlink()
        assert "cannot read" in ask(server, "/")[1].decode()
