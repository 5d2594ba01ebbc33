"use strict";
// Elements, numbers for people, and the three kinds of picture: lines over steps, distributions, shares.

const SVG = "http://www.w3.org/2000/svg";

/** An element; `on...` attributes are listeners, and children are elements or texts, never HTML. */
function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  return dress(element, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return dress(document.createElementNS(SVG, name), attributes, children);
}

function dress(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Numbers -------------------------------------------------------------------------------------------------------------

function short(value) {
  if (value === null || value === undefined) return "none";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6) return `${trim((value / 1e6).toPrecision(3))}M`;
  if (size >= 1e4) return minus(`${trim((value / 1e3).toPrecision(3))}k`);
  if (size >= 1e3) return minus(Math.round(value).toLocaleString("en-US"));
  if (size < 1e-3) return minus(value.toExponential(1));
  return minus(trim(value.toPrecision(3)));
}

const trim = (text) => (text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text);
const minus = (text) => text.replace(/^-/, "−");
const percent = (value) => (value === null || value === undefined ? "none" : `${(100 * value).toFixed(1)}%`);
const seconds = (value) => (value >= 100 ? `${short(value / 60)} min` : `${short(value)} s`);
const signed = (value) => (value === null ? "none" : (value > 0 ? "+" : "") + minus(value.toFixed(2)));
const count = (value) => value.toLocaleString("en-US");
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Round places for gridlines: at most about `wanted` of them between low and high. */
function ticks(low, high, wanted) {
  const raw = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(i * step + 0);
  return found;
}

/** Exponential moving average that forgets its beginning fairly; gaps stay gaps. */
function smooth(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + value;
    mass = weight * mass + 1;
    return sum / mass;
  });
}

// The tooltip ---------------------------------------------------------------------------------------------------------

