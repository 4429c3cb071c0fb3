"""The page in a browser while runs go on: states by the server's clock, news that disturb nothing, bursts."""

import math

import pytest

from dwslm.runs.writer import RunWriter
from tests.page.in_browser import POLL_MS, names, poll, row, until
from tests.page.run_folders import BEGAN, Now, append, make_run, report, served

pytestmark = pytest.mark.browser


def test_running_turns_stale_at_ten_minutes_and_paused_does_not(tmp_path, visit):
    """The clock is the server's: the reader's own is three years off."""
    runs, now = tmp_path / "runs", Now(BEGAN + 590)
    silent = make_run(runs, "silent", losses=[4.0], end=None, seconds=1)
    waiting = make_run(runs, "waiting", losses=[4.0], end=None, seconds=1)
    with RunWriter(waiting, 2) as writer:
        writer.event("paused", reason="disk swap")
    with silent.lock(), served(runs, now) as server:
        page = visit("about:blank", wait=False)
        page.clock.install(time="2029-01-01T00:00:00Z")
        page.goto(server.url)
        poll(page)
        assert "running" in row(page, "silent").inner_text()
        now.now = BEGAN + 605
        poll(page)
        assert "stale" in row(page, "silent").inner_text() and "10 min" in row(page, "silent").inner_text()
        assert "paused" in row(page, "waiting").inner_text() and "disk swap" in row(page, "waiting").inner_text()
        assert page.locator("#states li").evaluate_all("all => all.map((one) => one.dataset.state).sort()") == [
            "paused",
            "stale",
        ]
        append(silent, [report(2, 3.0)], now())
        now.now += 5
        poll(page)
        assert "running" in row(page, "silent").inner_text()  # it reports again
        assert "silent is stale" in page.locator("#news").inner_text()


def test_news_leave_scroll_focus_and_zoom_where_they_are(tmp_path, visit):
    runs, now = tmp_path / "runs", Now(BEGAN + 3000)
    run = make_run(runs, "going", losses=[4 - i / 100 for i in range(60)], end=None)
    make_run(runs, "old", losses=[4.0], began=BEGAN - 99)
    with run.lock(), served(runs, now) as server:
        page = visit("about:blank", wait=False)
        page.clock.install()
        page.goto(f"{server.url}#run={run.path.name}")
        page.wait_for_selector(".drawn .uplot")
        panel = page.locator("[data-chart=loss-tokens]")
        panel.focus()
        page.keyboard.press("Home")
        page.keyboard.press("+")
        zoom = page.evaluate("dwslmPlots.get('loss-tokens').plot.scales.x.max")
        said, scroll = panel.locator("output").inner_text(), page.evaluate("scrollY")
        assert scroll > 300
        page.locator("[data-part=fig-loss] summary").evaluate("(one) => { one.parentElement.open = true; }")
        top = panel.bounding_box()["y"]
        append(run, [report(step, 2.0) for step in range(61, 90)], now())
        make_run(runs, "newer", losses=[4.0], began=BEGAN + 99)
        now.now += 5
        poll(page)
        until(page, "dwslmPlots.get('loss-tokens').plot.data[0].length === 89")
        assert page.evaluate("document.activeElement.dataset.chart") == "loss-tokens"
        assert math.isclose(panel.bounding_box()["y"], top, abs_tol=2)  # a row came above; what is read has not moved
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.scales.x.max") == zoom
        assert panel.locator("output").inner_text() == said
        assert page.locator("[data-part=fig-loss] details").get_attribute("open") is not None
        assert names(page) == ["newer", "going", "old"]
        assert "89%" in row(page, "going").inner_text()
        row(page, "old").get_by_role("link").focus()
        make_run(runs, "newest", losses=[4.0], began=BEGAN + 199)
        now.now += 5
        poll(page)
        assert names(page)[0] == "newest"
        assert page.evaluate("document.activeElement.textContent") == "old"


def test_it_says_when_the_server_is_gone(runs, visit):
    with served(runs, Now(BEGAN + 5000)) as server:
        page = visit("about:blank", wait=False)
        page.clock.install()
        page.goto(server.url)
        poll(page)
        said = page.locator("#status").inner_text()
        assert said == "Updated 20:43:20 UTC. 3 runs."
        page.route("**/data/runs.json", lambda route: route.abort())
        page.clock.fast_forward(POLL_MS)
        until(page, "document.getElementById('status').textContent.startsWith('No answer since 20:43:20')")
        page.wrong.clear()  # the browser's own word of the request that failed
        page.unroute("**/data/runs.json")
        poll(page)
        assert page.locator("#status").inner_text() == said


def test_a_burst_of_reports_does_not_freeze_the_page(tmp_path, visit):
    """A thousand reports a second while the page is open: what is sent and drawn stays bounded, and the curve follows."""
    runs, now = tmp_path / "runs", Now(BEGAN + 100)
    run = make_run(runs, "burst", losses=[4.0], end=None)
    with run.lock(), served(runs, now) as server:
        page = visit("about:blank", wait=False)
        page.clock.install()
        page.goto(f"{server.url}#run={run.path.name}")
        page.wait_for_selector(".drawn .uplot")
        page.evaluate("globalThis.first = dwslmPlots.get('loss-tokens').plot")
        for turn in range(4):
            first = 2 + turn * 5000
            append(run, [report(step, 3 + math.sin(step)) for step in range(first, first + 5000)], now())
            now.now += 5
            poll(page)
        last = 1 + 4 * 5000
        until(page, f"dwslmPlots.get('loss-tokens').plot.data[0].at(-1) === {last * 1024}")
        assert page.evaluate("dwslmPlots.get('loss-tokens').plot.data[0].length") <= 3000
        # Given new numbers, not made anew.
        assert page.evaluate("globalThis.first === dwslmPlots.get('loss-tokens').plot")
