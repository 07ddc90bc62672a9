"use strict";
// The page of one run or several: the live page of `esper dash`, and the report, where the data is in the file.
// Names from a run are only ever set as text. Numbers: null is not measured; a text names a value that is not finite.
(() => {
  const main = document.getElementById("main"), tip = document.getElementById("tip");
  const embedded = document.getElementById("data");
  const STAGES = ["dormant", "germinated", "training", "blending", "holding", "fossilized", "cooling", "cooling", "cooling"];
  const LETTERS = ["·", "G", "T", "B", "H", "F", "×", "×", "×"];
  const STAGE_TEXT = {
    germinated: "attached, not trained yet", training: "learns without effect on the host", blending: "alpha moves towards its target",
    holding: "alpha is 1, waits to be committed or pruned", fossilized: "permanent part of the host", cooling: "cooldown after a prune",
  };
  const ENDED = ["finished", "failed", "interrupted", "killed"];
  const PILLS = { finished: "good", running: "", failed: "bad", killed: "bad", interrupted: "warn" };
  const MOST_LINES = 8, MOST_ENVS = 24, MOST_EVENTS = 200, MOST_OPTIONS = 200;

  // -- elements and texts

  function el(tag, options = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") node.className = value;
      else if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
      else if (name === "style") Object.assign(node.style, value);
      else node.setAttribute(name, value === true ? "" : String(value));
    }
    node.append(...children.filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
    return node;
  }
  function svg(tag, options = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(options)) if (value !== null && value !== undefined) node.setAttribute(name, String(value));
    node.append(...children);
    return node;
  }
  const minus = text => text.replace(/-/g, "\u2212");
  const trim = v => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  function compact(v) {
    for (const [size, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= size) return +(v / size).toPrecision(3) + letter;
    return String(+v.toPrecision(3));
  }
  function duration(s) {
    if (s === 0) return "0 s";
    if (s < 1e-3) return Math.round(1e6 * s) + " µs";
    if (s < 1) return (s < 0.01 ? +(1000 * s).toPrecision(2) : Math.round(1000 * s)) + " ms";
    if (s < 60) return s.toFixed(1) + " s";
    const minutes = Math.floor(Math.round(s) / 60), rest = Math.round(s) % 60;
    return minutes < 60 ? `${minutes} min ${String(rest).padStart(2, "0")} s` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  }
  const UNITS = {
    percent: v => (100 * v).toFixed(1) + " %", points: v => (v < 0 ? "" : "+") + (100 * v).toFixed(1), number: trim,
    count: v => Math.round(v).toLocaleString("en").replace(/,/g, "\u2009"), compact, seconds: duration, signed: v => (v < 0 ? "" : "+") + v.toFixed(4),
  };
  const isNumber = v => typeof v === "number" && Number.isFinite(v);
  const text = (v, unit = "number") => v === null || v === undefined ? "not measured" : typeof v === "string" ? v : minus((UNITS[unit] || trim)(v));
  const plusMinus = (se, unit) => isNumber(se) ? " ± " + text(se, unit).replace("+", "") : "";
  const units = run => run.is_percent ? ["percent", "points"] : ["number", "number"];
  const inPoints = run => run.is_percent ? ", in points" : "";
  const plural = (n, word) => `${text(n, "count")} ${word}${n === 1 ? "" : "s"}`;

  function section(title, says, ...children) {
    return el("section", { "aria-label": title }, el("h2", {}, title), says ? el("p", { class: "says" }, says) : null, ...children);
  }
  function table(heads, rows, caption, right = []) {
    const side = i => right.includes(i) ? "r" : null;
    const cells = row => row.map((value, i) => {
      const isUnmeasured = value === "not measured";
      return el("td", { class: [side(i), isUnmeasured ? "un" : null].filter(Boolean).join(" ") || null }, isUnmeasured ? "–" : value);
    });
    return el("div", { class: "table", tabindex: 0, role: "region", "aria-label": caption },
      el("table", {}, el("caption", { class: "hidden" }, caption), el("thead", {}, el("tr", {}, ...heads.map((head, i) => el("th", { class: side(i), scope: "col" }, head)))),
        el("tbody", {}, ...rows.map(row => el("tr", {}, ...cells(row))))));
  }

  // -- the tip under the pointer

  function place(x, y) {
    tip.style.display = "block";
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width > innerWidth ? x - 16 - box.width : x + 16;
    tip.style.left = Math.max(6, Math.min(left, innerWidth - box.width - 6)) + "px";
    tip.style.top = Math.max(6, Math.min(y + 14, innerHeight - box.height - 6)) + "px";
  }
  const hideTip = () => { tip.style.display = "none"; };
  function tipped(node, lines) {
    node.setAttribute("aria-label", lines.join(", "));
    node.addEventListener("pointermove", event => {
      tip.replaceChildren(...lines.map((line, i) => i ? el("div", {}, line) : el("b", {}, line)));
      place(event.clientX, event.clientY);
    });
    node.addEventListener("pointerleave", hideTip);
    return node;
  }

  // -- charts

  const charts = new Set();
  const inView = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.chart.mount();
  }, { rootMargin: "200px" });
  const resized = new ResizeObserver(entries => { for (const entry of entries) entry.target.chart.resize(); });
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  class Chart {
    // A series: {name, key, colour, dash, stairs, x, y, low, high}. `low` and `high` are a band around it.
    constructor({ title, says = "", unit = "number", xName = "epoch", xUnit = "number", height = 220, zero = false, marks = [], sync = null, zoomed = null }) {
      Object.assign(this, { title, unit, xName, xUnit, height, zero, marks, sync, zoomed, series: [], hidden: new Set(), plot: null, isZoomed: false });
      this.says = el("p", { class: "says" }, says);
      this.area = el("div", { class: "plot", tabindex: 0, role: "img", style: { minHeight: height + "px" }, on: { keydown: e => this.key(e), blur: hideTip } });
      this.area.chart = this;
      this.reset = el("button", { type: "button", class: "reset", hidden: true, on: { click: () => this.unzoom() } }, "show all");
      this.node = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), this.says), this.area);
      charts.add(this);
      inView.observe(this.area);
      resized.observe(this.area);
    }
    set(series, { says, xName, xUnit } = {}) {
      this.series = series;
      if (says !== undefined) this.says.textContent = says;
      const isOther = (xName && xName !== this.xName);
      if (xName) Object.assign(this, { xName, xUnit });
      const ends = series.slice(0, 12).map(s => `${s.name} ends at ${text(lastOf(s.y), this.unit)}`).join(", ");
      this.area.setAttribute("aria-label", `${this.title}, ${plural(series.length, "curve")} over ${this.xName}: ${ends}. Arrow keys show values, plus and minus zoom.`);
      if (!this.plot) return;
      if (isOther) this.isZoomed = false;
      if (isOther || this.shape() !== this.drawn) this.draw();
      else this.plot.setData(this.data(), !this.isZoomed);
    }
    shape() { return this.series.map(s => [s.name, s.key, s.colour, s.dash, !!s.low, this.hidden.has(s.key)].join("|")).join("\n"); }
    shown() { return this.series.filter(s => !this.hidden.has(s.key)); }
    mount() {
      if (this.plot || !this.area.clientWidth) return;
      inView.unobserve(this.area);
      this.draw();
    }
    resize() { if (this.plot && this.area.clientWidth) this.plot.setSize({ width: this.area.clientWidth, height: this.height }); }
    data() {
      const tables = this.shown().map(s => s.low ? [s.x, s.y, s.low, s.high] : [s.x, s.y]);
      if (!tables.length) return [[]];
      return tables.length === 1 ? tables[0] : uPlot.join(tables, tables.map(t => t.map(() => 1)));
    }
    draw() {
      const view = this.isZoomed && this.plot ? { min: this.plot.scales.x.min, max: this.plot.scales.x.max } : null;
      if (this.plot) this.plot.destroy();
      this.drawn = this.shape();
      const soft = css("--soft"), grid = css("--grid");
      const series = [{}], bands = [];
      for (const s of this.shown()) {
        const colour = css("--c" + s.colour % 8);
        series.push({ label: s.name, stroke: colour, width: s.dash === "thin" ? 1.2 : 2, dash: s.dash === "dash" ? [6, 5] : s.dash === "dot" ? [2, 4] : undefined, spanGaps: false,
          paths: s.stairs ? uPlot.paths.stepped({ align: 1 }) : undefined,
          points: { show: (u, i) => this.isLonely(u, i), size: 7, fill: colour, stroke: colour }, own: s });
        if (s.low) {
          const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: false };
          series.push({ ...edge }, { ...edge });
          bands.push({ series: [series.length - 1, series.length - 2], fill: colour + "26" });
        }
      }
      const axis = { stroke: soft, font: "11.5px system-ui, sans-serif", grid: { stroke: grid, width: 1 }, ticks: { show: false } };
      const options = {
        width: this.area.clientWidth, height: this.height, series, bands, legend: { show: false },
        padding: [10, 12, 0, 0],
        scales: { x: { time: false, range: (u, low, high) => low === null ? [0, 1] : high > low ? [low, high] : [low - 1, high + 1] }, y: { range: (u, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, size: 30, ...(this.xUnit === "number" ? {} : { label: this.xName, labelSize: 18, labelGap: 0, labelFont: axis.font }), values: (u, ticks) => ticks.map(v => this.xUnit === "number" && v !== Math.round(v) ? "" : minus(compact(v))) },
          { ...axis, size: this.unit === "seconds" ? 64 : 56, values: (u, ticks, _, __, step) => ticks.map(v => this.label(v, step)) },
        ],
        cursor: { drag: { x: true, y: false, uni: 20 }, points: { size: 7 }, y: false, sync: this.sync ? { key: this.sync, setSeries: false, filters: { pub: type => type !== "mousedown" && type !== "mouseup" } } : undefined },
        hooks: {
          setCursor: [u => this.point(u)],
          setSelect: [u => { if (u.select.width > 4) this.zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); }],
          drawAxes: [u => this.drawMarks(u)], draw: [u => this.drawOdd(u), u => this.drawWhiskers(u)],
        },
      };
      options.cursor.drag.setScale = false;
      options.cursor.bind = { dblclick: () => () => { this.unzoom(); return null; } };
      this.plot = new uPlot(options, this.data(), this.area);
      this.area.append(this.reset);
      this.plot.over.addEventListener("pointerleave", hideTip);
      if (view) this.plot.setScale("x", view);
    }
    isLonely(u, i) {  // draw a point where the neighbours are missing, since no line shows it
      const y = u.data[i], own = u.series[i].own;
      if (!own || own.x.length > 400) return false;
      const filled = y.filter(isNumber).length;
      return filled === 1 || own.points === true;
    }
    range(low, high) {
      if (!isNumber(low) || !isNumber(high)) return [0, 1];
      for (const [y] of this.marks) { low = Math.min(low, y); high = Math.max(high, y); }
      if (this.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
      const room = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
      return [low === 0 ? 0 : low - room, high + room];
    }
    label(v, step) {
      const scale = this.unit === "percent" || this.unit === "points" ? 100 : 1;
      if (this.unit === "count" || this.unit === "compact") return minus(compact(v));
      if (this.unit === "seconds") return duration(v);
      let digits = 0;
      while (digits < 6 && Math.abs(step * scale * 10 ** digits - Math.round(step * scale * 10 ** digits)) > 1e-6) digits++;
      if (scale === 1 && Math.abs(v) >= 1e4) return minus(compact(v));
      return minus((this.unit === "points" && v > 0 ? "+" : "") + (v * scale).toFixed(digits) + (this.unit === "percent" ? " %" : ""));
    }
    drawMarks(u) {
      const ctx = u.ctx, ratio = devicePixelRatio;
      ctx.save();
      for (const [y, name] of this.marks) {
        const at = u.valToPos(y, "y", true);
        ctx.strokeStyle = ctx.fillStyle = css("--soft");
        ctx.setLineDash([2 * ratio, 4 * ratio]);
        ctx.beginPath(); ctx.moveTo(u.bbox.left, at); ctx.lineTo(u.bbox.left + u.bbox.width, at); ctx.stroke();
        ctx.font = 11 * ratio + "px system-ui, sans-serif"; ctx.textAlign = "right";
        ctx.fillText(name, u.bbox.left + u.bbox.width - 4 * ratio, at - 4 * ratio);
      }
      ctx.restore();
    }
    drawOdd(u) {
      const ctx = u.ctx;
      ctx.save();
      ctx.strokeStyle = css("--bad"); ctx.lineWidth = 2 * devicePixelRatio;
      for (const s of this.shown()) for (const x of s.odd || []) {
        const at = u.valToPos(x, "x", true);
        ctx.beginPath(); ctx.moveTo(at, u.bbox.top); ctx.lineTo(at, u.bbox.top + 12 * devicePixelRatio); ctx.stroke();
      }
      ctx.restore();
    }
    drawWhiskers(u) {  // the band around a single point has no width
      const ctx = u.ctx, ratio = devicePixelRatio;
      u.series.forEach((s, k) => {
        if (!s.own || !s.own.low || !this.isLonely(u, k)) return;
        ctx.save();
        ctx.strokeStyle = css("--c" + s.own.colour % 8);
        ctx.lineWidth = 1.5 * ratio;
        u.data[k].forEach((y, i) => {
          const low = u.data[k + 1][i], high = u.data[k + 2][i];
          if (!isNumber(y) || !isNumber(low)) return;
          const x = u.valToPos(u.data[0][i], "x", true), ends = [low, high].map(v => u.valToPos(v, "y", true));
          ctx.beginPath(); ctx.moveTo(x, ends[0]); ctx.lineTo(x, ends[1]);
          for (const end of ends) { ctx.moveTo(x - 3 * ratio, end); ctx.lineTo(x + 3 * ratio, end); }
          ctx.stroke();
        });
        ctx.restore();
      });
    }
    point(u) {
      const i = u.cursor.idx;
      if (i === null || i === undefined || u.cursor.left < 0 || u.cursor.event === null && !this.isKeyed) { if (this === Chart.pointed) hideTip(); return; }
      if (!this.isKeyed && !(u.over.matches(":hover"))) return;
      Chart.pointed = this;
      const x = u.data[0][i], rows = [];
      u.series.forEach((s, k) => {
        if (!s.own) return;
        let at = i;
        while (at >= 0 && u.data[k][at] === undefined) at--;  // a curve without a value at exactly this x
        const y = at < 0 ? undefined : u.data[k][at];
        if (y === undefined || (y === null && s.own.stairs)) return;
        const low = s.own.low ? u.data[k + 1][at] : null, high = s.own.low ? u.data[k + 2][at] : null;
        const band = isNumber(low) && isNumber(high) ? s.own.isRange ? ` (${text(low, this.unit)} to ${text(high, this.unit)})` : plusMinus((high - low) / 2, this.unit) : "";
        const isOdd = (s.own.odd || []).includes(x);
        rows.push(el("div", {}, el("i", { class: "c" + s.own.colour % 8 }), el("span", { class: "n" }, s.own.name), el("span", { class: "v" }, isOdd ? "not finite" : text(y, this.unit) + band)));
      });
      if (!rows.length) return hideTip();
      tip.replaceChildren(el("b", {}, `${this.xName} ${this.xUnit === "number" ? trim(x) : text(x, this.xUnit)}`), ...rows.slice(0, 14), ...(rows.length > 14 ? [el("div", {}, "…")] : []));
      const box = u.over.getBoundingClientRect();
      place(box.left + u.cursor.left, box.top + (this.isKeyed ? 10 : u.cursor.top));
    }
    key(event) {
      const u = this.plot, way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!u || !u.data[0].length) return;
      if (event.key === "Escape") { hideTip(); return this.unzoom(); }
      const { min, max } = u.scales.x, size = { "+": 0.25, "-": -0.5 }[event.key];
      if (size) { event.preventDefault(); return this.zoom(min + size * (max - min), max - size * (max - min)); }
      if (!way) return;
      event.preventDefault();
      const last = u.data[0].length - 1, from = this.isKeyed && isNumber(this.at) ? this.at + way : way > 0 ? 0 : last;
      this.at = Math.max(0, Math.min(last, from));
      this.isKeyed = true;
      u.setCursor({ left: u.valToPos(u.data[0][this.at], "x"), top: 10 });
      this.isKeyed = true;
    }
    async zoom(min, max) {
      const xs = this.plot.data[0];
      min = Math.max(min, xs[0]); max = Math.min(max, xs[xs.length - 1]);
      if (!(max > min)) return;
      this.isZoomed = true;
      this.reset.hidden = false;
      this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      this.plot.setScale("x", { min, max });
      if (this.zoomed) await this.zoomed(this, min, max);
    }
    unzoom() {
      if (!this.isZoomed) return;
      this.isZoomed = false;
      this.reset.hidden = true;
      if (this.zoomed) this.zoomed(this, null, null);
      this.plot.setData(this.data(), true);
    }
    toggle(key, isOn) {
      if (isOn) this.hidden.delete(key); else this.hidden.add(key);
      if (this.plot) this.draw();
    }
  }
  function balance(grid) {  // the last of an odd number of shown charts takes the whole row
    const cells = [...grid.children].filter(cell => !cell.hidden && !cell.classList.contains("always-wide"));
    cells.forEach((cell, i) => cell.classList.toggle("wide", i === cells.length - 1 && i % 2 === 0));
  }
  const lastOf = ys => { for (let i = ys.length - 1; i >= 0; i--) if (ys[i] !== null && ys[i] !== undefined) return ys[i]; return null; };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(chart => chart.plot && chart.draw()));
  const redraws = new Set();  // of pictures whose size depends on the page's
  function printing(isOn) {
    document.documentElement.classList.toggle("printing", isOn);
    for (const chart of charts) if (chart.plot) { chart.resize(); chart.draw(); } else if (isOn) chart.mount();
    redraws.forEach(redraw => redraw());
  }
  addEventListener("beforeprint", () => printing(true));
  addEventListener("afterprint", () => printing(false));
  function forget(node) {  // charts below a node that is replaced
    for (const chart of charts) if (node.contains(chart.area)) { if (chart.plot) chart.plot.destroy(); inView.unobserve(chart.area); resized.unobserve(chart.area); charts.delete(chart); }
  }

  // buttons that switch curves of several charts: items are {key, name, colour, dash}
  function legend(items, list, note = "", off = new Set()) {
    return el("div", { class: "legend" }, ...items.map(item => {
      const button = el("button", { type: "button", "aria-pressed": String(!off.has(item.key)), on: { click: () => {
        const isOn = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(isOn));
        if (isOn) off.delete(item.key); else off.add(item.key);
        list.forEach(chart => chart.toggle(item.key, isOn));
      } } }, el("i", { class: `c${item.colour % 8} ${item.dash || ""}` }), el("span", {}, item.name));
      return button;
    }), note ? el("small", {}, note) : null);
  }
  function stageLegend() {
    return el("div", { class: "stages" }, ...Object.entries(STAGE_TEXT).map(([name, says]) =>
      el("span", { title: says }, el("i", { class: name, "aria-hidden": "true" }, LETTERS[STAGES.indexOf(name)]), name === "cooling" ? "cooldown" : name)));
  }

  // -- one run: a document that patches extend, and its sections

  class Run {
    constructor(doc, { id = null, details = {}, explained = {} } = {}) {
      Object.assign(this, { doc: { envs: [], series: {}, events: [] }, id, details, explained, xBy: "step", chosen: null, off: new Set(), parts: [], query: "" });
      this.apply(doc);
    }
    get run() { return this.doc.run; }
    env(index) { return this.doc.envs.find(env => env.env === index); }
    apply(patch) {
      const doc = this.doc, { envs, series, events, since, ...parts } = patch;
      if (!since) { doc.envs = []; doc.series = {}; doc.events = []; if (this.id !== null) this.details = {}; }
      for (const env of envs) {
        const at = doc.envs.findIndex(each => each.env === env.env);
        if (at < 0) doc.envs.push(env); else doc.envs[at] = env;
      }
      for (const [index, rows] of Object.entries(series)) doc.series[index] = joined(doc.series[index], rows);
      doc.events = [...doc.events, ...events].slice(-MOST_EVENTS);
      Object.assign(doc, parts);
      if (since) for (const env of [...envs.map(env => env.env), "best"]) delete this.details[env];
    }
    async detail(index) {
      const key = String(index);
      if (!this.details[key] && this.id !== null) this.details[key] = await json(`api/runs/${this.id}/${index === "best" ? "best" : `envs/${index}`}`);
      return this.details[key] || null;
    }
    // the explained operations of an environment, or the importance of "features"; not kept on the live page, where decisions are recorded anew
    async explain(what) { return this.id === null ? this.explained[what] || null : json(`api/runs/${this.id}/explained/${what}`); }
    get name() { return this.run.name; }
    // whether the best episode is an earlier one than the newest of its environment
    get hasBest() { const best = this.run.best; return best && (this.id !== null || this.details.best) && (this.env(best[0]) || {}).episode !== best[1]; }
    // environments whose curves are drawn; above MOST_LINES their mean and range is the first curve
    lines() { return this.doc.envs.filter(env => this.doc.series[env.env]); }
    async choose(index, slot = null, isScrolled = false) {
      this.chosen = { env: index, slot };
      await Promise.all(this.parts.map(part => part.chosen && part.chosen(isScrolled)));
    }
    update() { for (const part of this.parts) part.update(); }
  }
  // rows replace everything from their index `at` on
  function joined(old, rows) {
    if (!old || !rows.at || old.stride !== rows.stride || old.episode !== rows.episode) return rows;
    const glue = (before, after) => {
      const size = rows.at + (Object.values(after)[0] || []).length, whole = {};
      for (const name of new Set([...Object.keys(before), ...Object.keys(after)])) {
        const values = (before[name] || []).slice(0, rows.at);
        while (values.length < rows.at) values.push(null);
        values.push(...(after[name] || []));
        while (values.length < size) values.push(null);
        whole[name] = values;
      }
      return whole;
    };
    return { ...rows, at: 0, columns: glue(old.columns, rows.columns), low: rows.low ? glue(old.low, rows.low) : undefined };
  }
  // the points of one column: x by step or by training multiply-adds, with gaps where steps are missing
  function curve(rows, name, by) {
    const xs = rows.columns[by] || rows.columns.step, ys = rows.columns[name] || xs.map(() => null);
    const odd = (rows.odd || []).filter(each => each[1] === name).map(each => each[0]);
    const points = { x: [], y: [], odd: by === "step" ? odd : [] };
    const put = (x, y) => { if (isNumber(x) && !(points.x.length && x <= points.x[points.x.length - 1])) { points.x.push(x); points.y.push(isNumber(y) ? y : null); } };
    for (let i = 0; i < xs.length; i++) {
      const step = rows.columns.step[i], before = rows.columns.step[i - 1];
      if (i && rows.stride === 1 && step > before + 1) put(xs[i - 1] + (xs[i] - xs[i - 1]) / (step - before), null);
      if (rows.low) put((rows.low[by] || rows.low.step)[i], (rows.low[name] || [])[i]);
      put(xs[i], ys[i]);
    }
    return points;
  }
  const measured = (run, name) => run.lines().some(env => (run.doc.series[env.env].columns[name] || []).some(isNumber));

  function header(run) {
    const node = el("header");
    const update = () => {
      const r = run.run;
      const facts = {
        task: r.task, controller: r.controller, seed: r.seed, "run id": r.run_id !== r.name ? r.run_id : null, started: when(r.started),
        [ENDED.includes(r.status) ? "took" : "so far"]: r.wall_s === null ? null : text(r.wall_s, "seconds"), environments: r.envs || null, rounds: r.rounds > 1 ? r.rounds : null,
        epochs: r.steps, host: r.host_params === null ? null : text(r.host_params, "count") + " parameters", on: r.device ? `${r.device}, ${plural(r.threads || 1, "thread")}` : null,
      };
      node.replaceChildren(...[
        el("p", { class: "brand" }, embedded ? "Esper run" : el("a", { href: "#/" }, "Esper: all runs")),
        el("div", { class: "top" }, el("h1", {}, r.name), el("span", { class: `pill ${PILLS[r.status] || ""} ${run.isLive ? "live" : ""}` }, run.isLive ? "live" : r.status),
          run.isCut ? el("span", { class: "pill warn" }, "reconnecting…") : null),
        run.gone ? el("p", { class: "gone", role: "alert" }, `This page is not updated any more: ${run.gone}`) : null,
        r.command ? el("p", { class: "soft command" }, el("code", {}, r.command)) : null,
        el("dl", { class: "facts" }, ...Object.entries(facts).filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))))].filter(Boolean));
    };
    return { node, update };
  }
  function when(stamp) {
    if (typeof stamp !== "string") return null;
    return stamp[10] === "T" ? stamp.slice(0, 16).replace("T", " ") + (/(Z|\+00:00)$/.test(stamp) ? " UTC" : "") : stamp;
  }

  function health(run) {
    const node = el("div");
    const update = () => {
      const list = run.doc.problems;
      node.replaceChildren(list.length
        ? el("section", { class: "trouble" + (list.some(p => p.severity === "error") ? " has-error" : ""), role: "alert" }, el("h2", {}, "Problems"),
          el("ul", {}, ...list.map(p => el("li", {}, el("b", { class: p.severity === "error" ? "error" : "warning" }, p.severity), " " + p.text))))
        : el("p", { class: "health" }, `No problems: ${text(run.run.events, "count")} events, none lost; no alarm.`));
    };
    return { node, update };
  }

  function tiles(run) {
    const node = el("div", { class: "tiles" });
    const update = () => {
      const [unit, points] = units(run.run), grown = run.doc.envs.filter(env => isNumber(env.quality) && !env.is_no_growth);
      const own = grown.filter(env => env.germinated).length ? grown.filter(env => env.germinated) : grown;
      const mean = pick => { const values = own.map(pick).filter(isNumber); return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; };
      const gain = mean(env => isNumber(env.no_growth) ? env.quality - env.no_growth : null), seeds = own.reduce((sum, env) => sum + (env.germinated || 0), 0);
      const who = own.length > 1 ? `mean of ${own.length} environments` : own.length ? own[0].name : "";
      const times = mean(env => env.host_params ? env.params / env.host_params : null), macs = mean(env => env.train_macs);
      const list = own.length ? [
        [text(mean(env => env.quality), unit), `quality now, ${who}`],
        gain === null ? null : [text(gain, points), "over the same world without growth" + inPoints(run.run)],
        [text(mean(env => env.params), "count"), "parameters" + (times === null ? "" : `, ${times.toFixed(2)}× the host`)],
        macs === null ? null : [text(macs, "compact"), "training multiply-adds" + (own.length > 1 ? ", mean" : "")],
        [[seeds, ...["fossilized", "pruned"].map(name => own.reduce((sum, env) => sum + (env[name] || 0), 0))].map(n => text(n, "count")).join("\u2009/\u2009"), "seeds germinated / committed / pruned"],
        [text(run.run.env_steps, "count"), "epochs trained, all episodes"],
      ].filter(Boolean) : [];
      node.replaceChildren(...list.map(([big, small]) => el("div", { class: "tile" }, el("b", {}, big), el("span", {}, small))));
    };
    return { node, update };
  }

  // -- the growing network

  const stageAt = (slot, step) => slot.stages.find(([, , start, end]) => start <= step && step <= end) || null;
  const alphaAt = (slot, step) => { let alpha = null; for (const [from, value] of slot.alpha) if (from <= step) alpha = value; return alpha; };
  function seedAt(detail, slot, step) {
    const born = detail.seeds.filter(seed => seed.slot === slot.slot && seed.moves.length && seed.moves[0].step <= step);
    return born.length ? born[born.length - 1] : null;
  }

  function network(run) {
    const picture = svg("svg", { class: "network", role: "group", "aria-label": "The network at this epoch" }), lanes = el("div", { class: "lanes" }), marker = el("i", { class: "now" });
    const range = el("input", { type: "range", min: 0, step: 1, "aria-label": "Epoch", on: { input: () => { stop(); isAtEnd = range.value === range.max; show(); } } });
    const output = el("output"), readout = el("p", { class: "readout soft" }), pick = el("select", { on: { change: () => run.choose(pick.value === "best" ? "best" : +pick.value) } });
    const play = el("button", { type: "button", class: "small-button", on: { click: () => timer ? stop() : start() } }, "▶ Play");
    const node = section("The growing network", "The host is a chain from left to right. Above it are the seeds in their slots: height by parameters, colour and letter by stage, the line to the host by alpha. A committed seed sits on the host.",
      el("div", { class: "bar-row" }, el("label", { class: "pick" }, "Environment ", pick), stageLegend()), picture, el("div", { class: "scrub" }, play, range, output), readout, lanes);
    let detail = null, timer = null, isAtEnd = true;
    const stop = () => { clearInterval(timer); timer = null; play.textContent = "▶ Play"; };
    function start() {
      if (+range.value >= +range.max) range.value = 0;
      play.textContent = "❚❚ Pause";
      timer = setInterval(() => { range.value = +range.value + 1; show(); if (+range.value >= +range.max) { isAtEnd = true; stop(); } }, Math.max(40, Math.min(250, 9000 / Math.max(1, +range.max))));
    }
    function show() {
      const step = +range.value, newest = run.doc.series[detail.env], rows = newest && newest.episode === detail.episode ? newest : null;
      output.textContent = `epoch ${step} of ${detail.length}`;
      marker.style.left = `calc(var(--gutter) + (100% - var(--gutter)) * ${step / Math.max(1, detail.length)})`;
      const at = rows ? rows.columns.step.findIndex(x => x >= step) : -1, of = name => at < 0 ? null : (rows.columns[name] || [])[at];
      readout.textContent = rows && at >= 0 && step ? [["quality", units(run.run)[0]], ["val_loss", "number"], ["params", "count"], ["train_macs", "compact"]].filter(([name]) => isNumber(of(name)))
        .map(([name, unit]) => `${{ quality: "quality", val_loss: "validation loss", params: "parameters", train_macs: "training multiply-adds" }[name]} ${text(of(name), unit)}`).join(" · ") : "";
      drawNetwork(picture, detail, step, slot => run.choose(run.chosen.env, slot, true));
    }
    async function chosen() {
      detail = run.chosen && await run.detail(run.chosen.env);
      node.hidden = !detail;
      if (!detail) return;
      const options = [...new Set([...run.doc.envs.filter(env => env.germinated || (env.slots || []).some(slot => slot.stage)), run.env(run.chosen.env)])].filter(Boolean).slice(0, MOST_OPTIONS);
      if (pick.options.length !== options.length + !!run.hasBest || pick.value !== String(run.chosen.env)) {
        pick.replaceChildren(...(run.hasBest ? [el("option", { value: "best" }, `best episode: ${(run.env(run.run.best[0]) || {}).name}, ${run.doc.updates ? "round" : "episode"} ${run.run.best[1]}`)] : []), ...options.map(env => el("option", { value: env.env }, `${env.name}${env.episodes > 1 ? `, ${run.doc.updates ? "round" : "episode"} ${env.episode}` : ""}`)));
        pick.value = String(run.chosen.env);
      }
      range.max = String(detail.length);
      if (isAtEnd && !timer) range.value = range.max;
      drawLanes(lanes, detail, marker);
      show();
    }
    new ResizeObserver(() => detail && show()).observe(node);
    redraws.add(() => detail && node.isConnected && show());
    return { node, update: () => {}, chosen };
  }
  function drawNetwork(picture, detail, step, choose) {
    const width = picture.clientWidth || picture.parentNode.clientWidth || 600, slots = detail.slots, n = slots.length;
    const isNarrow = width / (n + 1) < 92, host = detail.host_params || 1, pitch = width / (n + 0.6), roomy = !isNarrow;
    const biggest = Math.max(host, ...detail.seeds.map(seed => seed.params || 0)), tall = 76, scale = params => 14 + tall * Math.sqrt((params || 0) / biggest) * 0.8;
    const hostHeight = Math.min(54, scale(host) * 0.62), tallest = Math.max(20, ...detail.seeds.map(seed => scale(seed.params))), line = Math.round(62 + tallest + hostHeight / 2), height = line + hostHeight / 2 + 34, nodes = [];
    const add = (tag, options, ...children) => { const made = svg(tag, options, ...children); nodes.push(made); return made; };
    const block = (x0, x1) => add("rect", { class: "host", x: x0, y: line - hostHeight / 2, width: Math.max(4, x1 - x0), height: hostHeight, rx: 7 });
    const gap = Math.min(17, pitch * 0.16), centre = i => pitch * (i + 0.8);
    add("path", { class: "path", d: `M0 ${line}H${width}`, "stroke-width": 3 });
    for (let i = 0; i <= n; i++) block(i ? centre(i - 1) + gap : 8, i < n ? centre(i) - gap : width - 14);
    add("path", { class: "flow", d: `M${width - 10} ${line - 6}L${width} ${line}L${width - 10} ${line + 6}Z` });
    add("text", { class: "label", x: width / 2, y: height - 2 }, `host: ${text(detail.host_params, "count")} parameters`);
    slots.forEach((slot, i) => {
      const x = centre(i), interval = step ? stageAt(slot, step) : null, stage = interval ? interval[0] : 0, name = STAGES[stage] || "dormant", seed = seedAt(detail, slot, step);
      const group = svg("g", { tabindex: 0, role: "button" });
      const alpha = step ? alphaAt(slot, step) || 0 : 0, says = stage ? `${interval[1] || "seed"}, ${name === "cooling" ? "cooldown" : name}, alpha ${text(alpha)}${seed && stage < 6 ? `, ${text(seed.params, "count")} parameters` : ""}` : "empty";
      group.append(svg("title", {}, `${slot.slot}: ${says}`));
      group.setAttribute("aria-label", `slot ${slot.slot}: ${says}`);
      const put = (tag, options, ...children) => group.append(svg(tag, options, ...children));
      const fill = name === "cooling" ? "var(--cooling)" : `var(--${name})`, box = Math.max(4, Math.min(84, pitch - 10));
      if (!stage || stage > 5) put("circle", { class: "empty", cx: x, cy: line, r: Math.max(2, gap - 5) });
      else {
        const h = scale(seed ? seed.params : 0), bottom = stage === 5 ? line + hostHeight / 2 : line - hostHeight / 2 - 22, top = stage === 5 ? Math.min(line - hostHeight / 2 - 4, bottom - h) : bottom - h, mid = (top + bottom) / 2;
        if (stage !== 5) {
          const reach = Math.min(pitch / 2 - 4, box / 2 + 14);
          put("path", { class: "path", d: `M${x - reach} ${line - hostHeight / 2}V${mid}H${x + reach}V${line - hostHeight / 2}`, "stroke-width": 1.5 + 4.5 * alpha, "stroke-dasharray": alpha ? null : "3 4", stroke: fill });
          group.lastChild.style.stroke = alpha ? fill : "";
          put("circle", { class: "empty", cx: x, cy: line, r: Math.max(2, gap - 5) });
        }
        put("rect", { class: "seed", x: x - box / 2, y: top, width: box, height: bottom - top, rx: 6 });
        group.lastChild.style.fill = fill;
        put("text", { class: "strong", x, y: mid + 4 }, LETTERS[stage]);
        group.lastChild.style.fill = `var(--on-${name})`;
        if (roomy || n <= 4) put("text", { x, y: top - 20 }, clipped(interval[1], pitch));
        if (roomy || n <= 4) put("text", { class: "label", x, y: top - 6 }, clipped(stage === 3 || stage === 4 ? `${name} α ${(+alpha).toFixed(2)}` : name, pitch));
      }
      put("text", { class: "label", x, y: line + hostHeight / 2 + 15 }, clipped(slot.slot, pitch));
      const act = () => choose(slot.slot);
      group.addEventListener("click", act);
      group.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); act(); } });
      nodes.push(group);
    });
    picture.setAttribute("height", height);
    const focus = [...picture.querySelectorAll("g")].indexOf(document.activeElement);
    picture.replaceChildren(...nodes);
    if (focus >= 0) picture.querySelectorAll("g")[focus]?.focus();
  }
  const clipped = (name, width) => { const most = Math.max(3, Math.floor(width / 6.6)); return name && name.length > most ? name.slice(0, most - 1) + "…" : name || ""; };
  function drawLanes(node, detail, marker) {
    const length = Math.max(1, detail.length), used = detail.slots.filter(slot => slot.stages.length);
    const rows = used.map(slot => {
      const bars = [];
      for (const [stage, blueprint, start, end] of slot.stages) {
        const last = bars[bars.length - 1];
        if (last && stage > 5 && last.stage > 5 && start === last.end + 1) last.end = end; else bars.push({ stage, blueprint, start, end });
      }
      return el("div", { class: "lane" }, el("b", { title: slot.slot }, slot.slot), el("div", { class: "track" }, ...bars.map(bar => {
        const name = STAGES[bar.stage], width = 100 * (bar.end - bar.start + 1) / length;
        return tipped(el("div", { class: "bar " + name, role: "img", style: { left: 100 * (bar.start - 1) / length + "%", width: width + "%" } }, width > 4 && name !== "cooling" ? bar.blueprint : ""),
          [`${bar.blueprint || "seed"} in ${slot.slot}`, `${name === "cooling" ? "removed, slot resting" : name}, ${bar.start === bar.end ? `epoch ${bar.start}` : `epochs ${bar.start} to ${bar.end}`}`]);
      })));
    });
    const size = 10 ** Math.floor(Math.log10(length / 5 || 1)), step = Math.max(1, [1, 2, 5, 10].find(m => length / (m * size) <= 6) * size), ticks = [];
    for (let x = 0; x <= length; x += step) ticks.push(x);
    node.replaceChildren(...rows, marker, el("div", { class: "xs", "aria-hidden": "true" }, el("em", {}, "epoch"), ...ticks.map(x => el("span", { style: { left: 100 * x / length + "%" } }, compact(x)))));
    node.hidden = !used.length;
  }

  // -- curves

  const X_NAMES = { step: ["epoch", "number"], train_macs: ["training multiply-adds", "compact"] };
  function curves(run) {
    const [unit] = units(run.run);
    const kinds = [["quality", "Quality after each epoch", unit, 300], ["val_loss", "Validation loss", "number", 220], ["train_loss", "Training loss", "number", 220], ["utility", "Utility: quality over no growth, minus rent", "number", 220], ["params", "Parameters of the network", "count", 220]];
    const full = {};  // rows at full resolution while a chart is zoomed
    const zoomed = async (chart, min, max) => {
      for (const key of Object.keys(full)) delete full[key];
      const coarse = run.lines().filter(env => run.doc.series[env.env].stride > 1);
      if (min !== null && run.id !== null) await Promise.all(coarse.slice(0, MOST_LINES).map(async env => {
        full[env.env] = await json(`api/runs/${run.id}/rows?env=${env.env}&episode=${env.episode}&by=${run.xBy}&from=${min}&to=${max}`);
      }));
      if (coarse.length) update();
    };
    const list = kinds.map(([name, title, unitOf, height]) => { const chart = new Chart({ title, unit: unitOf, height, sync: "curves", zoomed }); chart.name = name; return chart; });
    const holder = el("div"), says = el("p", { class: "says" });
    const button = (by, name) => el("button", { type: "button", "aria-pressed": String(run.xBy === by), on: { click: event => {
      run.xBy = by;
      for (const other of event.target.parentNode.children) other.setAttribute("aria-pressed", String(other === event.target));
      list.forEach(chart => { if (chart.isZoomed) chart.unzoom(); });
      update();
    } } }, name);
    const toggle = el("div", { class: "toggle", role: "group", "aria-label": "Horizontal axis" }, button("step", "by epoch"), button("train_macs", "by training multiply-adds"));
    const grid = el("div", { class: "grid2" }, ...list.map(chart => chart.node));
    list[0].node.classList.add("wide", "always-wide");
    const node = section("Training", "", says, el("div", { class: "bar-row" }, toggle), holder, grid);
    let known = "";
    function update() {
      const envs = run.lines(), isMany = envs.length > MOST_LINES, shown = envs.slice(0, isMany ? 32 : MOST_LINES), mean = run.doc.mean;
      node.hidden = !envs.length;
      toggle.hidden = !measured(run, "train_macs");
      const by = toggle.hidden ? "step" : run.xBy, [xName, xUnit] = X_NAMES[by];
      const items = shown.map((env, i) => ({ key: "e" + env.env, name: env.name, colour: i + isMany }));
      if (isMany && mean) items.unshift({ key: "mean", name: `mean and range of ${mean.episodes}`, colour: 0 });
      if (isMany && mean && !run.hasHidden) { run.hasHidden = true; shown.forEach(env => run.off.add("e" + env.env)); }
      list.forEach(chart => { chart.hidden = run.off; });
      const stride = Math.max(1, ...envs.map(env => run.doc.series[env.env].stride));
      const signature = items.map(item => item.name).join("\n");
      if (signature !== known) { known = signature; 
        const isFolded = isMany && mean, rest = legend(isFolded ? items.slice(1) : items, list, shown.length < envs.length ? `the first ${shown.length} of ${envs.length} environments` : "", run.off);
        holder.replaceChildren(...(isFolded ? [legend(items.slice(0, 1), list, "", run.off), el("details", {}, el("summary", {}, "Single environments"), rest)] : [rest]));
      }
      says.textContent = [run.run.episodes > envs.length ? "The newest episode of every environment." : "", stride > 1 ? `Each point covers ${stride} epochs, by its minimum and maximum; zoom in for every epoch.` : "", "Drag over a chart to zoom, double-click to show all."].filter(Boolean).join(" ");
      for (const chart of list) {
        const name = chart.name, series = [];
        if (isMany && mean && mean[name]) series.push({ name: `mean of ${mean.episodes}`, key: "mean", colour: 0, isRange: true, x: by === "step" ? mean.step : mean.train_macs.mean, y: mean[name].mean, low: mean[name].low, high: mean[name].high });
        shown.forEach((env, i) => {
          const rows = full[env.env] || run.doc.series[env.env];
          series.push({ name: env.name, key: "e" + env.env, colour: i + isMany, dash: isMany ? "thin" : "", stairs: name === "params" && rows.stride === 1, ...curve(rows, name, by) });
          if (name === "quality" && envs.length <= 4 && rows.columns.committed_quality) {
            const without = curve(rows, "committed_quality", by), all = series[series.length - 1];
            without.y = without.y.map((y, k) => y !== all.y[k] ? y : null);
            if (without.y.some(isNumber)) series.push({ name: `${env.name}, without live seeds`, key: "e" + env.env, colour: i, dash: "dash", ...without });
          }
        });
        chart.node.hidden = !series.some(s => s.y.some(isNumber) || (s.odd || []).length) && name !== "quality";
        const hasDashes = series.some(s => s.dash === "dash");
        chart.set(series, { xName, xUnit, says: name === "quality" ? `On the validation split${hasDashes ? "; dashed: without the seeds not yet committed" : ""}.` + (series.some(s => s.y.some(isNumber)) ? "" : " Not measured.") : undefined });
      }
      balance(grid);
    }
    return { node, update };
  }

  // -- environments × slots

  function cell(run, env, slot) {
    const name = STAGES[slot.stage] || "dormant", [, points] = units(run.run), isLive = slot.stage > 0 && slot.stage < 6;
    const worth = slot.contribution !== null && slot.contribution !== undefined ? text(slot.contribution, points) + plusMinus(slot.contribution_se, points)
      : slot.prospect !== null && slot.prospect !== undefined ? "prospect " + text(slot.prospect, points) + plusMinus(slot.prospect_se, points) : "";
    const isChosen = run.chosen && run.chosen.env === env.env && run.chosen.slot === slot.slot;
    return el("button", { type: "button", class: "cell", "aria-pressed": String(!!isChosen), "aria-label": `${env.name}, slot ${slot.slot}: ${isLive ? `${slot.blueprint}, ${name}, alpha ${text(slot.alpha)}, ${worth || "worth not measured"}` : name === "cooling" ? "cooldown" : "empty"}. Show its life.`,
      on: { click: () => run.choose(env.env, slot.slot, true) } },
      el("i", { class: name }, LETTERS[slot.stage] || "?"),
      isLive ? el("span", { class: "seed-name" }, slot.blueprint || "seed",
        el("span", { class: "alpha", title: `alpha ${text(slot.alpha)}` }, el("u", { style: { width: 100 * Math.max(0, Math.min(1, +slot.alpha || 0)) + "%" } })), el("small", {}, worth)) : null);
  }
  function environments(run) {
    const holder = el("div"), more = el("button", { type: "button", class: "small-button", on: { click: () => { most = Infinity; update(); } } });
    const says = el("p", { class: "says" }), node = section("Environments and their slots", "", says, stageLegend(), el("div", { class: "many-columns" }, holder), more);
    let most = MOST_ENVS;
    function update() {
      const [unit, points] = units(run.run), envs = run.doc.envs, has = name => envs.some(env => isNumber(env[name])), names = run.run.slots;
      node.hidden = !envs.length;
      const heads = [["environment"], ["epoch"], ["quality", unit], ["best", unit], ["test", unit], ["no_growth", points], ["params", "count"], ["train_macs", "compact"], ["wall_s", "seconds"]]
        .filter(([name]) => !["test", "no_growth", "train_macs", "wall_s"].includes(name) || has(name));
      const titles = { environment: "environment", no_growth: "over no growth", params: "parameters", train_macs: "multiply-adds", wall_s: "time" }, columns = heads.map(([name]) => titles[name] || name);
      const cut = 3, rows = envs.slice(0, most).map(env => { const cells = heads.map(([name, of]) => {
        if (name === "environment") return env.episodes > 1 ? `${env.name}, ${run.doc.updates ? "round" : "episode"} ${env.episode}` : env.name;
        if (name === "epoch") return env.step === undefined ? "not measured" : String(env.step);
        if (name === "no_growth") return isNumber(env.quality) && isNumber(env.no_growth) ? text(env.quality - env.no_growth, of) : env.is_no_growth ? "" : "not measured";
        if (name === "params" && env.host_params && isNumber(env.params)) return el("span", {}, text(env.params, of), el("span", { class: "soft" }, ` ${(env.params / env.host_params).toFixed(2)}×`));
        return name === "quality" ? el("b", {}, text(env[name], of)) : text(env[name], of);
      }); return [...cells.slice(0, cut), ...names.map(name => { const slot = (env.slots || []).find(each => each.slot === name); return slot ? cell(run, env, slot) : ""; }), ...cells.slice(cut)]; });
      says.textContent = "Quality is measured on the validation split" + (has("test") ? ", test on data that had no part in any decision" : "") + (has("no_growth") ? `; over no growth: against the same world without growth${inPoints(run.run)}` : "")
        + `. A slot shows its stage, alpha, blueprint and contribution ± 1 standard error${inPoints(run.run)}. Choose a slot to see the life of its seed.`;
      const focus = [...holder.querySelectorAll("button")].indexOf(document.activeElement), at = holder.firstChild ? holder.firstChild.scrollLeft : 0;
      holder.replaceChildren(table([...columns.slice(0, cut), ...names, ...columns.slice(cut)], rows, "Environments and their slots", [1, 2, ...columns.slice(cut).map((_, i) => cut + names.length + i)]));
      holder.firstChild.scrollLeft = at;
      if (focus >= 0) holder.querySelectorAll("button")[focus]?.focus();
      more.hidden = envs.length <= most;
      more.textContent = `Show all ${envs.length} environments`;
    }
    return { node, update, chosen: update };
  }

  // -- the life of seeds, and what they are worth

  function seedLife(run, seed, isChosen) {
    const [, points] = units(run.run);
    const why = move => {
      const worth = move.contribution !== null ? `, worth ${text(move.contribution, points)}${plusMinus(move.contribution_se, points)}` : "", d = move.decision;
      if (move.cause === "controller" && d) return `chosen by the controller: ${d.op} ${d.how}`.trim() + worth + (d.legal.length > 1 ? `; also legal: ${d.legal.filter(op => op !== d.op).join(", ")}` : "") + (isNumber(d.entropy) ? `; entropy ${d.entropy.toFixed(2)}` : "");
      if (move.cause === "controller") return "chosen by the controller" + worth;
      if (move.now === "DORMANT") return "the slot has rested and is free again";
      return `${move.cause === "rules" ? "by the rules" : `by the ${move.cause}`}${move.dwell_epochs ? ` after ${plural(move.dwell_epochs, "epoch")}` : ""}${worth}`;
    };
    const chip = stage => el("span", { class: "chip " + (STAGES[["DORMANT", "GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "PRUNED", "EMBARGOED", "RESETTING"].indexOf(stage)] || "dormant") }, stage.toLowerCase());
    return el("div", { class: "life" + (isChosen ? " chosen" : ""), "data-slot": seed.slot }, el("h3", {}, `${seed.blueprint} in ${seed.slot}`, el("span", { class: "soft" }, `, seed ${seed.seed}, ${text(seed.params, "count")} parameters`)),
      el("ol", {}, ...seed.moves.filter(move => !["EMBARGOED", "RESETTING"].includes(move.now)).map(move => el("li", {}, el("span", { class: "soft" }, `epoch ${move.step}`), el("span", {}, chip(move.was), " → ", chip(move.now)), el("span", {}, why(move))))));
  }
  function worthSeries(slot, colour) {
    if (!slot.worth) return [];
    const c = slot.worth.columns, n = c.step.length, lines = [];
    for (const [name, field, isCommitted, dash] of [[slot.slot, "contribution", false, ""], [`${slot.slot}, committed: dependence`, "contribution", true, "dash"], [`${slot.slot}, in training: prospect`, "prospect", false, "dot"]]) {
      const line = { name, key: slot.slot, colour, dash, x: [], y: [], low: [], high: [], points: true };
      for (let i = 0; i < n; i++) {
        const y = (c[field] || [])[i], se = (c[field + "_se"] || [])[i], fits = isNumber(y) && !!(c.committed || [])[i] === isCommitted;
        const isOther = i && c.seed[i] !== c.seed[i - 1];
        if (isOther && line.x.length) { line.x.push(c.step[i] - 0.5); for (const name of ["y", "low", "high"]) line[name].push(null); }
        line.x.push(c.step[i]);
        line.y.push(fits ? y : null);
        line.low.push(fits && isNumber(se) ? y - se : null);
        line.high.push(fits && isNumber(se) ? y + se : null);
      }
      line.points = line.y.filter(isNumber).length < 3;
      if (line.y.some(isNumber)) lines.push(line);
    }
    return lines;
  }
  function beams(rows, unit, most = 0) {  // horizontal bars with standard errors: {name, small, y, se, colour}; the scale reaches to `most` at least
    const ends = rows.flatMap(({ y, se }) => isNumber(y) ? [y - (se || 0), y + (se || 0)] : []), low = Math.min(0, ...ends), span = Math.max(most, ...ends) - low || 1, at = y => 100 * (y - low) / span;
    return el("div", { class: "bars" }, ...rows.flatMap(({ name, small, y, se, colour, label }) => {
      const beam = el("div", { class: `beam c${colour % 8}` }, el("s", { style: { left: at(0) + "%" } }));
      if (isNumber(y)) beam.append(el("i", { style: { left: at(Math.min(y, 0)) + "%", width: Math.abs(at(y) - at(0)) + "%" } }));
      if (isNumber(y) && isNumber(se)) beam.append(el("u", { style: { left: at(y - se) + "%", width: at(y + se) - at(y - se) + "%" } }));
      return [el("div", { class: "name" }, name + " ", small ? el("small", {}, small) : null), beam, el("div", { class: "num" }, label || text(y, unit) + plusMinus(se, unit))];
    }));
  }
  function seeds(run) {
    const [, points] = units(run.run), holder = el("div"), worthBars = el("div"), title = el("h3", { tabindex: -1 });
    const alpha = new Chart({ title: "Alpha: how much of each seed reaches the host", zero: true, height: 140, marks: [[1, "full strength"]], sync: "seeds" });
    const worth = new Chart({ title: "Worth: quality with the seed minus quality without it" + inPoints(run.run), unit: points, zero: true, height: 240, sync: "seeds",
      says: "Band: ± 1 standard error. Dotted: what a seed still in training would add. Dashed: of a committed seed, what the network would lose without it now." });
    const keys = el("div"), node = section("Stages and worth of seeds", "", title, holder, keys, alpha.node, worth.node, worthBars);
    let known = "";
    async function chosen(isScrolled) {
      const detail = run.chosen && await run.detail(run.chosen.env), used = detail ? detail.slots.filter(slot => slot.stages.length || slot.worth) : [];
      node.hidden = !used.length;
      if (!used.length) return;
      title.textContent = `${detail.name}${run.run.episodes > run.run.envs ? `, ${run.doc.updates ? "round" : "episode"} ${detail.episode}` : ""}`;
      const ordered = [...detail.seeds].sort((a, b) => (b.slot === run.chosen.slot) - (a.slot === run.chosen.slot));
      holder.replaceChildren(...ordered.slice(0, 40).map(seed => seedLife(run, seed, seed.slot === run.chosen.slot)), ordered.length > 40 ? el("p", { class: "none" }, `${ordered.length - 40} more seeds are in the journal.`) : "");
      const colour = name => Math.max(0, run.run.slots.indexOf(name)), signature = used.map(slot => slot.slot).join("\n");
      if (signature !== known) { known = signature; keys.replaceChildren(legend(used.map(slot => ({ key: slot.slot, name: slot.slot, colour: colour(slot.slot) })), [alpha, worth])); }
      alpha.set(used.map(slot => {
        const line = { name: slot.slot, key: slot.slot, colour: colour(slot.slot), stairs: true, x: [], y: [] };
        for (const [from, value] of slot.alpha) { const interval = stageAt(slot, from); line.x.push(from - 1); line.y.push(interval && interval[0] < 6 && isNumber(value) ? value : null); }
        if (line.x.length) { line.x.push(detail.length); line.y.push(line.y[line.y.length - 1]); }
        return line;
      }).filter(line => line.y.some(isNumber)));
      worth.set(used.flatMap(slot => worthSeries(slot, colour(slot.slot))));
      alpha.node.hidden = alpha.series.every(line => line.y.every(y => y === null || y === 1));  // all joined at full strength
      worth.node.hidden = !worth.series.length;
      const last = used.flatMap(slot => lastShapley(slot).map(row => ({ ...row, slot: slot.slot, colour: colour(slot.slot), blueprint: (detail.seeds.find(seed => seed.seed === row.seed) || {}).blueprint || "" })));
      const when = row => `${row.blueprint}, ${row.x >= detail.length ? "at the end" : `epoch ${row.x}`}`;
      worthBars.replaceChildren(...(last.length ? [el("div", { class: "grid2" },
        el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, "Shapley value of each seed" + inPoints(run.run)), el("p", { class: "says" }, "Its share of what all seeds contribute together, averaged over all orders of adding them, as last measured; ± 1 standard error.")),
          beams(last.map(row => ({ ...row, name: row.slot, small: when(row) })), points)),
        last.some(row => isNumber(row.interaction)) ? el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, "Interaction of each seed with the others" + inPoints(run.run)), el("p", { class: "says" }, "The sum of its pairwise interactions: above 0 it is worth more together with the other seeds, below 0 they do the same work.")),
          beams(last.map(row => ({ ...row, name: row.slot, small: row.blueprint, y: row.interaction, se: null })), points)) : "")] : []));
      if (isScrolled) { const target = holder.querySelector(".life.chosen"); (target || title).scrollIntoView({ block: "center" }); title.focus({ preventScroll: true }); }
    }
    return { node, update: () => {}, chosen };
  }
  function lastShapley(slot) {
    const c = slot.worth && slot.worth.columns, last = new Map();
    if (c && c.shapley) c.step.forEach((x, i) => { if (c.shapley[i] !== null) last.set(c.seed[i], { seed: c.seed[i], x, y: c.shapley[i], se: (c.shapley_se || [])[i], interaction: (c.interaction || [])[i] }); });
    return [...last.values()];
  }

  // -- rounds, decisions, PPO, phases, comparison

  function rounds(run) {
    const word = run.run.rounds > 1 ? "round" : "episode", [unit] = units(run.run), grid = el("div", { class: "grid2" });
    const list = [
      new Chart({ title: `Quality at the end of each ${word}`, unit, xName: word, height: 240, says: "Mean over environments; the band spans the worst and the best." }), new Chart({ title: "Utility at the end", xName: word, height: 170, says: "Quality over no growth, minus rent on parameters and multiply-adds." }),
      new Chart({ title: "Parameters at the end", unit: "count", xName: word, height: 170 }), new Chart({ title: `Seeds per ${word}`, xName: word, height: 170, zero: true, says: "Mean over environments." })];
    const keys = el("div"), node = section(`${word[0].toUpperCase()}${word.slice(1)} by ${word}`, "", keys, grid);
    list[0].node.classList.add("wide", "always-wide");
    grid.append(...list.map(chart => chart.node));
    keys.append(legend([{ key: "grown", name: "grown", colour: 0 }, { key: "baseline", name: "same worlds without growth", colour: 7, dash: "dash" }], [list[0]]));
    const seedKeys = [["germinated", "germinated", 5], ["fossilized", "committed", 2], ["pruned", "pruned", 7, "dash"]].map(([key, name, colour, dash]) => ({ key, name, colour, dash }));
    list[3].says.after(legend(seedKeys, [list[3]]));
    function update() {
      const r = run.doc.rounds;
      node.hidden = !r;
      if (!r) return;
      const line = (name, label, colour, options = {}) => {
        const values = r.columns[name] || [];
        return { name: label, key: options.key || name, colour, dash: options.dash, isRange: true, x: values.length ? r.round : [], y: values.map(v => v && v[0]), ...(options.isBare ? {} : { low: values.map(v => v && v[1]), high: values.map(v => v && v[2]) }) };
      };
      const filled = lines => lines.filter(s => s.y.some(isNumber));
      list[0].set(filled([line("quality", "grown", 0, { key: "grown" }), line("baseline_quality", "same worlds without growth", 7, { key: "baseline", dash: "dash", isBare: true })]));
      list[1].set(filled([line("utility", "utility", 2)]));
      list[2].set(filled([line("params", "parameters", 6)]));
      list[3].set(filled(seedKeys.map(({ key, name, colour, dash }) => line(key, name, colour, { isBare: true, dash }))));
      list.forEach(chart => { chart.node.hidden = !chart.series.length; });
      balance(grid);
    }
    return { node, update };
  }

  function decisions(run) {
    const entropy = new Chart({ title: "Entropy of the operation", says: "Divided by its maximum: 1 is uniform, 0 is deterministic. Mean of the decisions; the band spans all of them.", zero: true, height: 180 });
    const ops = el("div"), prints = el("div"), node = section("What was decided", "", el("div", { class: "grid2" }, el("div", {}, el("h3", {}, "Operations"), ops), entropy.node), prints);
    function update() {
      const d = run.doc.decisions, [, points] = units(run.run);
      node.hidden = !d || !Object.keys(d.ops).length;
      if (node.hidden) return;
      const total = Object.values(d.ops).reduce((a, b) => a + b, 0);
      ops.replaceChildren(beams(Object.entries(d.ops).map(([op, n], i) => ({ name: op, y: n, colour: op === "WAIT" ? 7 : i, label: `${text(n, "count")} (${(100 * n / total).toFixed(1)} %)` })), "count"), d.illegal ? el("p", { class: "none" }, `${d.illegal} were not legal and did nothing.`) : "");
      entropy.xName = d.by;
      entropy.set([{ name: "entropy", key: "entropy", colour: 6, isRange: true, x: d.keys, y: d.entropy.map(v => v && v[0]), low: d.entropy.map(v => v && v[1]), high: d.entropy.map(v => v && v[2]) }].filter(s => s.y.some(isNumber)));
      entropy.node.hidden = !entropy.series.length;
      prints.replaceChildren(d.blueprints.length ? table(["blueprint", "germinated", "committed", "pruned", "share committed", `mean worth when committed${inPoints(run.run)}`],
        d.blueprints.map(b => [b.blueprint, text(b.germinated, "count"), text(b.fossilized, "count"), text(b.pruned, "count"), b.germinated ? text(b.fossilized / b.germinated, "percent") : "not measured", text(b.worth, points)]), "Blueprints", [1, 2, 3, 4, 5]) : "");
    }
    return { node, update };
  }

  // -- why the policy decided so

  function why(run) {
    const pick = el("select", { "aria-label": "Operation", on: { change: () => draw() } }), row = el("div", { class: "bar-row" }, el("label", { class: "pick" }, "Operation ", pick)), holder = el("div"), features = el("div");
    const load = el("button", { type: "button", class: "small-button", hidden: run.id === null, on: { click: () => { isOpen = true; read(true); } } }, "Explain the chosen environment's decisions");
    const node = section("Why the policy decided so", "Of each operation of the chosen environment: how likely the alternatives were, which features moved the decision, and what became of the seed.", load, row, holder, features);
    let explained = null, env = null, isOpen = run.id === null, hasFeatures = false;
    const fail = error => ({ damage: error.message });
    async function read(isAgain) {
      const index = run.chosen && (run.chosen.env === "best" ? run.run.best[0] : run.chosen.env);
      node.hidden = !run.run.has_decisions;
      row.hidden = !isOpen || !(explained && explained.rows && explained.rows.length);
      if (node.hidden || !isOpen || index === null || (index === env && !isAgain)) return;
      env = index;
      if (run.id !== null) holder.replaceChildren(el("p", { class: "none", role: "status" }, "Reading the decisions…"));
      explained = await run.explain(env).catch(fail);
      load.textContent = run.isLive ? "Read the newest decisions" : "Read again";
      row.hidden = !(explained && explained.rows && explained.rows.length);
      pick.replaceChildren(...(row.hidden ? [] : explained.rows.map((each, i) => el("option", { value: i }, `epoch ${each.step}: ${operation(each)}`))));
      await draw();
      if (hasFeatures && !isAgain) return;
      hasFeatures = true;
      features.replaceChildren(...importance(await run.explain("features").catch(fail)));
    }
    async function draw() {
      const name = (run.env(env) || {}).name || `environment ${env}`, round = explained && run.doc.updates ? `, round ${explained.episode}` : "";
      if (row.hidden) return holder.replaceChildren(el("p", { class: "none" }, !explained ? `Decisions of ${name} are not part of this file.` : explained.damage || (explained.is_recorded ? `${name}${round} waited at every step.` : `Decisions of ${name} are not recorded: those of the first environments are.`)));
      const d = explained.rows[+pick.value], heads = [["operation", d.ops], ["slot", d.slots], ...Object.entries(d.options)].filter(([, chances]) => Object.keys(chances).length > 1);
      const taken = { operation: d.op, slot: d.slot, ...d.heads }, detail = await run.detail(env), is = detail && detail.episode === explained.episode;
      const seed = is && detail.seeds.find(each => each.slot === d.slot && each.moves.some(move => move.step >= d.step));
      holder.replaceChildren(...[
        el("p", { class: "says after" }, `${name}${round}, before epoch ${d.step}: ${operation(d)}. Probability of the whole action ${text(d.probability, "percent")}; expected return ${text(d.value, "signed")}.${explained.all > explained.rows.length ? ` The first ${explained.rows.length} of ${explained.all} operations are explained.` : ""}`),
        el("div", { class: "grid2" },
          el("div", { class: "reason" }, el("div", {}, el("h3", {}, "Alternatives"), el("p", { class: "says" }, "Probability of every legal choice: slots given the operation, the others given both. The chosen one is coloured.")),
            ...heads.map(([head, chances]) => el("div", {}, el("h4", {}, head.replace("_", " ")), beams(Object.entries(chances).map(([option, p]) => ({ name: option, y: p, colour: option === taken[head] ? 0 : 7, label: text(p, "percent") })), "percent", 1)))),
          el("div", { class: "reason" }, el("div", {}, el("h3", {}, "What moved it"), el("p", { class: "says" }, "Log-probability of the action minus that with the feature at its mean over all recorded steps (the memory: empty). Above 0, the value made the action more likely. Effects do not add up.")),
            beams(d.influences.map(each => ({ name: each.name, small: each.name === "memory" ? "kept against empty" : `${each.slot ? each.slot + ", " : ""}${minus(`${trim(each.value)} against ${trim(each.neutral)}`)}`, y: each.effect, colour: each.effect < 0 ? 1 : 2, label: minus((each.effect < 0 ? "" : "+") + each.effect.toFixed(2)) })), "number"))),
        d.slot ? el("h3", { class: "after" }, "What happened to the seed") : null,
        d.slot ? seed ? seedLife(run, seed, false) : el("p", { class: "none" }, is ? "The journal has no later move of a seed in this slot." : `This page has the lives of another round than these decisions, which are of round ${explained.episode}.`) : null,
      ].filter(Boolean));
    }
    return { node, update: () => { node.hidden = !run.run.has_decisions; }, chosen: () => read(false) };
  }
  const operation = d => [d.op, d.slot, ...Object.keys(d.heads).filter(head => Object.keys(d.options[head]).length > 1).map(head => d.heads[head])].filter(Boolean).join(" ");
  function importance(explained) {
    if (!explained) return [];
    if (!explained.rows) return [el("p", { class: "none" }, explained.damage)];
    const rows = explained.rows.filter(each => each.sd > 0), constant = explained.rows.filter(each => !(each.sd > 0)).map(each => each.name);
    return [el("details", {}, el("summary", {}, "Which features the policy uses ", el("small", {}, `permutation importance of ${rows.length} features`)),
      el("p", { class: "says" }, `How much decisions change when the values of a feature are permuted among ${text(explained.decisions, "count")} recorded decisions: mean Kullback–Leibler divergence, in nats. Near 0, the feature is not used.`),
      table(["feature", "of", "lowest", "highest", "standard deviation", "importance"], rows.map(each => [each.name, each.scope, ...[each.low, each.high, each.sd, each.nats].map(v => text(v))]), "Importance of features", [2, 3, 4, 5]),
      constant.length ? el("p", { class: "none" }, `Constant in these decisions: ${constant.join(", ")}.`) : "")];
  }

  function ppo(run) {
    const kinds = [["return_mean", "Return", "number", 0, { says: "The sum of an episode's rewards: mean over the round's episodes. Band: ± 1 standard deviation." }], ["kl", "KL divergence of an update", "number", 1, { zero: true, marks: [[0.03, "too far"]] }],
      ["clip_fraction", "Share of actions clipped", "percent", 4, { zero: true }], ["explained_variance", "Explained variance of the critic", "number", 2, { zero: true, says: "1: all variance of returns; 0: no better than their mean." }],
      ["value_nrmse", "Error of the critic", "number", 3, { zero: true, says: "Over the spread of returns." }], ["grad_norm", "Gradient norm", "number", 6, { zero: true }]];
    const names = { return_mean: "mean return", kl: "KL", clip_fraction: "clip fraction", explained_variance: "explained variance", value_nrmse: "value NRMSE", grad_norm: "gradient norm" };
    const list = kinds.map(([name, title, unit, colour, options]) => { const chart = new Chart({ title, unit, xName: "round", height: 150, sync: "ppo", ...options }); return { name, chart, colour }; });
    const heads = new Chart({ title: "Entropy of each head", says: "Divided by its maximum: 1 is uniform, 0 is deterministic.", xName: "round", zero: true, height: 210, sync: "ppo" }), keys = el("div");
    const says = el("p", { class: "says" }), node = section("Policy updates", "", says, el("div", { class: "grid3" }, ...list.map(({ chart }) => chart.node)), keys, heads.node);
    let known = "";
    function update() {
      const u = run.doc.updates;
      node.hidden = !u;
      if (!u) return;
      const c = u.columns, skipped = (c.skipped || []).reduce((a, b) => a + (b || 0), 0);
      says.textContent = `${plural(c.round.length * u.stride, "update")}${u.stride > 1 ? `, ${u.stride} per point` : ""}${skipped ? `; ${skipped} minibatches skipped because of non-finite numbers` : ""}.`;
      for (const { name, chart, colour } of list) {
        const y = c[name] || [], sd = name === "return_mean" && c.return_sd, odd = (u.odd || []).filter(each => each[1] === name).map(each => each[0]);
        chart.set(y.length ? [{ name: names[name], key: name, colour, x: c.round, y, odd, ...(sd ? { low: y.map((v, i) => isNumber(v) && isNumber(sd[i]) ? v - sd[i] : null), high: y.map((v, i) => isNumber(v) && isNumber(sd[i]) ? v + sd[i] : null) } : {}) }] : []);
      }
      const lines = Object.keys(c).filter(name => name.startsWith("entropy ")).map((name, i) => ({ name: name.slice(8), key: name, colour: i, x: c.round, y: c[name] }));
      heads.set(lines);
      heads.node.hidden = !lines.length;
      const signature = lines.map(line => line.key).join();
      if (signature !== known) { known = signature; keys.replaceChildren(legend(lines, [heads])); }
    }
    return { node, update };
  }

  function phases(run) {
    const holder = el("div"), node = section("Time per phase", "", holder);
    function update() {
      const list = run.doc.phases;
      node.hidden = !list.length;
      const bars = [["wall", "wall_ms"], ["CPU", "cpu_ms"]].flatMap(([name, field]) => {
        const whole = list.reduce((sum, p) => sum + p[field], 0) || 1;
        return [el("div", { class: "says" }, `${name} time, ${duration(whole / 1000)} in phases`), el("div", { class: "share" }, ...list.map((p, i) => tipped(el("span", { class: "c" + i % 8, role: "img", style: { width: 100 * p[field] / whole + "%" } }, p[field] > 0.08 * whole ? el("em", {}, p.phase) : ""),
          [p.phase, `${text(p[field] / whole, "percent")} of ${name} time, ${duration(p[field] / 1000)}`])))];
      });
      const wall = list.reduce((sum, p) => sum + p.wall_ms, 0) || 1;
      holder.replaceChildren(...bars, table(["phase", "wall", "share", "CPU", "calls", "per call"], list.map((p, i) => [el("span", {}, el("i", { class: `key c${i % 8}` }), p.phase), duration(p.wall_ms / 1000), text(p.wall_ms / wall, "percent"), duration(p.cpu_ms / 1000), text(p.calls, "count"), p.calls ? duration(p.wall_ms / p.calls / 1000) : "not measured"]), "Phases", [1, 2, 3, 4, 5]));
    }
    return { node, update };
  }

  function heldOut(run) {
    const h = run.doc.held_out;
    const node = h ? section("Held-out comparison", h.says || "", h.damage ? el("p", { class: "none" }, h.damage) : table(h.heads, h.rows.map(row => row.map(value => Array.isArray(value) ? el("b", {}, value[0]) : value === null ? "not measured" : value)), "Held-out comparison", h.heads.map((_, i) => i).slice(1))) : el("div");
    return { node, update: () => {} };
  }

  function events(run) {
    const list = el("ol", { class: "log", tabindex: 0, "aria-label": "Events, newest first" }), field = el("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", on: { input: () => { run.query = field.value.toLowerCase(); update(); } } });
    const says = el("p", { class: "says" }), node = section("Events", "", says, el("div", { class: "bar-row" }, field), list);
    function update() {
      const all = run.doc.events, shown = all.filter(e => !run.query || `${e.env || "run"} ${e.kind} ${e.text}`.toLowerCase().includes(run.query));
      node.hidden = !all.length;
      says.textContent = `The newest ${all.length} moves between stages, decisions, results and messages, of ${text(run.run.events, "count")} events in the journal.`;
      list.replaceChildren(...shown.reverse().map(e => el("li", {}, el("span", { class: "t" }, duration(Math.max(0, e.s))), el("span", {}, e.env || "run"), el("span", { class: "t" }, e.step === null ? "" : e.step), el("b", { class: e.tone }, { good: "✓", warn: "!", bad: "✕" }[e.tone] || ""), el("span", {}, e.text))));
    }
    return { node, update };
  }

  function settings(run) {
    const tree = value => value !== null && typeof value === "object" && !Array.isArray(value)
      ? el("ul", { class: "tree" }, ...Object.entries(value).map(([k, v]) => v !== null && typeof v === "object" && !Array.isArray(v) && Object.keys(v).length ? el("li", {}, el("details", {}, el("summary", {}, k), tree(v))) : el("li", {}, k + ": ", el("code", {}, plain(v)))))
      : el("code", {}, plain(value));
    const plain = value => value === null || value === undefined ? "none" : typeof value === "string" ? value : JSON.stringify(value).slice(0, 2000);
    const folds = Object.entries(run.doc.settings || {}).filter(([, value]) => value && Object.keys(value).length).map(([name, value]) => el("details", {}, el("summary", {}, name), tree(value)));
    return { node: folds.length ? section("Settings", "", ...folds) : el("div"), update: () => {} };
  }

  // -- several runs

  function comparison(runs) {
    const isPercent = runs.every(run => run.run.is_percent), unit = isPercent ? "percent" : "number", points = isPercent ? "points" : "number";
    const kinds = [["quality", "Quality after each epoch", unit, 320], ["val_loss", "Validation loss", "number", 220], ["params", "Parameters of the network", "count", 220]];
    const list = kinds.map(([name, title, of, height]) => { const chart = new Chart({ title, unit: of, height, sync: "compare", says: name === "quality" ? "Mean over a run's environments without its baselines, newest episodes; the band spans the worst and the best." : "" }); chart.name = name; return chart; });
    const holder = el("div", { class: "many-columns" }), paired = el("div", { class: "paired" });
    let by = "step";
    const button = (value, name) => el("button", { type: "button", "aria-pressed": String(by === value), on: { click: event => { by = value; for (const other of event.target.parentNode.children) other.setAttribute("aria-pressed", String(other === event.target)); update(); } } }, name);
    const node = section("Side by side", `Means over the newest episode of every environment${isPercent ? "; differences in points" : ""}. Baselines of a run are not part of its mean.`, holder, paired,
      el("div", { class: "bar-row" }, el("div", { class: "toggle", role: "group", "aria-label": "Horizontal axis" }, button("step", "by epoch"), button("train_macs", "by training multiply-adds"))),
      legend(runs.map((run, i) => ({ key: "r" + i, name: run.name, colour: i })), list), el("div", { class: "grid2" }, el("div", { class: "wide" }, list[0].node), list[1].node, list[2].node));
    function update() {
      const own = run => run.doc.envs.some(env => env.is_no_growth) ? run.doc.envs.filter(env => env.germinated) : run.doc.envs;
      const mean = (run, pick) => { const values = own(run).map(pick).filter(isNumber); return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null; };
      const first = mean(runs[0], env => env.quality);
      holder.replaceChildren(table(["run", "task", "controller", "seed", "status", "envs", "quality", "vs first", "best", "test", "over no growth", "params", "multiply-adds", "time"], runs.map((run, i) => {
        const r = run.run, quality = mean(run, env => env.quality);
        return [run.id === null ? r.name : el("a", { href: `#/run/${run.id}` }, r.name), r.task ?? "", r.controller ?? "", r.seed ?? "", el("span", { class: `pill ${PILLS[r.status] || ""}` }, r.status), String(own(run).length), text(quality, unit),
          i && isNumber(first) && isNumber(quality) ? text(quality - first, points) : "", text(mean(run, env => env.best), unit), text(mean(run, env => env.test), unit), text(mean(run, env => isNumber(env.no_growth) ? env.quality - env.no_growth : null), points),
          text(mean(run, env => env.params), "count"), text(mean(run, env => env.train_macs), "compact"), text(r.wall_s, "seconds")];
      }), "Runs", [5, 6, 7, 8, 9, 10, 11, 12, 13]));
      const [xName, xUnit] = X_NAMES[by];
      for (const chart of list) chart.set(runs.flatMap((run, i) => overlaid(run, own(run), chart.name, by, i)), { xName, xUnit });
    }
    return { node, update, paired };
  }
  const METRICS = { quality: "quality", test_quality: "test quality", utility: "utility U", params: "parameters", train_macs: "training multiply-adds" };
  function pairTable(pair) {
    const rows = pair.measures.map(m => {
      const isShare = m.metric.endsWith("quality") && [m.first, m.other].every(v => v >= 0 && v <= 1), unit = isShare ? "percent" : m.metric === "params" ? "count" : m.metric === "train_macs" ? "compact" : "number";
      const signed = v => isShare ? text(v, "points") : (v > 0 ? "+" : "") + text(v, unit), { mean, low, high, wins, ties, losses } = m.lead, isSure = m.worlds > 1 && (low > 0 || high < 0), difference = signed(mean) + (m.worlds > 1 ? ` [${signed(low)}, ${signed(high)}]` : "");
      return [METRICS[m.metric] || m.metric, text(m.first, unit), text(m.other, unit), isSure ? el("b", {}, difference) : difference, `${wins} / ${ties} / ${losses}`];
    });
    const counts = (title, values) => Object.keys(values || {}).length ? el("div", {}, el("h3", {}, title), table(["", pair.first, pair.other], Object.entries(values).map(([name, [a, b]]) => [name, text(a, "count"), text(b, "count")]), title, [1, 2])) : null;
    const choices = pair.choices, differing = choices ? choices.first_differences : [];
    return el("div", {}, el("h3", {}, `${pair.other} against ${pair.first}`), el("p", { class: "says" }, `${pair.scope === "held_out" ? "Held-out worlds" : "Last finished episode in each world"}, ${plural(pair.worlds.length, "world")} in common. Difference: second − first, mean over worlds, in brackets its bootstrap 95 % interval; bold where it excludes 0.`),
      table(["", pair.first, pair.other, "difference [95 %]", "worlds +/=/−"], rows, `${pair.other} against ${pair.first}`, [1, 2, 3, 4]),
      el("details", {}, el("summary", {}, "What they decided differently"), el("div", { class: "grid2" }, counts("Seeds in the final networks", pair.structures), choices ? counts("Operations", choices.operations) : null, choices ? counts("Germinated", choices.blueprints) : null),
        differing.length ? el("p", { class: "says" }, `Decisions differ in ${choices.differing_worlds} of ${plural(pair.worlds.length, "world")}; the first different one${differing.length < choices.differing_worlds ? `, in the first ${differing.length} of them` : ""}:`) : null,
        differing.length ? table(["world", "step", pair.first, pair.other], differing.map(d => [d.world, d.step, d.first, d.other]), "First different decision in each world") : el("p", { class: "none" }, choices ? "The same decisions in every world." : "Decisions are not recorded.")));
  }
  function overlaid(run, envs, name, by, i) {
    const rows = envs.map(env => run.doc.series[env.env]).filter(Boolean), key = "r" + i;
    if (rows.length < 2) return rows.map(each => ({ name: run.name, key, colour: i, stairs: name === "params" && each.stride === 1, ...curve(each, name, by) }));
    const cells = new Map();
    for (const each of rows) each.columns.step.forEach((step, k) => {
      const y = (each.columns[name] || [])[k], x = (each.columns[by] || each.columns.step)[k];
      if (isNumber(y) && isNumber(x)) { const cell = cells.get(step) || [0, 0, 0, Infinity, -Infinity]; cells.set(step, [cell[0] + 1, cell[1] + x, cell[2] + y, Math.min(cell[3], y), Math.max(cell[4], y)]); }
    });
    const steps = [...cells.keys()].sort((a, b) => a - b).map(step => cells.get(step));
    return steps.length ? [{ name: run.name, key, colour: i, isRange: true, x: steps.map(c => c[1] / c[0]), y: steps.map(c => c[2] / c[0]), low: steps.map(c => c[3]), high: steps.map(c => c[4]) }] : [];
  }

  // -- pages

  async function json(path) {
    const answer = await fetch(path, { headers: { accept: "application/json" } });
    if (!answer.ok) throw new Error((await answer.text()).slice(0, 300) || answer.statusText);
    return answer.json();
  }
  function show(run, into) {
    run.parts = [header, health, tiles, network, curves, environments, seeds, rounds, decisions, why, ppo, phases, heldOut, events, settings].map(make => make(run));
    into.append(...run.parts.map(part => part.node), el("footer", {}, `Made from ${text(run.run.events, "count")} events. ${embedded ? "This file needs no network." : "Only this machine can open this page."}`));
    run.update();
    const best = run.run.best, grown = run.doc.envs.filter(env => env.germinated);
    const first = grown.find(env => best && env.env === best[0] && (run.id !== null || run.details[env.env])) || grown.find(env => run.id !== null || run.details[env.env]) || run.doc.envs[0];
    if (first) run.choose(run.hasBest && !run.isLive ? "best" : first.env);
  }
  let streams = [];
  function follow(run, changed) {
    const query = new URLSearchParams({ since: run.doc.position, version: run.doc.version, status: run.run.status });
    const stream = new EventSource(`api/runs/${run.id}/live?${query}`);
    let isDue = false;
    run.isLive = true;
    stream.onopen = () => { run.isCut = false; changed(); };
    stream.onerror = () => {
      run.isCut = true;
      changed();
      if (stream.readyState === EventSource.CLOSED) json(`api/runs/${run.id}`).catch(error => { run.isLive = run.isCut = false; run.gone = error.message; changed(); });
    };
    stream.onmessage = event => {
      run.apply(JSON.parse(event.data));
      run.isCut = false;
      if (ENDED.includes(run.run.status)) { run.isLive = false; stream.close(); if (run.ended) run.ended(); }
      if (!isDue) { isDue = true; setTimeout(() => { isDue = false; changed(); if (run.chosen) run.choose(run.chosen.env, run.chosen.slot); }, 250); }
    };
    streams.push(stream);
  }
  function clear() {
    streams.forEach(stream => stream.close());
    streams = [];
    forget(main);
    main.replaceChildren();
  }
  async function listPage(isLeft) {
    const chosen = new Set(), title = el("h1"), place = el("code"), holder = el("div");
    const go = el("button", { type: "button", class: "small-button", disabled: true, on: { click: () => { location.hash = `#/compare/${[...chosen].join(",")}`; } } }, "Compare the chosen runs");
    const field = el("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs by name, task, controller or status", on: { input: () => draw() } });
    const box = run => el("input", { type: "checkbox", checked: chosen.has(run.id), "data-run": run.id, "aria-label": `Choose ${run.name}`, on: { change: event => { if (event.target.checked) chosen.add(run.id); else chosen.delete(run.id); go.disabled = chosen.size < 2; } } });
    let found = await json("api/runs"), drawn = "";
    if (isLeft()) return;
    const bar = el("div", { class: "bar-row" }, field, go), says = el("p", { class: "says" }, "Newest first. Open one, or choose several to compare."), node = section("Runs", "", says, bar, holder);
    function draw() {
      const query = field.value.toLowerCase(), runs = found.runs.filter(run => [run.name, run.task, run.controller, run.status].join(" ").toLowerCase().includes(query)), signature = JSON.stringify([query, found]);
      if (signature === drawn) return;
      drawn = signature;
      title.textContent = plural(found.runs.length, "run");
      place.textContent = found.directory;
      bar.hidden = says.hidden = !found.runs.length;
      const focus = document.activeElement?.dataset?.run, at = holder.firstChild ? holder.firstChild.scrollTop : 0;
      holder.replaceChildren(runs.length ? table(["", "run", "status", "task", "controller", "started", "took", "env-steps"], runs.map(run => [box(run), el("a", { href: `#/run/${run.id}`, "data-run": "a" + run.id }, run.name),
        el("span", { class: `pill ${PILLS[run.status] || ""} ${run.status === "running" ? "live" : ""}` }, run.status), run.task ?? "", run.controller ?? "", when(run.started) ?? "", text(run.seconds, "seconds"), text(run.env_steps, "count")]), "Runs", [6, 7])
        : el("p", { class: "none" }, query ? "No run matches." : "There are no runs here yet. A run appears when it begins."));
      holder.firstChild.scrollTop = at;
      if (focus) holder.querySelector(`[data-run="${focus}"]`)?.focus();
    }
    main.replaceChildren(el("header", {}, el("p", { class: "brand" }, "Esper"), title, el("p", { class: "soft command" }, place)), node);
    document.title = "Esper runs";
    draw();
    const timer = setInterval(async () => {
      if (isLeft()) return clearInterval(timer);
      if (document.hidden) return;
      found = await json("api/runs").catch(() => found);
      if (!isLeft()) draw();
    }, 3000);
  }
  async function runPage(id, isLeft) {
    const run = new Run(await json(`api/runs/${id}`), { id });
    if (isLeft()) return;
    document.title = `${run.name}, Esper`;
    main.replaceChildren();
    run.isLive = !ENDED.includes(run.run.status);
    show(run, main);
    if (run.isLive) follow(run, () => run.update());
  }
  async function comparePage(ids, isLeft) {
    const runs = await Promise.all(ids.map(async id => new Run(await json(`api/runs/${id}`), { id })));
    if (isLeft()) return;
    document.title = `${runs.length} runs compared, Esper`;
    main.replaceChildren();
    side(runs);
    runs.filter(run => !ENDED.includes(run.run.status)).forEach(run => follow(run, () => run.compared.update()));
    const pair = async () => showPairs(runs, await json(`api/compare?runs=${ids.join(",")}`).catch(error => ({ pairs: [], notes: [error.message] })));
    runs.filter(run => run.isLive).forEach(run => { run.ended = pair; });
    await pair();
  }
  function showPairs(runs, { pairs, notes }) {
    runs[0].compared.paired.replaceChildren(...pairs.map(pairTable), ...notes.map(note => el("p", { class: "none" }, note)));
  }
  function side(runs) {
    main.append(el("header", {}, el("p", { class: "brand" }, embedded ? "Esper report" : el("a", { href: "#/" }, "Esper: all runs")), el("h1", {}, `${runs.length} runs compared`)));
    const compared = comparison(runs);
    compared.paired.append(el("p", { class: "none", role: "status" }, "Comparing world by world…"));
    runs.forEach(run => { run.compared = compared; });
    main.append(compared.node);
    compared.update();
    if (embedded) runs.forEach(run => main.append(el("details", { class: "run", on: { toggle: event => { if (event.target.open && !run.parts.length) show(run, event.target); } } }, el("summary", {}, run.name))));
  }
  let routes = 0;  // a page that was left while it was loading must not appear
  async function route() {
    const mine = ++routes, isLeft = () => mine !== routes;
    clear();
    const [, kind, ids] = location.hash.split("/");
    main.append(el("p", { class: "none", role: "status" }, "Reading the journal…"));
    try {
      if (kind === "run") await runPage(+ids, isLeft);
      else if (kind === "compare") await comparePage(ids.split(",").map(Number), isLeft);
      else await listPage(isLeft);
    } catch (error) {
      if (isLeft()) return;
      main.replaceChildren(el("section", { class: "trouble has-error", role: "alert" }, el("h2", {}, "This page could not be loaded"), el("p", {}, error.message), el("p", {}, el("a", { href: "#/" }, "All runs"))));
    }
  }
  if (embedded) {
    const data = JSON.parse(embedded.textContent), runs = data.runs.map(each => new Run(each.document, { details: each.details, explained: each.explained }));
    document.title = runs.length === 1 ? runs[0].name : `${runs.length} runs compared`;
    main.replaceChildren();
    if (runs.length === 1) show(runs[0], main);
    else { side(runs); showPairs(runs, data.comparison); }
  } else {
    addEventListener("hashchange", route);
    route();
  }
})();
