// Curves of a run: uPlot over the numbers that the page's own SVG was made from, for the keyboard as for the mouse.
"use strict";
const Plots = (() => {
  const shown = new Map(); // name of a chart -> {plot, chart, zoomed, index}
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function short(v) {
    if (v === null || v === undefined) return "none";
    const a = Math.abs(v);
    for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]])
      if (a >= size) return `${+(v / (unit === "K" ? 1e3 : size)).toPrecision(4)}${unit}`;
    return a && a < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(5));
  }
  const value = (v, unit) => (unit.startsWith("bytes") && v ? `${(v / 1e9).toFixed(1)} GB` : short(v));
  const place = (v, over) =>
    over === "tokens" ? `${short(v)} tokens` : v >= 1 || !v ? `${+v.toPrecision(4)} h` : `${+(v * 60).toPrecision(3)} min`;

  // Columns as uPlot wants them: one x, and every line at it. Lines of several runs have an x each and are joined.
  function columns(data, chart) {
    const tidy = (v) => (v === undefined ? [] : chart.log ? v.map((n) => (n > 0 ? n : null)) : v);
    const sets = new Set(chart.series.map((s) => s[4]));
    if (sets.size === 1) {
      const set = data.sets[[...sets][0]];
      return [set[chart.over], ...chart.series.map((s) => tidy(set[s[0]]))];
    }
    return uPlot.join(chart.series.map((s) => [data.sets[s[4]][chart.over], tidy(data.sets[s[4]][s[0]])]));
  }

  function options(panel, name, chart, data) {
    const ink = style("--ink"), rule = style("--rule");
    const axis = { stroke: ink, grid: { stroke: rule, width: 1 }, ticks: { stroke: rule, width: 1 }, font: "12px system-ui, sans-serif" };
    const marks = () => chart.marks.flatMap((kind) => (data().marks[kind] || {})[chart.over] || []);
    return {
      width: panel.clientWidth, height: 220, legend: { show: false },
      scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range: (u, low, high) => {
        if (low === null) return [0, 1];
        const room = Math.max((high - low) / 20, Math.abs(high) / 100, 1e-12); // a constant is no cliff
        return [low >= 0 && low < (high - low) / 3 ? 0 : low - room, high + room];
      } } },
      axes: [{ ...axis, space: 90, values: (u, at) => at.map((v) => place(v, chart.over)) },
             { ...axis, size: 64, values: (u, at) => at.map((v) => (v === null ? "" : value(v, chart.unit))) }],
      cursor: { drag: { x: true, y: false }, points: { size: 7 }, y: false },
      series: [{}, ...chart.series.map(([, label, colour, kind]) => ({
        label, stroke: style(`--${colour}`), width: kind === "strong" ? 2 : 1, dash: kind === "dash" ? [7, 5] : undefined,
        points: { show: (u, i) => (u.data[i].filter((v) => v !== null && v !== undefined).length < 3) },
      }))],
      hooks: {
        setCursor: [(u) => tell(panel, name, u.cursor.idx)],
        draw: [(u) => {
          u.ctx.save();
          u.ctx.strokeStyle = style("--warn");
          u.ctx.setLineDash([3, 5]);
          for (const x of marks()) {
            if (x < u.scales.x.min || x > u.scales.x.max) continue;
            const at = Math.round(u.valToPos(x, "x", true));
            u.ctx.beginPath(); u.ctx.moveTo(at, u.bbox.top); u.ctx.lineTo(at, u.bbox.top + u.bbox.height); u.ctx.stroke();
          }
          u.ctx.restore();
        }],
      },
    };
  }

  function tell(panel, name, index) {
    const one = shown.get(name), out = panel.querySelector(".readout");
    if (!one || !out) return;
    const u = one.plot;
    if (index === null || index === undefined) { out.textContent = ""; return; }
    one.index = index;
    const parts = one.chart.series.map((s, i) => [s[1], u.data[i + 1][index], u.series[i + 1].show])
      .filter(([, v, on]) => on && v !== undefined).map(([label, v]) => `${label} ${value(v, one.chart.unit)}`);
    out.textContent = `${place(u.data[0][index], one.chart.over)}: ${parts.join(", ")}`;
  }

  function key(panel, name, event) {
    const { plot: u } = shown.get(name), one = shown.get(name), last = u.data[0].length - 1;
    const step = event.shiftKey ? Math.max(1, Math.round(last / 50)) : 1;
    const to = { ArrowLeft: (one.index ?? last + step) - step, ArrowRight: (one.index ?? -step) + step, Home: 0, End: last }[event.key];
    if (to !== undefined && last >= 0) {
      const index = Math.min(last, Math.max(0, to)), x = u.data[0][index];
      if (x < u.scales.x.min || x > u.scales.x.max) zoom(u, one, x, 1);
      u.setCursor({ left: u.valToPos(x, "x"), top: u.over.clientHeight / 2 }, false);
      one.index = index;
      tell(panel, name, index);
    } else if (event.key === "+" || event.key === "-") zoom(u, one, u.data[0][one.index ?? last >> 1], event.key === "+" ? 0.5 : 2);
    else if (event.key === "0" || (event.key === "Escape" && one.zoomed)) reset(name);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  function zoom(u, one, centre, factor) {
    const x = u.data[0], half = ((u.scales.x.max - u.scales.x.min) * factor) / 2;
    const min = Math.max(x[0], centre - half), max = Math.min(x[x.length - 1], centre + half);
    if (max > min) { u.setScale("x", { min, max }); one.zoomed = min > x[0] || max < x[x.length - 1]; }
  }
  function reset(name) {
    const one = shown.get(name);
    one.zoomed = false;
    one.plot.setData(one.plot.data, true);
  }

  // Draws a panel, or gives its plot the new numbers. Zoom, hidden lines and the cursor's text stay.
  function draw(panel, data) {
    const name = panel.dataset.chart, wanted = data.charts[name];
    if (!wanted) return;
    const before = shown.get(name), log = before && before.panel === panel ? before.log : undefined;
    const chart = { ...wanted, log: log ?? wanted.log };
    const same = before && before.panel === panel && JSON.stringify(before.chart.series) === JSON.stringify(chart.series);
    if (same) {
      before.data = data;
      const { min, max } = before.plot.scales.x, zoomed = before.zoomed;
      before.plot.setData(columns(data, chart), !zoomed);
      if (zoomed) before.plot.setScale("x", { min, max });
      return;
    }
    if (before) before.close();
    panel.classList.add("drawn");
    panel.tabIndex = 0;
    panel.setAttribute("role", "group");
    panel.setAttribute("aria-label", `${panel.querySelector("h4").textContent}: arrow keys read values, plus and minus zoom, 0 shows all`);
    if (!panel.querySelector(".readout")) {
      const out = document.createElement("output");
      out.className = "readout";
      panel.append(out);
    }
    const one = { panel, chart, data, log: chart.log, zoomed: false };
    shown.set(name, one);
    one.plot = new uPlot(options(panel, name, chart, () => one.data), columns(data, chart), (u, init) => { panel.insertBefore(u.root, panel.querySelector(".readout")); init(); });
    one.plot.over.addEventListener("mouseup", () => { one.zoomed = one.zoomed || one.plot.select.width > 0; });
    one.plot.over.addEventListener("dblclick", () => { one.zoomed = false; });
    const keys = (event) => key(panel, name, event), size = new ResizeObserver(() => one.plot.setSize({ width: panel.clientWidth, height: 220 }));
    panel.addEventListener("keydown", keys);
    size.observe(panel);
    one.close = () => { panel.removeEventListener("keydown", keys); size.disconnect(); one.plot.destroy(); shown.delete(name); };
  }

  // Buttons of a figure: its lines, a logarithmic axis, its numbers as a file.
  function controls(figure, data) {
    const panels = () => [...figure.querySelectorAll("[data-chart]")].map((p) => shown.get(p.dataset.chart)).filter(Boolean);
    let list = figure.querySelector(".legend");
    if (!list) { list = document.createElement("ul"); list.className = "legend"; figure.querySelector("figcaption").after(list); }
    if (list.querySelector("button")) return;
    [...list.children].forEach((item, i) => {
      const text = item.lastChild, button = add(item, text.textContent, (on) => panels().forEach((one) => one.plot.setSeries(i + 1, { show: on })));
      text.remove();
      button.className = "line";
      button.setAttribute("aria-pressed", "true");
    });
    const first = panels()[0];
    if (!first) return;
    if (first.chart.unit.startsWith("nats")) {
      const item = list.appendChild(document.createElement("li"));
      add(item, "log scale", (on) => panels().forEach((one) => {
        const { panel, data: numbers } = one;
        one.close();
        const again = { ...numbers, charts: { ...numbers.charts, [panel.dataset.chart]: { ...numbers.charts[panel.dataset.chart], log: on } } };
        draw(panel, again);
      }), "switch").setAttribute("aria-pressed", "false");
    }
    const item = list.appendChild(document.createElement("li"));
    const save = add(item, "CSV", () => csv(panels()[0], figure));
    save.removeAttribute("aria-pressed");
    save.setAttribute("aria-label", `Numbers of ${figure.querySelector("figcaption").textContent} as CSV`);
  }
  function add(item, text, act, kind = "") {
    const button = document.createElement("button");
    button.type = "button";
    button.className = kind;
    button.textContent = text;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      if (button.hasAttribute("aria-pressed")) button.setAttribute("aria-pressed", String(on));
      act(on);
    });
    item.append(button);
    return button;
  }
  function csv(one, figure) {
    const quote = (text) => `"${String(text).replace(/^[=+\-@\t]/, "'$&").replaceAll('"', '""')}"`;
    const head = [one.chart.over, ...one.chart.series.map((s) => s[1])].map(quote).join(",");
    const rows = one.plot.data[0].map((x, i) => one.plot.data.map((c) => c[i] ?? "").join(","));
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([[head, ...rows].join("\n") + "\n"], { type: "text/csv" }));
    link.download = `${figure.dataset.part}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function all(root, data) {
    for (const [name, one] of [...shown]) if (!root.contains(one.panel) || !data.charts[name]) one.close();
    for (const panel of root.querySelectorAll("[data-chart]")) draw(panel, data);
    for (const figure of root.querySelectorAll("figure.plot")) if (figure.querySelector("[data-chart]")) controls(figure, data);
  }
  function none() { for (const one of [...shown.values()]) one.close(); }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const one of [...shown.values()]) { const { panel, data } = one; one.close(); draw(panel, data); }
  });
  return { all, none, shown };
})();
globalThis.dwslmPlots = Plots.shown;
