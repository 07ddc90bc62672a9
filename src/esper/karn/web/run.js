"use strict";
// One run: a document that patches extend, and the curves in it.
(() => {
  const { isNumber } = esper;

  const MOST_EVENTS = 200;
  const X_NAMES = { step: ["epoch", "number"], train_macs: ["training multiply-adds", "compact"] };

  async function json(path) {
    const response = await fetch(path, { headers: { accept: "application/json" } });
    if (!response.ok) throw new Error((await response.text()).slice(0, 300) || response.statusText);
    return response.json();
  }
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
    // the explained operations of an environment, or the importance of "features"; not kept on the live page, where decisions are recorded again
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
    const concatenate = (before, after) => {
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
    return { ...rows, at: 0, columns: concatenate(old.columns, rows.columns), low: rows.low ? concatenate(old.low, rows.low) : undefined };
  }
  // the points of one column: x by step or by training multiply-adds, with gaps where steps are missing
  function curve(rows, name, by) {
    const xs = rows.columns[by] || rows.columns.step, ys = rows.columns[name] || xs.map(() => null);
    const nonFinite = (rows.non_finite || []).filter(each => each[1] === name).map(each => each[0]);
    const points = { x: [], y: [], nonFinite: by === "step" ? nonFinite : [] };
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

  Object.assign(esper, { X_NAMES, json, Run, curve, measured });
})();
