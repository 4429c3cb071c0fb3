"""The page of a benchmark: well formed, escaped, self-contained, true to the numbers, and with verdicts that follow them."""

import re
from html.parser import HTMLParser

import pytest

from dwslm.page import html, markdown
from dwslm.page.bench_file import join
from dwslm.page.bench_page import build, write
from dwslm.page.document import Table
from tests.page.bench_json import find, report, row, save, stat

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Tables, ids and attributes of a page; fails where tags do not close in order."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.tags, self.captions = [], [], [], []
        self.tables, self.attributes = [], []
        self.feed(text)
        self.close()
        assert self.stack == [], self.stack

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs
        self.tags.append(tag)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.append(tag)
        given = dict(attrs)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append({"text": "", "value": None})
        elif tag == "data":
            self.tables[-1][-1][-1]["value"] = float(given["value"])
        elif tag == "figcaption":
            self.captions.append("")
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack and self.stack.pop() == tag, tag

    def handle_data(self, data):
        if "figcaption" in self.stack:
            self.captions[-1] += data
        elif {"td", "th"} & set(self.stack) and "small" not in self.stack:
            self.tables[-1][-1][-1]["text"] += data

    def table(self, title):
        titles = [caption for caption in self.captions if caption.startswith("Table")]
        return self.tables[next(i for i, caption in enumerate(titles) if title in caption)]


def page_of(tmp_path, data):
    return build(join([save(tmp_path, data)]))


def all_tables(page):
    return [block for part in page.sections for block in part.blocks if isinstance(block, Table)]


def verdicts(page, title):
    return " ".join(next(table for table in all_tables(page) if title in table.title).verdicts)


@pytest.fixture
def page(tmp_path):
    return page_of(tmp_path, report())


def test_html_is_well_formed_and_fetches_nothing(page):
    text = html.render(page)
    read = Reader(text)
    assert len(read.ids) == len(set(read.ids))
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    for name, value in read.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "xlink:href", "action"):
            assert value.startswith("#") and value[1:] in read.ids
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_every_drawing_is_told_to_those_who_do_not_see_it(page):
    text = html.render(page)
    charts = re.findall(r'<svg class="chart".*?</svg>(?:</div>|\n)', text, re.S)
    assert len(charts) > 8
    for chart in charts:
        names = re.search(r'aria-labelledby="(\S+) (\S+)"', chart)
        assert f'<title id="{names[1]}">' in chart
        assert re.search(rf'<desc id="{names[2]}">[^<]+</desc>', chart)


def test_every_caption_says_where_its_figures_come_from(page):
    text = html.render(page)
    source = "dwslm bench day0 --out day0.json · commit 0123456789ab · Made-Up GPU · no clock cap stated"
    assert text.count(source) == len(Reader(text).captions) + 1  # and once under the title
    assert markdown.render(page).count(source) == len(all_tables(page)) + 1


def test_a_clock_cap_is_on_every_figure(tmp_path):
    data = report(machine={"device": "Made-Up GPU", "clock_cap_mhz": 1500})
    text = html.render(page_of(tmp_path, data))
    assert text.count("· clock cap 1,500 MHz") == len(Reader(text).captions) + 1


EVIL = "<script>alert('x')</script>\"&|`*_]"


def test_nothing_that_a_file_says_becomes_markup(tmp_path):
    data = report(command=f"dwslm bench {EVIL}", notes=[EVIL])
    data["machine"]["device"] = EVIL
    data["versions"][EVIL] = EVIL
    for place in data["rows"]:
        place["engine"] = f"{EVIL}{place['engine']}"
        place["case"] = f"{place['case']}{EVIL}" if place["op"] != "attention" else place["case"]
        place["reason"] = EVIL
        if place["record"]:
            place["record"]["reason"] = EVIL
        if place["gate"]:
            place["gate"]["errors"][EVIL] = {"value": 0.5, "bound": 1.0}
            place["gate"]["checks"][EVIL] = False
    data["stability"]["throttle_reasons"][EVIL] = 0.5
    page = page_of(tmp_path, data)
    text = html.render(page)
    read = Reader(text)
    assert "script" not in read.tags
    assert not re.search(r"<script|onerror", text, re.I)
    assert any(EVIL in cell["text"] for table in read.tables for line in table for cell in line)
    in_markdown = markdown.render(page)
    assert "<script" not in in_markdown
    assert not re.search(r"(?<!\\)`", in_markdown)


