"""The page in a browser: without scripts, by the keyboard, for other readers, and what runs may say."""

import json
import math
from pathlib import Path

import pytest

from dwslm.page.export import export
from dwslm.runs import reader
from dwslm.runs.queue import Queue
from dwslm.runs.queue_job import JobSpec
from tests.page.in_browser import MARKUP, names, poll, reach, row, shown
from tests.page.run_folders import BEGAN, Now, add_scores, copy_run, make_run, served

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("live", [False, True])
def test_results_runs_and_figures_without_javascript(live, runs, decisions, tmp_path, visit):
    now = Now(BEGAN + 5000)
    export(runs, tmp_path / "out", decisions, now=now())
    with served(runs, now, decisions) as server:
        page = visit(server.url if live else (tmp_path / "out" / "index.html").as_uri(), java_script_enabled=False)
        assert (
            page.get_by_role("table", name="Results and the decisions").get_by_role("cell", name="dropped").is_visible()
        )
        assert page.locator("#runs tbody tr").count() == 3
        assert "Without JavaScript this is every run as of 2026-11-29" in page.locator("noscript").inner_text()
        drawn = page.locator("#close svg.chart")
        assert drawn.count() >= 8
        assert all(drawn.nth(i).bounding_box()["height"] > 40 for i in range(drawn.count()))
        page.get_by_role("link", name="kda", exact=True).click()
        page.wait_for_url("**/runs/*kda*.html")
        assert page.get_by_role("heading", name="kda", level=3).is_visible()
        assert page.locator("#close svg.chart").count() >= 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(scheme, runs, decisions, tmp_path, visit):
    queue = Queue(tmp_path / "queue")
    queue.add([JobSpec(id, id, "train.py", test="layers", arm=id) for id in ("waits", "held")])
    queue.hold("held", "tonight")
    source = (
        Path(pytest.importorskip("axe_playwright_python").__file__).with_name("axe.min.js").read_text(encoding="utf-8")
    )
    with served(runs, Now(BEGAN + 5000), decisions, queue.folder) as server:
        own = f"runs/{max(runs.glob('*window*')).name}.html"
        for address, width in (("", 1280), (own, 320)):
            page = visit(server.url + address, color_scheme=scheme, viewport={"width": width, "height": 800})
            for details in page.locator("summary").all():
                details.click()
            page.evaluate(source)
            found = page.evaluate("axe.run()")
            assert [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found["violations"]] == []
            assert len(found["passes"]) > 20


