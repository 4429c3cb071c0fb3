"""What the tests of the page in a browser do again and again."""

import json

POLL_MS = 5000
MARKUP = "<img src=x onerror=alert(1)> & </td>"


def row(page, name):
    return page.locator("#runs tbody tr").filter(has=page.get_by_role("link", name=name, exact=True))


def poll(page):
    """Lets the page ask for news once, and waits until it has shown them."""
    with page.expect_response("**/data/runs.json"):
        page.clock.fast_forward(POLL_MS)
    page.wait_for_timeout(150)


def until(page, condition):
    """Waits for an expression to hold. The page's policy forbids the way of playwright's own wait_for_function."""
    for _ in range(600):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never came true: {condition}")


def shown(page, name):
    """Waits for that run to be up close."""
    until(page, f"(document.getElementById('up-name') || {{}}).textContent === {json.dumps(name)}")


def reach(page, text, tag):
    """Presses Tab until the focus is on that element."""
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("[document.activeElement.tagName.toLowerCase(), document.activeElement.textContent]") == [
            tag,
            text,
        ]:
            return
    raise AssertionError(f"no {tag} {text!r} is reached by Tab")


def names(page):
    return page.locator("#runs tbody tr:not([hidden]) th a").all_inner_texts()
