"use strict";
// Sections: environments with their slots, and the stages and worth of seeds.
(() => {
  const {
    STAGES, LETTERS, isNumber, text, plusMinus, units, inPoints, plural, el, section, table,
    beams, stageLegend, Chart, legend, stageAt,
  } = esper;

  const MOST_ENVS = 24;

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
    const note = el("p", { class: "note" }), node = section("Environments and their slots", "", note, stageLegend(), el("div", { class: "many-columns" }, holder), more);
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
      note.textContent = "Quality is measured on the validation split" + (has("test") ? ", test on data that had no part in any decision" : "") + (has("no_growth") ? `; over no growth: against the same world without growth${inPoints(run.run)}` : "")
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
  function seeds(run) {
    const [, points] = units(run.run), holder = el("div"), worthBars = el("div"), title = el("h3", { tabindex: -1 });
    const alpha = new Chart({ title: "Alpha: how much of each seed reaches the host", zero: true, height: 140, marks: [[1, "full strength"]], sync: "seeds" });
    const worth = new Chart({ title: "Worth: quality with the seed minus quality without it" + inPoints(run.run), unit: points, zero: true, height: 240, sync: "seeds",
      note: "Band: ± 1 standard error. Dotted: what a seed still in training would add. Dashed: of a committed seed, what the network would lose without it now." });
    const keys = el("div"), node = section("Stages and worth of seeds", "", title, holder, keys, alpha.node, worth.node, worthBars);
    let drawnSignature = "";
    async function chosen(isScrolled) {
      const detail = run.chosen && await run.detail(run.chosen.env), used = detail ? detail.slots.filter(slot => slot.stages.length || slot.worth) : [];
      node.hidden = !used.length;
      if (!used.length) return;
      title.textContent = `${detail.name}${run.run.episodes > run.run.envs ? `, ${run.doc.updates ? "round" : "episode"} ${detail.episode}` : ""}`;
      const ordered = [...detail.seeds].sort((a, b) => (b.slot === run.chosen.slot) - (a.slot === run.chosen.slot));
      holder.replaceChildren(...ordered.slice(0, 40).map(seed => seedLife(run, seed, seed.slot === run.chosen.slot)), ordered.length > 40 ? el("p", { class: "none" }, `${ordered.length - 40} more seeds are in the journal.`) : "");
      const colour = name => Math.max(0, run.run.slots.indexOf(name)), signature = used.map(slot => slot.slot).join("\n");
      if (signature !== drawnSignature) { drawnSignature = signature; keys.replaceChildren(legend(used.map(slot => ({ key: slot.slot, name: slot.slot, colour: colour(slot.slot) })), [alpha, worth])); }
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
        el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, "Shapley value of each seed" + inPoints(run.run)), el("p", { class: "note" }, "Its share of what all seeds contribute together, averaged over all orders of adding them, as last measured; ± 1 standard error.")),
          beams(last.map(row => ({ ...row, name: row.slot, small: when(row) })), points)),
        last.some(row => isNumber(row.interaction)) ? el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, "Interaction of each seed with the others" + inPoints(run.run)), el("p", { class: "note" }, "The sum of its pairwise interactions: above 0 it is worth more together with the other seeds, below 0 they do the same work.")),
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

  Object.assign(esper, { environments, seeds, seedLife });
})();
