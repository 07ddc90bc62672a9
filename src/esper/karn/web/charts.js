"use strict";
// Charts of curves: drawing, zooming, values under the pointer, and the legends that switch curves.
(() => {
  const {
    minus, trim, compact, duration, isNumber, text, plusMinus, plural, tip, el, place, hideTip,
  } = esper;

  const charts = new Set();
  const inView = new IntersectionObserver(entries => {
    for (const entry of entries) if (entry.isIntersecting) entry.target.chart.mount();
  }, { rootMargin: "200px" });
  const resized = new ResizeObserver(entries => { for (const entry of entries) entry.target.chart.resize(); });
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  class Chart {
    // A series: {name, key, colour, dash, stairs, x, y, low, high}. `low` and `high` are a band around it.
    constructor({ title, note = "", unit = "number", xName = "epoch", xUnit = "number", height = 220, zero = false, marks = [], sync = null, zoomed = null }) {
      Object.assign(this, { title, unit, xName, xUnit, height, zero, marks, sync, zoomed, series: [], hidden: new Set(), plot: null, isZoomed: false });
      this.note = el("p", { class: "note" }, note);
      this.area = el("div", { class: "plot", tabindex: 0, role: "img", style: { minHeight: height + "px" }, on: { keydown: e => this.key(e), blur: hideTip } });
      this.area.chart = this;
      this.reset = el("button", { type: "button", class: "reset", hidden: true, on: { click: () => this.unzoom() } }, "show all");
      this.node = el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, title), this.note), this.area);
      charts.add(this);
      inView.observe(this.area);
      resized.observe(this.area);
    }
    set(series, { note, xName, xUnit } = {}) {
      this.series = series;
      if (note !== undefined) this.note.textContent = note;
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
      const margin = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
      return [low === 0 ? 0 : low - margin, high + margin];
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
      for (const s of this.shown()) for (const x of s.nonFinite || []) {
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
        const isNonFinite = (s.own.nonFinite || []).includes(x);
        rows.push(el("div", {}, el("i", { class: "c" + s.own.colour % 8 }), el("span", { class: "n" }, s.own.name), el("span", { class: "v" }, isNonFinite ? "not finite" : text(y, this.unit) + band)));
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
  function destroyCharts(node) {  // charts below a node that is replaced
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

  Object.assign(esper, { Chart, balance, redraws, destroyCharts, legend });
})();