const tip = {
  show(text, x, y) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
    box.style.top = `${y + height + 24 > innerHeight ? y - height - 12 : y + 16}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

// A frame with axes ---------------------------------------------------------------------------------------------------

/** Scales and an SVG with axes: x are steps, y values. `draw` is called again whenever the width changes. */
function responsive(height, label, draw) {
  const picture = svg("svg", { role: "img", "aria-label": label, tabindex: 0, height });
  let drawn = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width && width !== drawn) {
      drawn = width;
      picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
      picture.replaceChildren(...draw(width));
    }
  }).observe(picture);
  return picture;
}

function frame(width, height, steps, [low, high], format) {
  const said = ticks(low, high, height > 200 ? 5 : 4).map((value) => [value, format(value)]);
  const texts = said.every(([, text]) => text.endsWith(".0%")) ? said.map(([value, text]) => [value, text.replace(".0%", "%")]) : said;
  const left = 12 + 6.6 * Math.max(...texts.map(([, text]) => text.length), 2);
  const box = { left, right: width - 10, top: height > 200 ? 24 : 12, bottom: height - 24 };
  const [first, last] = steps;
  const x = (step) => box.left + ((step - first) / (last - first || 1)) * (box.right - box.left);
  const y = (value) => box.bottom - ((value - low) / (high - low || 1)) * (box.bottom - box.top);
  const marks = ticks(first, last, Math.max(2, Math.min(8, width / 90))).filter(Number.isInteger);
  const lines = [
    ...texts.map(([value]) => svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y(value), y2: y(value) })),
    ...texts.map(([value, text]) => svg("text", { x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, text)),
    ...marks.map((step) => svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, count(step))),
  ];
  return { box, x, y, lines };
}

const path = (points) => {
  let pen = "M";
  return points.map(([x, y]) => {
    if (y === null) { pen = "M"; return ""; }
    const piece = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = "L";
    return piece;
  }).join("");
};

// Lines over steps ----------------------------------------------------------------------------------------------------

const crosshairs = new Set(); // every line chart follows the pointer over any of them

/**
 * A card with curves.  lines: [{name, color, steps, values}]; dots: [{name, color, steps, values, low, high}].
 * `pick(step)` is called when a step is chosen by a click or by Enter.
 */
function lineChart({ title, about, format, lines, dots = [], smoothing, height = 176, broad = false, range = null, pick }) {
  const said = [...lines, ...dots].flatMap((line) => line.values).filter((value) => value !== null);
  const allSteps = [...lines, ...dots].flatMap((line) => line.steps);
  const extent = [Math.min(...allSteps), Math.max(...allSteps)];
  const shown = lines.map((line) => ({ ...line, soft: smooth(line.values, smoothing) }));
  const value = el("span", { class: "value" });
  const latest = () => shown.map((line) => format(line.values.findLast((v) => v !== null) ?? null)).join(" · ");
  value.textContent = latest();
  const summary = shown.map((line) =>
    `${line.name} from ${format(line.values.find((v) => v !== null) ?? null)} to ${format(line.values.findLast((v) => v !== null) ?? null)}`);
  const whole = range ?? pad(Math.min(...said), Math.max(...said));
  let place = null, cross = null, at = null;
  const draw = (width) => {
    place = frame(width, height, extent, whole, format);
    cross = svg("g", { visibility: "hidden" });
    return [
      ...place.lines,
      ...shown.flatMap((line) => [
        ...(smoothing > 0 ? [svg("path", { d: path(line.values.map((v, i) => [place.x(line.steps[i]), v === null ? null : place.y(v)])), fill: "none", stroke: line.color, "stroke-width": 1, opacity: .28 })] : []),
        svg("path", { class: "curve", d: path(line.soft.map((v, i) => [place.x(line.steps[i]), v === null ? null : place.y(v)])), fill: "none", stroke: line.color, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round" }),
      ]),
      ...dots.flatMap((line) => dotsOf(line, place, format, width)),
      cross,
    ];
  };
  const label = `${title}: ${summary.join("; ")}`;
  const picture = responsive(height, label, draw);
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const values = (step) => shown.map((line) => ({ ...line, value: line.values[line.steps.indexOf(step)] ?? null }))
    .filter((line) => line.steps.includes(step));
  const follow = (step) => {
    at = step;
    if (!place) return;
    cross.setAttribute("visibility", step === null ? "hidden" : "visible");
    value.textContent = step === null ? latest() : values(step).map((line) => format(line.value)).join(" · ");
    if (step === null) return;
    cross.replaceChildren(
      svg("line", { class: "cross", x1: place.x(step), x2: place.x(step), y1: place.box.top, y2: place.box.bottom }),
      ...values(step).filter((line) => line.value !== null)
        .map((line) => svg("circle", { cx: place.x(step), cy: place.y(line.value), r: 4, fill: line.color })));
  };
  crosshairs.add({ picture, follow });
  const everyone = (step) => crosshairs.forEach((one) => (one.picture.isConnected ? one.follow(step) : crosshairs.delete(one)));
  const text = (step) => [`step ${count(step)}`, ...values(step).map((line) => `${line.name}: ${format(line.value)}`),
    ...dots.filter((line) => line.steps.includes(step)).map((line) => `${line.name}: ${format(line.values[line.steps.indexOf(step)])}`)].join("\n");
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const target = extent[0] + ((event.clientX - box.left - place.box.left) / (place.box.right - place.box.left)) * (extent[1] - extent[0]);
    return steps.reduce((best, step) => (Math.abs(step - target) < Math.abs(best - target) ? step : best), steps[0]);
  };
  dress(picture, {
    onpointermove: (event) => { const step = nearest(event); everyone(step); tip.show(text(step), event.clientX, event.clientY); },
    onpointerleave: () => { everyone(null); tip.hide(); },
    onclick: (event) => pick?.(nearest(event)),
    onblur: () => { everyone(null); tip.hide(); },
    onkeydown: (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter" && at !== null) pick?.(at);
      if (!move) return;
      event.preventDefault();
      const next = at === null ? (move > 0 ? 0 : steps.length - 1) : steps.indexOf(at) + move;
      const step = steps[Math.max(0, Math.min(steps.length - 1, next))];
      everyone(step);
      const box = picture.getBoundingClientRect();
      tip.show(text(step), box.left + place.x(step), box.top);
      document.getElementById("said").textContent = text(step);
    },
  }, []);
  return el("figure", { class: broad ? "broad" : "" }, el("figcaption", {}, el("h3", {}, title), value),
    el("p", { class: "about" }, about), picture);
}

function dotsOf(line, place, format, width) {
  return line.values.flatMap((value, i) => {
    if (value === null) return [];
    const x = place.x(line.steps[i]), y = place.y(value);
    const whisker = line.low ? [svg("line", { x1: x, x2: x, y1: place.y(line.low[i]), y2: place.y(line.high[i]), stroke: line.color, "stroke-width": 1.5 })] : [];
    const ends = i === 0 || i === line.values.length - 1;
    const right = x > width - 60;
    const label = ends && line.label ? [svg("text", { class: "strong", x: x + (right ? -9 : 9), y: y - 8, "text-anchor": right ? "end" : "start" }, format(value))] : [];
    return [...whisker, svg("circle", { class: "dot", cx: x, cy: y, r: 4.5, fill: "var(--card)", stroke: line.color, "stroke-width": 2 }), ...label];
  });
}

function pad(low, high) {
  if (low === high) return [low - (Math.abs(low) || 1) * 0.5, high + (Math.abs(high) || 1) * 0.5];
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}

// Distributions -------------------------------------------------------------------------------------------------------

/** Steps across, values up, darker where more completions are; the line is the mean. */
function spreadChart({ title, about, spread, format, unit }) {
  const { edges, steps, counts, means } = spread;
  const height = 230, bins = edges.length - 1;
  const totals = counts.map((column) => column.reduce((a, b) => a + b, 0) || 1);
  const most = Math.max(...counts.flatMap((column, i) => column.map((n) => n / totals[i])));
  let place = null;
  const picture = responsive(height, `${title}: mean from ${format(means[0])} to ${format(means.at(-1))}`, (width) => {
    place = frame(width, height, [0, 1], [edges[0], edges[bins]], format);
    const column = (place.box.right - place.box.left) / steps.length;
    const cells = counts.flatMap((bars, i) => bars.map((n, bin) => n && svg("rect", {
      x: (place.box.left + i * column).toFixed(2), width: (column + .4).toFixed(2), y: place.y(edges[bin + 1]).toFixed(2),
      height: Math.max(place.y(edges[bin]) - place.y(edges[bin + 1]) - .6, 1).toFixed(2),
      fill: `rgba(var(--dark-area), ${(0.06 + 0.94 * (n / totals[i] / most) ** 0.6).toFixed(3)})`,
    })).filter(Boolean));
    const mean = path(means.map((value, i) => [place.box.left + (i + .5) * column, value === null ? null : place.y(value)]));
    const marks = [...new Set([0, Math.floor((steps.length - 1) / 2), steps.length - 1])];
    return [
      ...place.lines.slice(0, -2).filter((line) => line.getAttribute("y") !== String(height - 6)), ...cells,
      svg("path", { d: mean, fill: "none", stroke: "var(--card)", "stroke-width": 4 }),
      svg("path", { class: "curve", d: mean, fill: "none", stroke: "var(--ink)", "stroke-width": 1.75 }),
      ...marks.map((i) => svg("text", { x: place.box.left + (i + .5) * column, y: height - 6, "text-anchor": i === 0 ? "start" : i === steps.length - 1 ? "end" : "middle" }, count(steps[i][0]))),
    ];
  });
  const tell = (event) => {
    const box = picture.getBoundingClientRect();
    const across = (event.clientX - box.left - place.box.left) / (place.box.right - place.box.left);
    const up = (place.box.bottom - (event.clientY - box.top)) / (place.box.bottom - place.box.top);
    const i = Math.floor(across * steps.length), bin = Math.floor(up * bins);
    if (!counts[i] || counts[i][bin] === undefined) { tip.hide(); return; }
    const [from, to] = steps[i];
    tip.show(`step ${count(from)}${to > from ? ` to ${count(to)}` : ""}, mean ${format(means[i])}\n${format(edges[bin])} to ${format(edges[bin + 1])} ${unit}: ${percent(counts[i][bin] / totals[i])}`, event.clientX, event.clientY);
  };
  dress(picture, { onpointermove: tell, onpointerleave: tip.hide }, []);
  return el("figure", {}, el("figcaption", {}, el("h3", {}, title), el("span", { class: "value" }, `mean ${format(means.at(-1))}`)),
    el("p", { class: "about" }, about), picture);
}

// Shares --------------------------------------------------------------------------------------------------------------

/** One bar cut into parts: [{name, value, color}]. */
function shareBar(parts, label, format) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const picture = responsive(34, `${label}: ${parts.map((part) => `${part.name} ${percent(part.value / whole)}`).join(", ")}`, (width) => {
    let x = 0;
    return parts.map((part) => {
      const wide = (part.value / whole) * width;
      const rect = svg("rect", { x, y: 4, width: Math.max(wide - 1.5, .5), height: 26, rx: 4, fill: part.color,
        onpointermove: (event) => tip.show(`${part.name}\n${format(part.value)}, ${percent(part.value / whole)}`, event.clientX, event.clientY), onpointerleave: tip.hide });
      x += wide;
      return rect;
    });
  });
  return el("div", {}, picture, el("div", { class: "legend" }, parts.map((part) => el("span", {},
    el("i", { class: "swatch", style: `background:${part.color}` }), `${part.name} ${percent(part.value / whole)} (${format(part.value)})`))));
}