def test_the_keyboard_alone_is_enough(runs, visit):
    with served(runs, Now(BEGAN + 5000)) as server:
        page = visit(server.url)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "To the runs"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "every-run"
        reach(page, "loss", "button")
        page.keyboard.press("Enter")
        assert page.locator("#runs th[aria-sort=ascending]").get_attribute("data-col") == "3"
        assert names(page) == ["kda", "window", "broken"]
        page.keyboard.press("Enter")
        assert page.locator("#runs th[aria-sort=descending]").get_attribute("data-col") == "3"
        assert names(page) == ["broken", "window", "kda"]
        reach(page, "broken", "a")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.textContent") == "window"
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.wait_for_selector("#up-name:focus")
        assert page.locator("#up-name").inner_text() == "kda"
        assert row(page, "window").get_attribute("class") == "sibling"
        panel = page.locator("[data-chart=loss-tokens]")
        panel.focus()
        page.keyboard.press("End")
        assert panel.locator("output").inner_text().startswith("81.92K tokens: each report 2.42")
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        assert panel.locator("output").inner_text().startswith("2048 tokens: each report 3.98")
        page.keyboard.press("+")
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.scales.x.max") < 80 * 1024
        page.keyboard.press("0")
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.scales.x.max") == 80 * 1024
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.textContent") == "kda"  # back in the table
        assert page.locator("#close article").count() == 0
        assert "run=" not in page.url


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_no_sideways_scroll_and_nothing_cut_off(width, runs, decisions, visit):
    make_run(runs, "a-very-long-name-" * 600, losses=[4.0, 3.0], began=BEGAN + 9)
    make_run(runs, "W" * 10_000, losses=[4.0, 3.0], test="W" * 5000, arm="W" * 5000, began=BEGAN + 8)
    with served(runs, Now(BEGAN + 5000), decisions) as server:
        page = visit(server.url, viewport={"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert (
            page.evaluate(
                "Math.max(...[...document.querySelectorAll('.uplot, svg.chart')].map((e) => e.getBoundingClientRect().right))"
            )
            <= width
        )


def test_print_shows_the_drawings(runs, visit):
    with served(runs, Now(BEGAN + 5000)) as server:
        page = visit(server.url)
        assert not page.locator("#close svg.chart").first.is_visible()
        page.emulate_media(media="print")
        assert page.locator("#close svg.chart").first.is_visible()
        assert not page.locator(".uplot").first.is_visible()
        assert not page.locator("#controls").is_visible()


def test_values_of_the_plot_are_the_rows_of_the_run(tmp_path, visit):
    """Thinned or not, every point is a report, and the extremes are among them."""
    runs = tmp_path / "runs"
    losses = [4 + math.sin(i * i) / (i + 1) for i in range(6000)]
    losses[3210], losses[4321] = 99.0, math.nan
    run = make_run(runs, "one", losses=losses)
    rows = {one["tokens"]: one for one in reader.metrics(run)}
    with served(runs, Now(BEGAN + 99999)) as server:
        page = visit(server.url)
        for chart, column in (
            ("loss-tokens", "loss"),
            ("grad-norm", "grad_norm"),
            ("speed", "tokens_per_second"),
            ("lr", "lr"),
        ):
            x, y = page.evaluate(f"dwslmPlots.get('{chart}').plot.data.slice(0, 2)")
            assert 500 < len(x) <= 3000
            wanted = [rows[tokens][column] for tokens in x]
            assert y == [value if math.isfinite(value) else None for value in wanted]
        assert 99.0 in page.evaluate("dwslmPlots.get('loss-tokens').plot.data[1]")
        assert None in page.evaluate("dwslmPlots.get('loss-tokens').plot.data[1]")
        ink = page.evaluate(
            "(() => { const c = document.querySelector('[data-chart=loss-tokens] canvas');"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; let n = 0;"
            " for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()"
        )
        assert ink > 500  # the canvas is not blank


def test_names_with_markup_stay_text(tmp_path, visit):
    runs, now = tmp_path / "runs", Now(BEGAN + 100)
    run = make_run(runs, MARKUP, losses=[4.0, 3.0], test=MARKUP, arm=MARKUP, commit=MARKUP)
    add_scores(run, 2, 1.5, **{MARKUP: 1.0})
    make_run(runs, "mate", losses=[4.0, 3.0], test=MARKUP, began=BEGAN - 1)
    with served(runs, now) as server:
        page = visit("about:blank", wait=False)
        page.clock.install()
        page.goto(server.url)
        page.wait_for_selector(".drawn .uplot")
        late = make_run(runs, MARKUP + "2", losses=[4.0], test=MARKUP, end="failed", began=BEGAN + 9)
        now.now += 5
        poll(page)  # this row is made by the script
        for name in (MARKUP + "2", MARKUP):
            page.get_by_role("link", name=name, exact=True).click()
            shown(page, name)
        assert page.locator("img").count() == 0
        assert page.locator("#test option").all_inner_texts() == ["all", MARKUP]
        assert late.name in page.locator("#runs").inner_text()
        assert page.locator("#close .legend button").first.inner_text().startswith(MARKUP.split(",")[0])


def test_reports_that_are_not_numbers(tmp_path, visit):
    runs = tmp_path / "runs"
    make_run(runs, "nan", losses=[math.nan] * 30)
    make_run(runs, "half", losses=[4.0, math.nan, math.inf, 3.0] * 10, began=BEGAN + 1)
    with served(runs, Now(BEGAN + 5000)) as server:
        page = visit(server.url)
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.data[1].slice(0, 4)") == [4, None, None, 3]
        page.get_by_role("link", name="nan", exact=True).click()
        shown(page, "nan")
        assert "nan" in row(page, "nan").locator("td[data-label=loss]").inner_text()
        page.get_by_role("button", name="log scale").first.click()


@pytest.mark.parametrize("count", [0, 1, 500])
def test_no_run_one_and_five_hundred(count, tmp_path, visit):
    runs, now = tmp_path / "runs", Now(BEGAN + 9000)
    if count:
        first = make_run(runs, "run-0", losses=[4.0], test="t0")
        for i in range(1, count):
            copy_run(first, f"run-{i}", began=BEGAN + i, test=f"t{i % 50}")
    with served(runs, now) as server:
        page = visit("about:blank", wait=False)
        page.clock.install()
        page.goto(server.url)
        assert page.locator("#runs tbody tr[data-run]").count() == count
        if count == 0:
            assert page.get_by_text("No runs yet.").is_visible()
            make_run(runs, "first", losses=[4.0], began=BEGAN + 1)
            now.now += 5
            poll(page)
            assert names(page) == ["first"]
            assert not page.get_by_text("No runs yet.").is_visible()
            return
        assert page.locator("#status").inner_text() == f"Updated 21:50:00 UTC. {count} run{'' if count == 1 else 's'}."
        if count == 500:
            page.get_by_role("searchbox", name="Find").fill("run-49")
            assert names(page) == [f"run-{i}" for i in (*range(499, 489, -1), 49)]
            assert page.locator("#shown").inner_text() == "11 of 500 shown"
            page.get_by_label("Test", exact=True).select_option("t49")
            assert names(page) == ["run-499", "run-49"]


def test_an_address_brings_the_view_back(runs, visit):
    with served(runs, Now(BEGAN + 5000)) as server:
        page = visit(server.url)
        page.get_by_role("link", name="kda", exact=True).click()
        shown(page, "kda")
        page.get_by_role("button", name="loss", exact=True).click()
        page.locator("#states button").filter(has_text="done").click()
        assert names(page) == ["kda", "window"]
        again = visit(page.url)
        shown(again, "kda")
        assert names(again) == ["kda", "window"]
        assert again.get_by_label("State", exact=True).input_value() == "done"
        assert again.locator("#runs th[aria-sort=ascending]").get_attribute("data-col") == "3"


@pytest.mark.parametrize("hosted", [False, True])
def test_an_export_works_from_any_host_and_from_none(hosted, runs, tmp_path, visit):
    import functools
    import http.server
    import threading

    out = tmp_path / "out"
    export(runs, out, None, now=BEGAN + 5000)
    if not hosted:
        page = visit((out / "index.html").as_uri(), wait=False)
        assert page.locator("#close svg.chart").first.is_visible()
        page.get_by_role("button", name="loss", exact=True).click()  # what needs no other file works
        assert names(page) == ["kda", "window", "broken"]
        page.get_by_role("link", name="kda", exact=True).click()
        page.wait_for_url("**/runs/*kda*.html")
        return

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=out)) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        page = visit(f"http://127.0.0.1:{server.server_address[1]}/")
        page.get_by_role("link", name="kda", exact=True).click()
        shown(page, "kda")
        data = json.loads(next((out / "data").glob("*kda*.json")).read_text())
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.data[1]") == data["own"]["sets"]["reports"]["loss"]
        server.shutdown()
