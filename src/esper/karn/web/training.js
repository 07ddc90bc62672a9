"use strict";
// Sections: curves of an episode, rounds, and updates of the policy.
(() => {
  const {
    isNumber, units, plural, el, section, Chart, balance, legend, X_NAMES, json, curve,
    measured,
  } = esper;

  const MOST_LINES = 8;

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
    const holder = el("div"), note = el("p", { class: "note" });
    const button = (by, name) => el("button", { type: "button", "aria-pressed": String(run.xBy === by), on: { click: event => {
      run.xBy = by;
      for (const other of event.target.parentNode.children) other.setAttribute("aria-pressed", String(other === event.target));
      list.forEach(chart => { if (chart.isZoomed) chart.unzoom(); });
      update();
    } } }, name);
    const toggle = el("div", { class: "toggle", role: "group", "aria-label": "Horizontal axis" }, button("step", "by epoch"), button("train_macs", "by training multiply-adds"));
    const grid = el("div", { class: "grid2" }, ...list.map(chart => chart.node));
    list[0].node.classList.add("wide", "always-wide");
    const node = section("Training", "", note, el("div", { class: "bar-row" }, toggle), holder, grid);
    let drawnSignature = "";
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
      if (signature !== drawnSignature) { drawnSignature = signature; 
        const isFolded = isMany && mean, rest = legend(isFolded ? items.slice(1) : items, list, shown.length < envs.length ? `the first ${shown.length} of ${envs.length} environments` : "", run.off);
        holder.replaceChildren(...(isFolded ? [legend(items.slice(0, 1), list, "", run.off), el("details", {}, el("summary", {}, "Single environments"), rest)] : [rest]));
      }
      note.textContent = [run.run.episodes > envs.length ? "The newest episode of every environment." : "", stride > 1 ? `Each point covers ${stride} epochs, by its minimum and maximum; zoom in for every epoch.` : "", "Drag over a chart to zoom, double-click to show all."].filter(Boolean).join(" ");
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
        chart.node.hidden = !series.some(s => s.y.some(isNumber) || (s.nonFinite || []).length) && name !== "quality";
        const hasDashes = series.some(s => s.dash === "dash");
        chart.set(series, { xName, xUnit, note: name === "quality" ? `On the validation split${hasDashes ? "; dashed: without the seeds not yet committed" : ""}.` + (series.some(s => s.y.some(isNumber)) ? "" : " Not measured.") : undefined });
      }
      balance(grid);
    }
    return { node, update };
  }

  function rounds(run) {
    const word = run.run.rounds > 1 ? "round" : "episode", [unit] = units(run.run), grid = el("div", { class: "grid2" });
    const list = [
      new Chart({ title: `Quality at the end of each ${word}`, unit, xName: word, height: 240, note: "Mean over environments; the band spans the worst and the best." }), new Chart({ title: "Utility at the end", xName: word, height: 170, note: "Quality over no growth, minus rent on parameters and multiply-adds." }),
      new Chart({ title: "Parameters at the end", unit: "count", xName: word, height: 170 }), new Chart({ title: `Seeds per ${word}`, xName: word, height: 170, zero: true, note: "Mean over environments." })];
    const keys = el("div"), node = section(`${word[0].toUpperCase()}${word.slice(1)} by ${word}`, "", keys, grid);
    list[0].node.classList.add("wide", "always-wide");
    grid.append(...list.map(chart => chart.node));
    keys.append(legend([{ key: "grown", name: "grown", colour: 0 }, { key: "baseline", name: "same worlds without growth", colour: 7, dash: "dash" }], [list[0]]));
    const seedKeys = [["germinated", "germinated", 5], ["fossilized", "committed", 2], ["pruned", "pruned", 7, "dash"]].map(([key, name, colour, dash]) => ({ key, name, colour, dash }));
    list[3].note.after(legend(seedKeys, [list[3]]));
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

  function ppo(run) {
    const kinds = [["return_mean", "Return", "number", 0, { note: "The sum of an episode's rewards: mean over the round's episodes. Band: ± 1 standard deviation." }], ["kl", "KL divergence of an update", "number", 1, { zero: true, marks: [[0.03, "too far"]] }],
      ["clip_fraction", "Share of actions clipped", "percent", 4, { zero: true }], ["explained_variance", "Explained variance of the critic", "number", 2, { zero: true, note: "1: all variance of returns; 0: no better than their mean." }],
      ["value_nrmse", "Error of the critic", "number", 3, { zero: true, note: "Over the spread of returns." }], ["grad_norm", "Gradient norm", "number", 6, { zero: true }]];
    const names = { return_mean: "mean return", kl: "KL", clip_fraction: "clip fraction", explained_variance: "explained variance", value_nrmse: "value NRMSE", grad_norm: "gradient norm" };
    const list = kinds.map(([name, title, unit, colour, options]) => { const chart = new Chart({ title, unit, xName: "round", height: 150, sync: "ppo", ...options }); return { name, chart, colour }; });
    const heads = new Chart({ title: "Entropy of each head", note: "Divided by its maximum: 1 is uniform, 0 is deterministic.", xName: "round", zero: true, height: 210, sync: "ppo" }), keys = el("div");
    const note = el("p", { class: "note" }), node = section("Policy updates", "", note, el("div", { class: "grid3" }, ...list.map(({ chart }) => chart.node)), keys, heads.node);
    let drawnSignature = "";
    function update() {
      const u = run.doc.updates;
      node.hidden = !u;
      if (!u) return;
      const c = u.columns, skipped = (c.skipped || []).reduce((a, b) => a + (b || 0), 0);
      note.textContent = `${plural(c.round.length * u.stride, "update")}${u.stride > 1 ? `, ${u.stride} per point` : ""}${skipped ? `; ${skipped} minibatches skipped because of non-finite numbers` : ""}.`;
      for (const { name, chart, colour } of list) {
        const y = c[name] || [], sd = name === "return_mean" && c.return_sd, nonFinite = (u.non_finite || []).filter(each => each[1] === name).map(each => each[0]);
        chart.set(y.length ? [{ name: names[name], key: name, colour, x: c.round, y, nonFinite, ...(sd ? { low: y.map((v, i) => isNumber(v) && isNumber(sd[i]) ? v - sd[i] : null), high: y.map((v, i) => isNumber(v) && isNumber(sd[i]) ? v + sd[i] : null) } : {}) }] : []);
      }
      const lines = Object.keys(c).filter(name => name.startsWith("entropy ")).map((name, i) => ({ name: name.slice(8), key: name, colour: i, x: c.round, y: c[name] }));
      heads.set(lines);
      heads.node.hidden = !lines.length;
      const signature = lines.map(line => line.key).join();
      if (signature !== drawnSignature) { drawnSignature = signature; keys.replaceChildren(legend(lines, [heads])); }
    }
    return { node, update };
  }

  Object.assign(esper, { curves, rounds, ppo });
})();
