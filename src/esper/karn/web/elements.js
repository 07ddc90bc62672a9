"use strict";
// Elements of the page: HTML and SVG nodes, sections, tables, bars, and the tip under the pointer.
// Names from a run are only ever set as text.
(() => {
  const { STAGES, LETTERS, STAGE_TEXT, isNumber, text, plusMinus } = esper;

  const main = document.getElementById("main"), tip = document.getElementById("tip");
  const embedded = document.getElementById("data");

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
  function section(title, note, ...children) {
    return el("section", { "aria-label": title }, el("h2", {}, title), note ? el("p", { class: "note" }, note) : null, ...children);
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
  function beams(rows, unit, most = 0) {  // horizontal bars with standard errors: {name, small, y, se, colour}; the scale reaches to `most` at least
    const ends = rows.flatMap(({ y, se }) => isNumber(y) ? [y - (se || 0), y + (se || 0)] : []), low = Math.min(0, ...ends), span = Math.max(most, ...ends) - low || 1, at = y => 100 * (y - low) / span;
    return el("div", { class: "bars" }, ...rows.flatMap(({ name, small, y, se, colour, label }) => {
      const beam = el("div", { class: `beam c${colour % 8}` }, el("s", { style: { left: at(0) + "%" } }));
      if (isNumber(y)) beam.append(el("i", { style: { left: at(Math.min(y, 0)) + "%", width: Math.abs(at(y) - at(0)) + "%" } }));
      if (isNumber(y) && isNumber(se)) beam.append(el("u", { style: { left: at(y - se) + "%", width: at(y + se) - at(y - se) + "%" } }));
      return [el("div", { class: "name" }, name + " ", small ? el("small", {}, small) : null), beam, el("div", { class: "num" }, label || text(y, unit) + plusMinus(se, unit))];
    }));
  }
  function stageLegend() {
    return el("div", { class: "stages" }, ...Object.entries(STAGE_TEXT).map(([name, note]) =>
      el("span", { title: note }, el("i", { class: name, "aria-hidden": "true" }, LETTERS[STAGES.indexOf(name)]), name === "cooling" ? "cooldown" : name)));
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

  Object.assign(esper, {
    main, embedded, tip, el, svg, section, table, beams, stageLegend, place, hideTip, tipped,
  });
})();
