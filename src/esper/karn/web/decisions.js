"use strict";
// Sections: what was decided, and why the policy decided so.
(() => {
  const {
    minus, trim, isNumber, text, units, inPoints, el, section, table, beams, Chart, seedLife,
  } = esper;

  function decisions(run) {
    const entropy = new Chart({ title: "Entropy of the operation", note: "Divided by its maximum: 1 is uniform, 0 is deterministic. Mean of the decisions; the band spans all of them.", zero: true, height: 180 });
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
        el("p", { class: "note after" }, `${name}${round}, before epoch ${d.step}: ${operation(d)}. Probability of the whole action ${text(d.probability, "percent")}; expected return ${text(d.value, "signed")}.${explained.all > explained.rows.length ? ` The first ${explained.rows.length} of ${explained.all} operations are explained.` : ""}`),
        el("div", { class: "grid2" },
          el("div", { class: "reason" }, el("div", {}, el("h3", {}, "Alternatives"), el("p", { class: "note" }, "Probability of every legal choice: slots given the operation, the others given both. The chosen one is coloured.")),
            ...heads.map(([head, chances]) => el("div", {}, el("h4", {}, head.replace("_", " ")), beams(Object.entries(chances).map(([option, p]) => ({ name: option, y: p, colour: option === taken[head] ? 0 : 7, label: text(p, "percent") })), "percent", 1)))),
          el("div", { class: "reason" }, el("div", {}, el("h3", {}, "What moved it"), el("p", { class: "note" }, "Log-probability of the action minus that with the feature at its mean over all recorded steps. Above 0, the value made the action more likely. Effects do not add up.")),
            beams(d.influences.map(each => ({ name: each.name, small: `${each.slot ? each.slot + ", " : ""}${minus(`${trim(each.value)} against ${trim(each.neutral)}`)}`, y: each.effect, colour: each.effect < 0 ? 1 : 2, label: minus((each.effect < 0 ? "" : "+") + each.effect.toFixed(2)) })), "number"))),
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
      el("p", { class: "note" }, `How much decisions change when the values of a feature are permuted among ${text(explained.decisions, "count")} recorded decisions: mean Kullback–Leibler divergence, in nats. Near 0, the feature is not used.`),
      table(["feature", "of", "lowest", "highest", "standard deviation", "importance"], rows.map(each => [each.name, each.scope, ...[each.low, each.high, each.sd, each.nats].map(v => text(v))]), "Importance of features", [2, 3, 4, 5]),
      constant.length ? el("p", { class: "none" }, `Constant in these decisions: ${constant.join(", ")}.`) : "")];
  }

  Object.assign(esper, { decisions, why });
})();