def test_times_in_the_tables_are_those_of_the_file(tmp_path):
    data = report()
    table = Reader(html.render(page_of(tmp_path, data))).table(
        "softmax attention global, 16,384 tokens: forward and backward"
    )
    contexts = [int(cell["text"].replace(",", "")) for cell in table[0][1:]]
    shown = 0
    for line in table[1:]:
        for context, cell in zip(contexts, line[1:], strict=True):
            if cell["value"] is not None:
                truth = find(data, "attention", "global", line[0]["text"], context)["forward_backward_ms"]["median"]
                assert cell["value"] == truth
                assert float(cell["text"]) == pytest.approx(truth, rel=0.005)
                shown += 1
    assert shown == 6


def test_sums_of_a_microbatch_are_layers_times_times(tmp_path):
    data = report()
    table = Reader(html.render(page_of(tmp_path, data))).table("for each local layer, ms, fastest engines")
    found = {line[0]["text"]: line[5]["value"] for line in table[1:]}
    best = 5 * 2.4  # flash, global
    assert found == {
        "sliding window": pytest.approx(15 * 0.8 + best),
        "Gated DeltaNet": pytest.approx(15 * 1.2 + best),
        "Kimi Delta": pytest.approx(15 * 1.5 + best),
    }


def test_markdown_and_html_hold_the_same_numbers(page):
    tables = Reader(html.render(page)).tables
    lines = markdown.render(page).splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("| ---")]
    assert len(starts) == len(tables)
    for start, table in zip(starts, tables, strict=True):
        body = lines[start + 1 : start + len(table)]
        for text, cells in zip(body, table[1:], strict=True):
            columns = re.split(r"(?<!\\)\|", text)[1:-1]
            assert len(columns) == len(cells)
            for column, cell in zip(columns, cells, strict=True):
                if cell["value"] is not None:
                    assert cell["text"] in column


# ---- verdicts follow the numbers ------------------------------------------------------------------------


def test_the_winner_changes_with_the_numbers(tmp_path):
    title = "attention global, 16,384 tokens"
    data = report()
    assert "flash is fastest in all 2: 17 % less time than cudnn, beyond both spreads" in verdicts(
        page_of(tmp_path, data), title
    )
    for context in (512, 4096):
        find(data, "attention", "global", "cudnn", context)["forward_backward_ms"] = stat(0.5)
    changed = verdicts(page_of(tmp_path, data), title)
    assert "cudnn is fastest in all 2" in changed and "flash is fastest" not in changed


def test_a_lead_within_the_spread_is_no_lead(tmp_path):
    data = report()
    find(data, "attention", "global", "cudnn", 4096)["forward_backward_ms"] = stat(2.41, spread=0.02)
    text = verdicts(page_of(tmp_path, data), "attention global, 16,384 tokens")
    assert "flash is fastest at context 512" in text
    assert "flash and cudnn are within their spreads at context 4,096" in text


def test_an_engine_that_failed_wins_nothing(tmp_path):
    data = report()
    find(data, "attention", "global", "flash", 4096)["status"] = "failed"
    text = verdicts(page_of(tmp_path, data), "attention global, 16,384 tokens")
    assert "cudnn is fastest at context 4,096" in text


def test_fp8_clears_its_bar_or_does_not(tmp_path):
    data = report()
    assert "1.30 times as fast as compiled, beyond both spreads: above the bar" in verdicts(
        page_of(tmp_path, data), "bf16 and FP8"
    )
    find(data, "mlp", "1024-4096-1024", "fp8_compiled")["forward_backward_ms"] = stat(1.25)
    assert "not above the bar" in verdicts(page_of(tmp_path, data), "bf16 and FP8")
    find(data, "mlp", "1024-4096-1024", "fp8_compiled")["forward_backward_ms"] = stat(2.6)
    assert "takes 2.00 times as long" in verdicts(page_of(tmp_path, data), "bf16 and FP8")


def test_gate_recording_and_noise_tell_what_they_hold(tmp_path):
    data = report()
    page = page_of(tmp_path, data)
    assert "15 of 16 engines pass their gate." in verdicts(page, "Relative error")
    assert "bent (softmax attention global): dq misses the reference" in verdicts(page, "Relative error")
    assert "7 of 9 record and replay" in verdicts(page, "Replayed and launched")
    assert "stream is capturing" in verdicts(page, "Replayed and launched")
    assert "Padding with empty documents changes no bit" in verdicts(page, "Replayed and launched")
    assert "agree within the spreads" in verdicts(page, "timed twice")
    find(data, "attention", "global", "flex", 4096)["record"]["padding_identical"] = False
    data["noise"]["again"] = stat(2.6)
    page = page_of(tmp_path, data)
    assert "changes bits in 1 of 9" in verdicts(page, "Replayed and launched")
    assert "differ by more than the spreads" in verdicts(page, "timed twice")


