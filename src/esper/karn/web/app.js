"use strict";
// Pages: the list of runs, one run, several runs. In a report the data is in the file; on the live page it is fetched.
(() => {
  const {
    ENDED, PILLS, text, plural, when, main, embedded, el, section, table, destroyCharts, json, Run,
    header, health, tiles, phases, heldOut, events, settings, network, curves, rounds, ppo,
    environments, seeds, decisions, why, comparison, pairTable,
  } = esper;

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
      if (stream.readyState === EventSource.CLOSED) json(`api/runs/${run.id}`).catch(error => { run.isLive = run.isCut = false; run.removal = error.message; changed(); });
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
    destroyCharts(main);
    main.replaceChildren();
  }
  async function listPage(isLeft) {
    const chosen = new Set(), title = el("h1"), place = el("code"), holder = el("div");
    const go = el("button", { type: "button", class: "small-button", disabled: true, on: { click: () => { location.hash = `#/compare/${[...chosen].join(",")}`; } } }, "Compare the chosen runs");
    const field = el("input", { type: "search", placeholder: "Filter runs", "aria-label": "Filter runs by name, task, controller or status", on: { input: () => draw() } });
    const box = run => el("input", { type: "checkbox", checked: chosen.has(run.id), "data-run": run.id, "aria-label": `Choose ${run.name}`, on: { change: event => { if (event.target.checked) chosen.add(run.id); else chosen.delete(run.id); go.disabled = chosen.size < 2; } } });
    let listing = await json("api/runs"), drawn = "";
    if (isLeft()) return;
    const bar = el("div", { class: "bar-row" }, field, go), note = el("p", { class: "note" }, "Newest first. Open one, or choose several to compare."), node = section("Runs", "", note, bar, holder);
    function draw() {
      const query = field.value.toLowerCase(), runs = listing.runs.filter(run => [run.name, run.task, run.controller, run.status].join(" ").toLowerCase().includes(query)), signature = JSON.stringify([query, listing]);
      if (signature === drawn) return;
      drawn = signature;
      title.textContent = plural(listing.runs.length, "run");
      place.textContent = listing.directory;
      bar.hidden = note.hidden = !listing.runs.length;
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
      listing = await json("api/runs").catch(() => listing);
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
    const current = ++routes, isLeft = () => current !== routes;
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
