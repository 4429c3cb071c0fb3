// The page of runs while it is open: sorting, finding and picking runs, and news from the server every 5 seconds.
// Every text that comes from a run is set as text. Markup comes from the server alone, which has escaped what runs say.
"use strict";
(() => {
  const POLL_MS = 5000, NEWS_MS = 30000;
  const main = document.querySelector("main"), table = document.getElementById("runs"), close = document.getElementById("close");
  const live = main.dataset.live === "1", hosted = location.protocol.startsWith("http"), up = table ? "" : "../";
  const $ = (id) => document.getElementById(id);
  const view = { run: "", sort: "", find: "", test: "", state: "" }; // what the address says
  let marks = new Map(), shownMark = "", lastNews = 0, waitingNews = [], clock = "", knownJobs = "", loading = 0;
  let original = new Map(); // part of the run up close -> its markup as the server gave it

  // ---- the address -------------------------------------------------------------------------------------
  function readAddress() {
    const at = new URLSearchParams(location.hash.slice(1));
    for (const name of Object.keys(view)) view[name] = at.get(name) || "";
  }
  function writeAddress() {
    const at = new URLSearchParams(Object.entries(view).filter(([, text]) => text));
    history.replaceState(null, "", at.size ? `#${at}` : location.pathname + location.search);
  }

  // ---- the table of runs -------------------------------------------------------------------------------
  const rows = () => [...table.tBodies[0].querySelectorAll("tr[data-run]")];
  const link = (row) => row.querySelector("th a");
  let order = []; // names of runs, newest first

  function arrange() {
    const [column, way] = view.sort.split(" "), find = view.find.toLowerCase(), all = rows();
    const place = new Map(order.map((run, i) => [run, i]));
    const worth = (row) => {
      const cell = row.cells[column];
      if (column === "0") return link(row).textContent.toLowerCase();
      return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    };
    const natural = (a, b) => place.get(a.dataset.run) - place.get(b.dataset.run);
    const sorted = all.sort(column === "" ? natural : (a, b) => {
      const [x, y] = [worth(a), worth(b)];
      if (x === null || y === null) return x === y ? natural(a, b) : x === null ? 1 : -1; // empty ones last, both ways
      return (x < y ? -1 : x > y ? 1 : 0) * (way === "down" ? -1 : 1) || natural(a, b);
    });
    let shown = 0;
    for (const row of sorted) {
      const hide = (view.test && row.dataset.test !== view.test) || (view.state && row.dataset.state !== view.state) ||
        (find && !row.cells[0].textContent.toLowerCase().includes(find) && !row.dataset.run.toLowerCase().includes(find));
      row.hidden = Boolean(hide);
      shown += hide ? 0 : 1;
    }
    for (const row of document.querySelectorAll("#jobs tbody tr")) {
      row.hidden = Boolean((view.test && row.dataset.test !== view.test) || (view.state && row.dataset.state !== view.state) ||
        (find && !row.cells[0].textContent.toLowerCase().includes(find)));
    }
    const body = table.tBodies[0], focused = document.activeElement;
    sorted.forEach((row, i) => { if (body.children[i] !== row) body.insertBefore(row, body.children[i] || null); });
    if (focused !== document.activeElement) focused.focus({ preventScroll: true });
    $("shown").textContent = shown === all.length ? "" : `${shown} of ${all.length} shown`;
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.col === column) head.setAttribute("aria-sort", way === "down" ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
    for (const button of document.querySelectorAll("#states button")) button.setAttribute("aria-pressed", String(view.state === button.parentElement.dataset.state));
  }

  function setCell(cell, text, note, value, sign) {
    const small = cell.querySelector("small"), holder = cell.querySelector("a, span:not([aria-hidden])");
    if (holder) { if (holder.textContent !== text) holder.textContent = text; }
    else if ((cell.firstChild === small ? "" : cell.firstChild.data) !== text) {
      while (cell.firstChild !== small) cell.firstChild.remove();
      if (text) cell.prepend(text);
    }
    if (sign !== undefined) cell.querySelector("[aria-hidden]").textContent = sign;
    if (small.textContent !== note) small.textContent = note;
    if (value === null) delete cell.dataset.value; else cell.dataset.value = value;
  }

  function newRow(run) {
    const row = document.createElement("tr"), names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    row.dataset.run = run.run;
    run.cells.forEach((_, i) => {
      const cell = document.createElement(i ? "td" : "th");
      if (i === 0) { cell.scope = "row"; cell.append(Object.assign(document.createElement("a"), { href: run.href })); }
      else cell.dataset.label = names[i];
      if (i === 1) {
        const sign = document.createElement("span");
        sign.setAttribute("aria-hidden", "true");
        cell.append(sign, " ", document.createElement("span"));
      }
      if (i > 1) cell.className = "num";
      cell.append(document.createElement("small"));
      row.append(cell);
    });
    return row;
  }

  function fill(list) {
    const known = new Map(rows().map((row) => [row.dataset.run, row])), body = table.tBodies[0];
    if (list.runs.length) $("none")?.remove();
    for (const run of list.runs) {
      let row = known.get(run.run);
      if (!row) {
        row = newRow(run);
        body.append(row);
        tell(`new run ${run.cells[0][0]}`);
      } else if (row.dataset.state !== run.state) tell(`${run.cells[0][0]} is ${run.state}`);
      known.delete(run.run);
      row.dataset.state = run.state;
      row.dataset.test = run.test;
      run.cells.forEach(([text, note, value], i) => setCell(row.cells[i], text, note, value, i === 1 ? run.sign : undefined));
    }
    for (const row of known.values()) row.remove();
    order = list.runs.map((run) => run.run);
    marks = new Map(list.runs.map((run) => [run.run, run.mark]));
    outcome(list.outcomes, list.counted);
    jobs(list.jobs, list.queue_wrong);
    arrange();
    pickedRows();
  }

  // ---- jobs without a run ------------------------------------------------------------------------------
  function jobs(list, wrong) {
    $("queue-wrong").textContent = wrong;
    $("queue-wrong").hidden = !wrong;
    $("queue").hidden = !list.length && !wrong;
    const told = JSON.stringify(list);
    if (told === knownJobs) return;
    knownJobs = told;
    const heads = [...$("jobs").tHead.rows[0].cells].map((head) => head.textContent);
    $("jobs").tBodies[0].replaceChildren(...list.map(([state, test, sign, ...cells]) => {
      const row = document.createElement("tr");
      Object.assign(row.dataset, { state, test });
      cells.forEach((text, i) => {
        const cell = document.createElement(i ? "td" : "th"), [word, note] = i < 2 ? text : [text];
        if (i === 2) cell.className = "num";
        if (i === 0) cell.scope = "row"; else cell.dataset.label = heads[i];
        if (i === 1) {
          const mark = Object.assign(document.createElement("span"), { textContent: sign });
          mark.setAttribute("aria-hidden", "true");
          cell.append(mark, " ", Object.assign(document.createElement("span"), { textContent: word }));
        } else cell.append(word);
        if (i < 2) cell.append(Object.assign(document.createElement("small"), { textContent: note }));
        else cell.dataset.value = ""; // shown on a narrow screen too
        row.append(cell);
      });
      return row;
    }));
    for (const [, test] of list) if (test && ![...$("test").options].some((one) => one.value === test)) $("test").append(new Option(test, test));
  }

  // ---- runs by outcome ---------------------------------------------------------------------------------
  function outcome(counts, counted) {
    const list = $("states"), total = counts.reduce((sum, [, n]) => sum + n, 0) || 1;
    const extra = [...list.children].filter((item) => item.dataset.state === "not run");
    const states = counts.map(([state]) => state);
    for (const item of [...list.children]) if (!extra.includes(item) && !states.includes(item.dataset.state)) item.remove();
    counts.forEach(([state, n, colour], i) => {
      let item = [...list.children].find((one) => one.dataset.state === state);
      if (!item) {
        item = document.createElement("li");
        item.dataset.state = state;
        const box = draw("svg", { "aria-hidden": "true" });
        box.append(draw("rect", { class: colour, width: "100%", height: "100%" }));
        const what = Object.assign(document.createElement("span"), { className: "what", textContent: `${state} ` });
        what.append(document.createElement("b"));
        item.append(box, what);
        list.insertBefore(item, list.children[i] || null);
        stateButton(item);
      }
      item.querySelector("b").textContent = n;
    });
    const svg = document.querySelector("#outcomes > svg"), not = extra.length ? Number(extra[0].querySelector("b").textContent) : 0;
    svg.querySelectorAll("rect").forEach((rect) => rect.remove());
    let at = 0;
    for (const [, n, colour] of not ? [...counts, ["", not, "quiet"]] : counts) {
      const width = (n / (total + not)) * 100;
      svg.append(draw("rect", { class: colour, x: `${at}%`, y: 20, width: `${width}%`, height: 12 }));
      at += width;
    }
    svg.querySelector("desc").textContent = counts.map(([state, n]) => `${n} ${state}`).join(", ") || "no runs yet";
    svg.querySelector("text.n").textContent = counted;
    const select = $("state");
    for (const state of states) if (![...select.options].some((one) => one.value === state)) select.append(new Option(state, state));
  }
  function draw(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, text] of Object.entries(attributes)) made.setAttribute(name, text);
    return made;
  }
  function stateButton(item) {
    if (item.dataset.state === "not run") return;
    const button = document.createElement("button"), what = item.querySelector(".what");
    button.type = "button";
    button.title = "Show only these in the table";
    button.append(...what.childNodes);
    what.replaceWith(button);
    button.addEventListener("click", () => choose("state", view.state === item.dataset.state ? "" : item.dataset.state));
  }

  // ---- finding and sorting -----------------------------------------------------------------------------
  function choose(name, text) {
    view[name] = text;
    writeAddress();
    showChoices();
    arrange();
  }
  function showChoices() {
    const select = $("state");
    if (view.state && ![...select.options].some((one) => one.value === view.state)) select.append(new Option(view.state, view.state));
    for (const name of ["find", "test", "state"]) if ($(name).value !== view[name]) $(name).value = view[name];
  }
  function controls() {
    $("controls").hidden = false;
    $("controls").addEventListener("submit", (event) => event.preventDefault());
    for (const name of ["find", "test", "state"]) $(name).addEventListener("input", () => choose(name, $(name).value));
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const [column, way] = view.sort.split(" "), mine = column === head.dataset.col;
        choose("sort", !mine ? `${head.dataset.col} up` : way === "up" ? `${head.dataset.col} down` : "");
      });
    }
    [...$("states").children].forEach(stateButton);
    table.addEventListener("click", (event) => {
      const to = event.target.closest("th a");
      if (!to || !hosted || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey || event.button) return;
      event.preventDefault();
      pick(to.closest("tr").dataset.run, true);
    });
    table.addEventListener("keydown", (event) => {
      const row = event.target.closest("tr[data-run]");
      if (!row || !["ArrowDown", "ArrowUp"].includes(event.key)) return;
      const seen = rows().filter((one) => !one.hidden), to = seen[seen.indexOf(row) + (event.key === "ArrowDown" ? 1 : -1)];
      if (to) link(to).focus();
      event.preventDefault();
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !view.run || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
      const row = rows().find((one) => one.dataset.run === view.run);
      view.run = "";
      writeAddress();
      Plots.none();
      close.replaceChildren();
      original = new Map();
      shownMark = "";
      pickedRows();
      $("pick").textContent = "Pick a run in the table above.";
      if (row && !row.hidden) link(row).focus();
    });
    window.addEventListener("hashchange", () => { const before = view.run; readAddress(); showChoices(); arrange(); if (view.run && view.run !== before) pick(view.run, false); });
  }

  // ---- one run up close --------------------------------------------------------------------------------
  function pickedRows() {
    const mine = rows().find((row) => row.dataset.run === view.run), test = mine?.dataset.test;
    for (const row of rows()) {
      row.classList.toggle("picked", row === mine);
      row.classList.toggle("sibling", row !== mine && Boolean(test) && row.dataset.test === test);
      if (row === mine) link(row).setAttribute("aria-current", "true"); else link(row).removeAttribute("aria-current");
    }
  }
  const current = () => close.querySelector("article")?.dataset.run || "";

  async function pick(run, go) {
    view.run = run;
    writeAddress();
    pickedRows();
    await load(run);
    $("pick").textContent = "Pick another run in the table above; Escape lets go of this one.";
    if (go && current() === run) $("up-name").focus();
  }

  async function load(run) {
    const turn = ++loading;
    try {
      const name = encodeURIComponent(run);
      const [page, numbers] = await Promise.all([get(`${up}runs/${name}.html`), get(`${up}data/${name}.json`)]);
      const [text, { own, test, mark }] = await Promise.all([page.text(), numbers.json()]);
      const data = { sets: { ...own.sets, ...test.sets }, charts: { ...own.charts, ...test.charts }, marks: own.marks };
      if (turn !== loading) return; // another run was picked meanwhile
      merge(new DOMParser().parseFromString(text, "text/html").querySelector("article"), run);
      Plots.all(close, data);
      shownMark = mark;
    } catch (error) {
      if (turn === loading) $("status").textContent = `This run cannot be shown now (${error.message}).`;
    }
  }
  async function get(address) {
    const answer = await fetch(address, { cache: "no-cache" });
    if (!answer.ok) throw new Error(`${answer.status} from the server`);
    return answer;
  }

  // Puts a newer article in the place of the one shown, touching only the parts that differ: scroll, focus and plots stay.
  function merge(article, run) {
    const parts = [...article.children].filter((part) => part.dataset.part), fresh = new Map(parts.map((part) => [part.dataset.part, part.outerHTML]));
    const shown = close.querySelector("article");
    const names = (root) => [...root.children].map((part) => part.dataset.part || part.id).join();
    if (!shown || shown.dataset.run !== run || names(shown) !== names(article)) {
      Plots.none();
      close.replaceChildren(document.adoptNode(article));
    } else {
      for (const part of parts) {
        const name = part.dataset.part, old = [...shown.children].find((one) => one.dataset.part === name);
        if (fresh.get(name) === original.get(name)) continue;
        if (part.classList.contains("plot") && old.querySelector("[data-chart]")) mergeFigure(old, part);
        else replace(old, part);
      }
    }
    original = fresh;
  }
  function mergeFigure(old, part) {
    for (const panel of part.querySelectorAll("[data-chart]")) {
      const mine = [...old.querySelectorAll("[data-chart]")].find((one) => one.dataset.chart === panel.dataset.chart);
      mine?.querySelector("svg.chart")?.replaceWith(document.adoptNode(panel.querySelector("svg.chart")));
    }
    const details = old.querySelector("details"), next = part.querySelector("details");
    if (details && next) replace(details, next);
  }
  function replace(old, part) {
    const open = [...old.querySelectorAll("details"), ...(old.matches("details") ? [old] : [])].map((one) => one.open);
    const scrolls = [...old.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    const stops = (root) => [...root.querySelectorAll("summary, .scroll, a")], at = stops(old).indexOf(document.activeElement);
    const made = document.adoptNode(part);
    [...made.querySelectorAll("details"), ...(made.matches("details") ? [made] : [])].forEach((one, i) => { one.open = Boolean(open[i]); });
    old.replaceWith(made);
    [...made.querySelectorAll(".scroll")].forEach((one, i) => { if (scrolls[i]) [one.scrollLeft, one.scrollTop] = scrolls[i]; });
    if (at >= 0) stops(made)[at]?.focus({ preventScroll: true });
  }

  // ---- news --------------------------------------------------------------------------------------------
  function tell(text) { waitingNews.push(text); }
  function speak() { // at most every half minute
    if (!waitingNews.length || Date.now() - lastNews < NEWS_MS) return;
    $("news").textContent = waitingNews.slice(-5).join("; ");
    waitingNews = [];
    lastNews = Date.now();
  }
  async function poll() {
    if (!document.hidden) {
      try {
        const list = await (await get("data/runs.json")).json();
        clock = list.clock;
        fill(list);
        $("status").textContent = `Updated ${clock} UTC. ${list.runs.length} run${list.runs.length === 1 ? "" : "s"}.`;
        const run = current() || view.run;
        if (run && marks.has(run) && marks.get(run) !== shownMark) await load(run);
        speak();
      } catch (error) {
        $("status").textContent = clock ? `No answer since ${clock} UTC; what is shown is from then.` : "No answer from the server; what is shown is from when this page was opened.";
      }
    }
    setTimeout(poll, POLL_MS);
  }

  // ---- start -------------------------------------------------------------------------------------------
  const first = close.querySelector("article");
  if (first) original = new Map([...first.children].filter((part) => part.dataset.part).map((part) => [part.dataset.part, part.outerHTML]));
  if (table) {
    order = rows().map((row) => row.dataset.run);
    readAddress();
    controls();
    showChoices();
    for (const row of rows()) if (![...$("state").options].some((one) => one.value === row.dataset.state)) $("state").append(new Option(row.dataset.state, row.dataset.state));
    arrange();
    pickedRows();
    if (!hosted && order.length) $("pick").textContent += " Opened as a file, this page shows drawings; each run's name leads to its own.";
  }
  if (hosted) {
    if (live) setTimeout(poll, POLL_MS);
    const wanted = view.run && order.includes(view.run) ? view.run : current();
    if (wanted) (wanted === current() || !table ? load(wanted) : pick(wanted, false));
  }
})();