def test_stability_reports_what_was_sampled(tmp_path):
    data = report()
    text = verdicts(page_of(tmp_path, data), "The device while it was measured")
    assert "683 W, 98 % of the limit of 700 W" in text
    assert "held back in 10 % of samples by sw_power_cap" in text
    assert "No ECC error" in text and "moved aside" not in text
    data["stability"]["ecc_errors"]["uncorrected"] = 2
    data["stability"]["cache"]["moved_aside"] = [{"from": "a", "to": "b"}]
    text = verdicts(page_of(tmp_path, data), "The device while it was measured")
    assert "2 ECC errors" in text and "1 empty compiler-cache file was moved aside" in text


def test_the_missing_are_listed_with_their_reasons(page):
    table = next(table for table in all_tables(page) if "not timed" in table.title)
    found = {line[1].text: (line[2].text, line[3].text) for line in table.rows}
    assert found["fa3"] == ("missing", "not installed: build it")
    assert found["fla_gdn"][0] == "refused"


def test_a_machine_without_a_gpu_gets_a_page_too(tmp_path):
    data = report(
        machine={"device": "cpu", "cpu": "Made-Up CPU"},
        ceilings={"copy_gb_s": stat(20.0), "bf16_tflops": None, "float32_tflops": stat(0.1)},
        stability={"samples": 0, "reason": "no NVIDIA GPU"},
        rows=[row("attention", "global", "torch", tokens=256, context=128, heads=2, dtype="float32", peak_bytes=None)],
        work=[], noise=None,
    )  # fmt: skip
    page = page_of(tmp_path, data)
    Reader(html.render(page))
    text = markdown.render(page)
    assert "The device was not sampled: no NVIDIA GPU." in text
    assert "measured without one: none is answered" in text


PARTS = [
    "machine",
    "versions",
    "shape",
    "data",
    "ceilings",
    "work",
    "noise",
    "stability",
    "commit",
    "command",
    "started",
    "seed",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("empty", [None, "gone"])
def test_any_part_may_be_missing(part, empty, tmp_path):
    data = report()
    if empty is None:
        data[part] = None
    else:
        del data[part]
    Reader(html.render(page_of(tmp_path, data)))


@pytest.mark.parametrize("field", [name for name in row("a", "b", "c") if name not in ("op", "engine", "status")])
def test_any_field_of_a_row_may_be_missing(field, tmp_path):
    data = report()
    for i, place in enumerate(data["rows"]):
        place[field] = None
        if i % 2:
            del place[field]
    Reader(html.render(page_of(tmp_path, data)))


@pytest.mark.parametrize("part", ["machine", "noise", "stability", "ceilings", "data"])
def test_any_entry_of_a_part_may_be_missing_or_odd(part, tmp_path):
    for name in report()[part]:
        for odd in (None, [], {}):
            data = report()
            data[part][name] = odd
            try:
                page = page_of(tmp_path, data)
            except ValueError as error:
                assert "bench.json: " in str(error)
            else:
                Reader(html.render(page))


def test_an_error_that_is_no_number_fails_and_is_shown(tmp_path):
    data = report()
    flash = find(data, "attention", "global", "flash", 4096)
    flash["gate"]["errors"]["dq"]["value"] = "NaN"
    flash.update(status="failed", reason="dq is not finite")
    table = Reader(html.render(page_of(tmp_path, data))).table("Relative error")
    assert any(cell["text"] == "nan" for line in table for cell in line)


def test_an_empty_report_is_a_page(tmp_path):
    page = page_of(tmp_path, {"format": 1, "rows": []})
    Reader(html.render(page))
    assert "not measured" in markdown.render(page)


def test_write_makes_two_files_or_none(tmp_path):
    paths = write([save(tmp_path, report())], tmp_path / "a" / "b")
    assert [path.name for path in paths] == ["report.md", "report.html"] and all(
        path.stat().st_size > 5000 for path in paths
    )
    with pytest.raises(ValueError, match="different|one page is one device"):
        write([save(tmp_path, report()), save(tmp_path, report(machine={"device": "x"}), "x.json")], tmp_path / "none")
    assert not (tmp_path / "none").exists()
