"use strict";
// Section: several runs side by side, and their paired comparison.
(() => {
  const {
    PILLS, isNumber, text, plural, el, section, table, Chart, legend, X_NAMES, curve,
  } = esper;

  function comparison(runs) {
    const isPercent = runs.every(run => run.run.is_percent), unit = isPercent ? "percent" : "number", points = isPercent ? "points" : "number";
    const kinds = [["quality", "Quality after each epoch", unit, 320], ["val_loss", "Validation loss", "number", 220], ["params", "Parameters of the network", "count", 220]];
    const list = kinds.map(([name, title, of, height]) => { const chart = new Chart({ title, unit: of, height, sync: "compare", note: name === "quality" ? "Mean over a run's environments without its baselines, newest episodes; the band spans the worst and the best." : "" }); chart.name = name; return chart; });
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
    return el("div", {}, el("h3", {}, `${pair.other} against ${pair.first}`), el("p", { class: "note" }, `${pair.scope === "held_out" ? "Held-out worlds" : "Last finished episode in each world"}, ${plural(pair.worlds.length, "world")} in common. Difference: second − first, mean over worlds, in brackets its bootstrap 95 % interval; bold where it excludes 0.`),
      table(["", pair.first, pair.other, "difference [95 %]", "worlds +/=/−"], rows, `${pair.other} against ${pair.first}`, [1, 2, 3, 4]),
      el("details", {}, el("summary", {}, "What they decided differently"), el("div", { class: "grid2" }, counts("Seeds in the final networks", pair.structures), choices ? counts("Operations", choices.operations) : null, choices ? counts("Germinated", choices.blueprints) : null),
        differing.length ? el("p", { class: "note" }, `Decisions differ in ${choices.differing_worlds} of ${plural(pair.worlds.length, "world")}; the first different one${differing.length < choices.differing_worlds ? `, in the first ${differing.length} of them` : ""}:`) : null,
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

  Object.assign(esper, { comparison, pairTable });
})();
