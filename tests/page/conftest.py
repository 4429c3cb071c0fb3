"""A headless Chromium for the tests of the page in a browser; where there is none, they skip."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.page.run_folders import BEGAN, add_scores, make_run

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright (the test extra)")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("needs a Chromium on the path (Debian: apt-get install chromium)")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address in a context of its own. At the end: no request left this machine, no script broke, no rule was broken."""
    contexts: list[Any] = []
    outside: list[str] = []
    wrong: list[str] = []

    def open_page(address: str, wait: bool = True, **context: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}))
        page = contexts[-1].new_page()
        page.set_default_timeout(30_000)

        def asked(request: Any) -> None:
            parts = urlsplit(request.url)
            if parts.scheme not in ("file", "data", "blob") and parts.hostname != "127.0.0.1":
                outside.append(request.url)

        page.on("request", asked)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.wrong = wrong
        page.goto(address)
        if wait and context.get("java_script_enabled", True) and page.locator("[data-chart]").count():
            page.wait_for_selector(".drawn .uplot")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not outside
    assert not wrong


@pytest.fixture
def runs(tmp_path):
    """Two arms of a test, a failed run, one that is damaged."""
    folder = tmp_path / "runs"
    make_run(folder, "kda", losses=[4 - i / 50 for i in range(80)], test="layers", arm="kda")
    other = make_run(
        folder, "window", losses=[4 - i / 60 for i in range(80)], test="layers", arm="window", began=BEGAN + 1
    )
    add_scores(other, 40, 1.6, wiki=1.4, code=1.9)
    add_scores(other, 80, 1.5, wiki=1.3, code=1.8)
    make_run(folder, "broken", losses=[5.0], end="failed", began=BEGAN - 1)
    (folder / "bad").mkdir()
    (folder / "bad" / "run.json").write_text("{")
    return folder


@pytest.fixture
def decisions(tmp_path):
    path = tmp_path / "decisions.toml"
    path.write_text(
        '[[decision]]\ntest = "mtp"\ntitle = "Soft-MTP"\nresult = "not run"\ndecision = "dropped"\nnumber = "K9"\nruns = []\n'
    )
    return path
