"""How long the page takes with many long runs: `python -m tests.page.measure_page [RUNS [ROWS]]`.

No test: it prints figures of the machine that it runs on. The rows are as long as the trainer's, all files are in the kernel's
memory, and a browser opens what `dwslm page serve` serves, in a process of its own. Needs playwright and a Chromium.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
from playwright.sync_api import sync_playwright

from dwslm.page.export import export
from dwslm.runs.summary import CACHE
from tests.page.conftest import FLAGS, NAMES
from tests.page.run_folders import BEGAN, make_run

BATCH = 524_288
TRIES = 5
BURST_S, ROWS_A_SECOND = 20, 1000
LONGEST = """() => {
  globalThis.gaps = [];
  let last = performance.now();
  setInterval(() => { const now = performance.now(); gaps.push(now - last); last = now; }, 10);
}"""
"""How long the page's one thread was away from a timer of 10 ms."""


def metrics(rows: int, seed: int) -> bytes:
    """A file of metrics as the trainer writes them."""
    draw = np.random.default_rng(seed)
    loss = 2.6 + 5 * np.exp(-np.arange(rows) / 3000) + 0.02 * draw.standard_normal(rows)
    norm, speed = 0.5 + 0.05 * draw.standard_normal(rows), 180e3 + 500 * draw.standard_normal(rows)
    lines = []
    for i in range(rows):
        lines.append(json.dumps(row(i + 1, float(loss[i]), float(norm[i]), float(speed[i]))))
    return ("\n".join(lines) + "\n").encode()


def row(step: int, loss: float, norm: float, speed: float) -> dict[str, object]:
    return {
        "schema": 1, "attempt": 1, "step": step, "tokens": step * BATCH, "time": BEGAN + 2.9 * step, "mono": 2.9 * step,
        "loss": loss, "grad_norm": norm, "lr": 0.0037, "skipped": 0, "scored": 524_000, "segments": 812,
        "text_share": 0.98765, "data_seconds": 2.1e-5, "tokens_per_second": speed, "mfu": speed / 440e3,
        "peak_memory": 98_765_432_100,
    }  # fmt: skip


def fill(root: Path, runs: int, rows: int) -> int:
    """Folders of finished runs, four to a test; returns their bytes."""
    files = [metrics(rows, seed) for seed in range(4)]
    plan = {"planned_tokens": rows * BATCH, "steps": rows}
    for i in range(runs):
        config = {"proxy": {"test": f"test-{i // 4}", "arm": f"arm-{i % 4}"}, "checkpoint": {"keep_last": 3}}
        run = make_run(root, f"run-{i}", began=BEGAN + i, config=config, seed=i, **plan)
        (run.path / "metrics-1.jsonl").write_bytes(files[i % 4])
    return runs * sum(map(len, files)) // 4


def timed(what: str, tries: int, before, do) -> None:
    seconds, used = [], []
    for _ in range(tries):
        before()
        began, cpu = time.perf_counter(), time.process_time()
        do()
        seconds.append(time.perf_counter() - began)
        used.append(time.process_time() - cpu)
    print(
        f"{what}: best {min(seconds):.2f} s, median {median(seconds):.2f} s of {tries}; {min(used):.2f} s of CPU in all threads",
        flush=True,
    )


def open_pages(chromium, url: str) -> None:
    """Until the table holds all runs and the curves of the newest one are drawn, its scripts done."""
    seconds = []
    for _ in range(TRIES):
        context = chromium.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        began = time.perf_counter()
        page.goto(url)
        page.wait_for_selector(".drawn .uplot")
        page.locator("#runs tbody tr").count()
        seconds.append(time.perf_counter() - began)
        context.close()
    print(f"opened and usable: first {seconds[0]:.2f} s, median {median(seconds):.2f} s of {TRIES}", flush=True)


def burst(chromium, url: str, run: Path, rows: int) -> None:
    """A thousand reports a second into the run that is up close."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(f"{url}#run={run.name}")
    page.wait_for_selector(".drawn .uplot")
    page.evaluate(LONGEST)
    last = [rows]

    def write() -> None:
        began = time.perf_counter()
        with open(run / "metrics-1.jsonl", "a", encoding="utf-8") as file:
            while (spent := time.perf_counter() - began) < BURST_S:
                while last[0] < rows + spent * ROWS_A_SECOND:
                    last[0] += 1
                    file.write(json.dumps(row(last[0], 2.6, 0.5, 180e3)) + "\n")
                file.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        page.wait_for_timeout(100)
    written = last[0]
    for _ in range(200):  # two polls more at most
        shown = page.evaluate("dwslmPlots.get('loss-tokens').plot.data[0].at(-1)") / BATCH
        if shown == written:
            break
        page.wait_for_timeout(100)
    gaps = sorted(page.evaluate("gaps"))
    print(
        f"burst of {written - rows:,} reports in {BURST_S} s: the page shows step {shown:,.0f} of {written:,}; its thread was "
        f"away for {gaps[-1]:.0f} ms at most, {gaps[len(gaps) * 99 // 100]:.0f} ms in the 99th percentile",
        flush=True,
    )
    context.close()


def main(runs: int = 200, rows: int = 44_000) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder, "runs"), Path(folder, "page")
        size = fill(root, runs, rows)
        print(f"{runs} runs of {rows:,} rows, {size / 1e9:.1f} GB, {os.cpu_count()} cores", flush=True)

        def forget() -> None:
            shutil.rmtree(out, ignore_errors=True)
            (root / CACHE).unlink(missing_ok=True)

        now = BEGAN + 1e6
        timed("export, nothing there yet", 3, forget, lambda: export(root, out, None, now=now))
        timed("export again, nothing changed", TRIES, lambda: None, lambda: export(root, out, None, now=now))
        shutil.rmtree(out)
        command = "from dwslm.cli import main; main()"
        began = time.perf_counter()
        server = subprocess.Popen(
            [sys.executable, "-c", command, "page", "serve", "--runs", str(root), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert server.stdout is not None
            url = re.search(r"http\S+", server.stdout.readline())[0]  # type: ignore[index]
            print(f"serve answers after {time.perf_counter() - began:.2f} s", flush=True)
            with sync_playwright() as playwright:
                found = next(path for name in NAMES if (path := shutil.which(name)))
                chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
                open_pages(chromium, url)
                burst(chromium, url, max(root.glob(f"*-run-{runs - 1}-*")), rows)
                chromium.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
