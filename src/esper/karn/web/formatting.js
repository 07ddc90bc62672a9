"use strict";
// Texts of numbers, units and stages. Numbers: null is not measured; a text names a value that is not finite.
// Every script adds its names to this object, and takes those of the scripts before it. index.html has their order.
const esper = {};
(() => {
  const STAGES = ["dormant", "germinated", "training", "blending", "holding", "fossilized", "cooling", "cooling", "cooling"];
  const LETTERS = ["·", "G", "T", "B", "H", "F", "×", "×", "×"];
  const STAGE_TEXT = {
    germinated: "attached, not trained yet", training: "learns without effect on the host", blending: "alpha moves towards its target",
    holding: "alpha is 1, waits to be committed or pruned", fossilized: "permanent part of the host", cooling: "cooldown after a prune",
  };
  const ENDED = ["finished", "failed", "interrupted", "killed"];
  const PILLS = { finished: "good", running: "", failed: "bad", killed: "bad", interrupted: "warn" };

  const minus = text => text.replace(/-/g, "\u2212");
  const trim = v => v === 0 ? "0" : Math.abs(v) >= 1e4 || Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  function compact(v) {
    for (const [size, letter] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(v) >= size) return +(v / size).toPrecision(3) + letter;
    return String(+v.toPrecision(3));
  }
  function duration(s) {
    if (s === 0) return "0 s";
    if (s < 1e-3) return Math.round(1e6 * s) + " µs";
    if (s < 1) return (s < 0.01 ? +(1000 * s).toPrecision(2) : Math.round(1000 * s)) + " ms";
    if (s < 60) return s.toFixed(1) + " s";
    const minutes = Math.floor(Math.round(s) / 60), rest = Math.round(s) % 60;
    return minutes < 60 ? `${minutes} min ${String(rest).padStart(2, "0")} s` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  }
  const UNITS = {
    percent: v => (100 * v).toFixed(1) + " %", points: v => (v < 0 ? "" : "+") + (100 * v).toFixed(1), number: trim,
    count: v => Math.round(v).toLocaleString("en").replace(/,/g, "\u2009"), compact, seconds: duration, signed: v => (v < 0 ? "" : "+") + v.toFixed(4),
  };
  const isNumber = v => typeof v === "number" && Number.isFinite(v);
  const text = (v, unit = "number") => v === null || v === undefined ? "not measured" : typeof v === "string" ? v : minus((UNITS[unit] || trim)(v));
  const plusMinus = (se, unit) => isNumber(se) ? " ± " + text(se, unit).replace("+", "") : "";
  const units = run => run.is_percent ? ["percent", "points"] : ["number", "number"];
  const inPoints = run => run.is_percent ? ", in points" : "";
  const plural = (n, word) => `${text(n, "count")} ${word}${n === 1 ? "" : "s"}`;
  function when(stamp) {
    if (typeof stamp !== "string") return null;
    return stamp[10] === "T" ? stamp.slice(0, 16).replace("T", " ") + (/(Z|\+00:00)$/.test(stamp) ? " UTC" : "") : stamp;
  }
  const clipped = (name, width) => { const most = Math.max(3, Math.floor(width / 6.6)); return name && name.length > most ? name.slice(0, most - 1) + "…" : name || ""; };

  Object.assign(esper, {
    STAGES, LETTERS, STAGE_TEXT, ENDED, PILLS, minus, trim, compact, duration, isNumber, text,
    plusMinus, units, inPoints, plural, when, clipped,
  });
})();
