"use strict";
// Section: the growing network at an epoch, and the stages of its slots over time.
(() => {
  const {
    STAGES, LETTERS, compact, isNumber, text, units, clipped, el, svg, section, stageLegend,
    tipped, redraws,
  } = esper;

  const MOST_OPTIONS = 200;

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
    const isNarrow = width / (n + 1) < 92, host = detail.host_params || 1, pitch = width / (n + 0.6), isWide = !isNarrow;
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
      const alpha = step ? alphaAt(slot, step) || 0 : 0, note = stage ? `${interval[1] || "seed"}, ${name === "cooling" ? "cooldown" : name}, alpha ${text(alpha)}${seed && stage < 6 ? `, ${text(seed.params, "count")} parameters` : ""}` : "empty";
      group.append(svg("title", {}, `${slot.slot}: ${note}`));
      group.setAttribute("aria-label", `slot ${slot.slot}: ${note}`);
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
        if (isWide || n <= 4) put("text", { x, y: top - 20 }, clipped(interval[1], pitch));
        if (isWide || n <= 4) put("text", { class: "label", x, y: top - 6 }, clipped(stage === 3 || stage === 4 ? `${name} α ${(+alpha).toFixed(2)}` : name, pitch));
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

  Object.assign(esper, { stageAt, network });
})();
