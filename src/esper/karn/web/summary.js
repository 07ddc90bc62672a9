"use strict";
// Sections on the whole run: header, problems, main numbers, phases, held-out comparison, events, settings.
(() => {
  const {
    ENDED, PILLS, duration, isNumber, text, units, inPoints, plural, when, embedded, el,
    section, table, tipped,
  } = esper;

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
        run.removal ? el("p", { class: "removed", role: "alert" }, `This page is not updated any more: ${run.removal}`) : null,
        r.command ? el("p", { class: "soft command" }, el("code", {}, r.command)) : null,
        el("dl", { class: "facts" }, ...Object.entries(facts).filter(([, v]) => v !== null && v !== undefined && v !== "").map(([k, v]) => el("div", {}, el("dt", {}, k), el("dd", {}, v))))].filter(Boolean));
    };
    return { node, update };
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

  function phases(run) {
    const holder = el("div"), node = section("Time per phase", "", holder);
    function update() {
      const list = run.doc.phases;
      node.hidden = !list.length;
      const bars = [["wall", "wall_ms"], ["CPU", "cpu_ms"]].flatMap(([name, field]) => {
        const whole = list.reduce((sum, p) => sum + p[field], 0) || 1;
        return [el("div", { class: "note" }, `${name} time, ${duration(whole / 1000)} in phases`), el("div", { class: "share" }, ...list.map((p, i) => tipped(el("span", { class: "c" + i % 8, role: "img", style: { width: 100 * p[field] / whole + "%" } }, p[field] > 0.08 * whole ? el("em", {}, p.phase) : ""),
          [p.phase, `${text(p[field] / whole, "percent")} of ${name} time, ${duration(p[field] / 1000)}`])))];
      });
      const wall = list.reduce((sum, p) => sum + p.wall_ms, 0) || 1;
      holder.replaceChildren(...bars, table(["phase", "wall", "share", "CPU", "calls", "per call"], list.map((p, i) => [el("span", {}, el("i", { class: `key c${i % 8}` }), p.phase), duration(p.wall_ms / 1000), text(p.wall_ms / wall, "percent"), duration(p.cpu_ms / 1000), text(p.calls, "count"), p.calls ? duration(p.wall_ms / p.calls / 1000) : "not measured"]), "Phases", [1, 2, 3, 4, 5]));
    }
    return { node, update };
  }

  function heldOut(run) {
    const h = run.doc.held_out;
    const node = h ? section("Held-out comparison", h.note || "", h.damage ? el("p", { class: "none" }, h.damage) : table(h.heads, h.rows.map(row => row.map(value => Array.isArray(value) ? el("b", {}, value[0]) : value === null ? "not measured" : value)), "Held-out comparison", h.heads.map((_, i) => i).slice(1))) : el("div");
    return { node, update: () => {} };
  }

  function events(run) {
    const list = el("ol", { class: "log", tabindex: 0, "aria-label": "Events, newest first" }), field = el("input", { type: "search", placeholder: "Filter events", "aria-label": "Filter events", on: { input: () => { run.query = field.value.toLowerCase(); update(); } } });
    const note = el("p", { class: "note" }), node = section("Events", "", note, el("div", { class: "bar-row" }, field), list);
    function update() {
      const all = run.doc.events, shown = all.filter(e => !run.query || `${e.env || "run"} ${e.kind} ${e.text}`.toLowerCase().includes(run.query));
      node.hidden = !all.length;
      note.textContent = `The newest ${all.length} moves between stages, decisions, results and messages, of ${text(run.run.events, "count")} events in the journal.`;
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

  Object.assign(esper, { header, health, tiles, phases, heldOut, events, settings });
})();
