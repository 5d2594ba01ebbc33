"use strict";
// The sections above and below the group browser.  Each is a function from the state to a section, or to null where a
// run has nothing to say: state = {runs, shown, smoothing, openStep(run, step)}.

const color = (run) => `var(--run-${run.index % 6})`;
const visible = (state) => state.runs.filter((run) => state.shown.has(run.index));

function section(id, title, note, ...content) {
  return el("section", { id, "aria-labelledby": `${id}-title` },
    el("header", {}, el("h2", { id: `${id}-title` }, title), note ? el("p", { class: "note" }, note) : null), ...content);
}

// Before and after ----------------------------------------------------------------------------------------------------

/** {before, after, low, high, of} of what a run is judged by: held-out if it was evaluated, else in training. */
function outcome(run) {
  const scores = run.evaluations;
  if (scores.length > 1) {
    const [first, last] = [scores[0], scores.at(-1)];
    return { before: first, after: last, steps: last.step - first.step, what: `Held-out ${run.headline}`, prompts: last.prompts };
  }
  const values = (run.curves[`reward/${run.headline}`] ?? []).filter((value) => value !== null);
  if (!values.length) return null;
  const few = Math.max(1, Math.floor(values.length / 10));
  const mean = (some) => ({ mean: some.reduce((a, b) => a + b, 0) / some.length });
  return { before: mean(values.slice(0, few)), after: mean(values.slice(-few)), steps: run.steps.length, what: `${run.headline} in training`, few };
}

function hero(state) {
  const [run] = visible(state), result = run && outcome(run);
  const said = (row) => [...new Set(visible(state).map((one) => one.about[row][1]))].join(" · "); // in which runs differ, all they say
  const about = el("dl", { class: "facts" }, run ? run.about.map(([name], row) => [el("dt", {}, name), el("dd", {}, said(row))]).flat() : []);
  const left = el("div", {}, el("h1", {}, state.runs.length > 1 ? `${plural(state.runs.length, "run")} compared` : run.name));
  if (!result) left.append(el("p", { class: "lead" }, "Nothing has been scored yet. The first numbers come with the first step."));
  else if (visible(state).length > 1) left.append(dumbbells(state));
  else left.append(
    el("p", { class: "kicker" }, result.what + (result.prompts ? ` · ${plural(result.prompts, "prompt")}` : "")),
    el("p", { class: "big" }, el("span", { class: "was" }, percent(result.before.mean)), el("span", { class: "arrow", "aria-label": "to" }, "→"), el("span", { class: "now" }, percent(result.after.mean))),
    dumbbells(state), el("p", { class: "lead" }, sentence(run, result)));
  return el("section", { id: "result", class: "hero", "aria-label": "Result" }, left, about);
}

function sentence(run, { before, after, steps, few }) {
  const apart = before.high !== undefined && (before.high < after.low || after.high < before.low);
  const change = 100 * (after.mean - before.mean);
  const verdict = Math.abs(change) < 0.05 ? "nothing changed" : `${Math.abs(change).toFixed(1)} points ${change > 0 ? "up" : "down"}`;
  const sure = before.high === undefined ? `, from the first to the last ${plural(few, "step")}` : apart ? ", well outside both 95% intervals" : ", but the 95% intervals overlap";
  const length = after.completion_length === undefined ? "" : ` Answers went from ${short(before.completion_length)} to ${short(after.completion_length)} tokens.`;
  return `After ${plural(steps, "step")} and ${plural(run.completions, "completion")}: ${verdict}${sure}.${length}`;
}

/** A row for each run: where it was, where it is, and how sure that is. */
function dumbbells(state) {
  const rows = visible(state).map((run) => [run, outcome(run)]).filter(([, result]) => result);
  const several = rows.length > 1, row = several ? 58 : 40, height = rows.length * row + 26;
  const all = rows.flatMap(([, { before, after }]) => [before.mean, after.mean, before.low, after.high]).filter((v) => v !== undefined && v !== null);
  const low = Math.min(0, ...all), high = Math.max(1, ...all);
  const label = rows.map(([run, { before, after }]) => `${run.name}: ${percent(before.mean)} before, ${percent(after.mean)} after`).join("; ");
  return responsive(height, label, (width) => {
    const x = (value) => 10 + ((value - low) / (high - low)) * (width - 24);
    const scale = ticks(low, high, 4).flatMap((value) => [
      svg("line", { class: "gridline", x1: x(value), x2: x(value), y1: 4, y2: height - 22 }),
      svg("text", { x: x(value), y: height - 6, "text-anchor": value === low ? "start" : value === high ? "end" : "middle" }, `${Math.round(100 * value)}%`)]);
    return [...scale, ...rows.flatMap(([run, { before, after }], i) => {
      const y = i * row + (several ? 38 : 20), whisker = (one) => (one.low === undefined ? [] : [svg("line", { x1: x(one.low), x2: x(one.high), y1: y, y2: y, stroke: color(run), "stroke-width": 8, opacity: .22, "stroke-linecap": "round" })]);
      return [
        several ? svg("text", { class: "strong", x: 10, y: y - 17 }, `${run.name}  ${percent(before.mean)} → ${percent(after.mean)}`) : "",
        ...whisker(before), ...whisker(after),
        svg("line", { class: "curve", x1: x(before.mean), x2: x(after.mean), y1: y, y2: y, stroke: color(run), "stroke-width": 2 }),
        svg("circle", { cx: x(before.mean), cy: y, r: 5.5, fill: "var(--paper)", stroke: color(run), "stroke-width": 2 }),
        svg("circle", { cx: x(after.mean), cy: y, r: 6.5, fill: color(run) }),
      ].filter(Boolean);
    })];
  });
}

// Curves --------------------------------------------------------------------------------------------------------------

const METRICS = [
  ["reward", "Reward", short, "Mean of all completions of a step."],
  ["reward_std", "Spread of the reward", short, "Standard deviation within a group, averaged: what there is to learn from."],
  ["frac_reward_zero_std", "Groups that teach nothing", percent, "Share of completions whose group has equal rewards."],
  ["completion_length", "Length", short, "Tokens of a completion, mean."],
  ["truncated", "Truncated", percent, "Share of completions that hit the length limit."],
  ["invalid", "Invalid", percent, "Share of completions without a trustworthy reward."],
  ["entropy", "Entropy", short, "Nats a sampled token; towards 0 the policy stops exploring."],
  ["grad_norm", "Gradient norm", short, "L2, before clipping."],
  ["loss", "Loss", short, "On-policy its value says little: its gradient does the work."],
  ["kl", "KL to the reference", short, "Nats a token, without its coefficient."],
  ["approx_kl", "KL of the update", short, "How far a step moved from the policy that it began with."],
  ["clip_ratio/high", "Clipped above", percent, "Share of tokens with a positive advantage."],
  ["clip_ratio/low", "Clipped below", percent, "Share of tokens with a negative advantage."],
  ["sampler_mismatch", "Sampler against learner", short, "Mean |log-prob difference| at the same weights, nats."],
  ["age", "Age of the policy", short, "Training steps since the weights that sampled."],
  ["learning_rate", "Learning rate", short, ""],
];
const ELSEWHERE = /^(step$|seconds|memory\/|tokens_per_second$|completion_tokens$)/;

function metricsOf(runs) {
  const [headline] = runs.map((run) => `reward/${run.headline}`);
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter((name) => !ELSEWHERE.test(name) && name !== headline);
  const known = new Map(METRICS.map((metric) => [metric[0], metric]));
  const order = (name) => { const i = METRICS.findIndex(([one]) => one === name); return name.startsWith("reward/") ? .5 : i < 0 ? 99 : i; };
  return names.sort((a, b) => order(a) - order(b))
    .map((name) => known.get(name) ?? [name, name.replace(/^reward\//, "Reward: "), short, name.startsWith("reward/") ? "Mean of one reward function, before its weight." : ""]);
}

const lineOf = (run, name) => ({ name: run.name, color: color(run), steps: run.curves.step, values: run.curves[name] });
const having = (runs, name) => runs.filter((run) => (run.curves[name] ?? []).some((value) => value !== null)).map((run) => lineOf(run, name));

function curves(state) {
  const runs = visible(state);
  if (!runs.some((run) => run.curves.step?.length)) return section("curves", "Curves", "", el("p", { class: "empty" }, "No step is done yet."));
  const cards = el("div", { class: "cards" }), constant = el("p", { class: "note small" });
  const draw = () => {
    const [varying, still] = curveCards(state, runs);
    cards.replaceChildren(...varying);
    constant.textContent = still.length ? `Never changed: ${still.join(", ")}.` : "";
  };
  const slider = el("input", { type: "range", min: 0, max: .95, step: .05, value: state.smoothing, oninput: (event) => { state.smoothing = Number(event.target.value); draw(); } });
  draw();
  return section("curves", "Curves", "", el("div", { class: "tools" }, el("label", {}, "Smoothing", slider), runLegend(state)), cards, constant);
}

/** A card for each metric that moves, and a phrase for each that does not. */
function curveCards(state, runs) {
  const [first] = runs, cards = [], constant = [];
  const pick = (step) => state.openStep(first, step);
  const headline = having(runs, `reward/${first.headline}`);
  const dots = runs.filter((run) => run.evaluations.length).map((run) => ({
    name: `${run.name}, held-out`, color: color(run), label: runs.length === 1, steps: run.evaluations.map((one) => one.step),
    values: run.evaluations.map((one) => one.mean), low: run.evaluations.map((one) => one.low), high: run.evaluations.map((one) => one.high) }));
  const about = `In training${dots.length ? "; rings are held-out prompts with 95% intervals" : ""}. Click a step to read its completions.`;
  if (headline.length) cards.push(lineChart({ title: first.headline, about, format: percent, lines: headline, dots, smoothing: state.smoothing, height: 260, broad: true, pick, range: unitRange(headline, dots) }));
  cards.push(...atK(runs));
  for (const [name, title, format, note] of metricsOf(runs)) {
    const lines = having(runs, name);
    const values = new Set(lines.flatMap((line) => line.values).filter((value) => value !== null));
    if (values.size === 1 && first.curves.step.length > 1) constant.push(`${title} ${format([...values][0])}`);
    else if (lines.length) cards.push(lineChart({ title, about: note, format, lines, smoothing: state.smoothing, pick }));
  }
  return [cards, constant];
}

const KINDS_OF_K = { pass: "Held-out prompts that one of so many samples solves.", maj: "Held-out prompts that most of so many samples solve." };

/** A card for pass@k and one for maj@k, of the largest k; evaluations of one sample have none. */
function atK(runs) {
  const kinds = {};
  for (const name of runs.flatMap((run) => Object.keys(run.held_out_curves))) {
    const [, kind, k] = name.match(/^eval\/(pass|maj)@(\d+)$/) ?? [];
    if (kind) kinds[kind] = Math.max(kinds[kind] ?? 0, Number(k));
  }
  return Object.entries(kinds).map(([kind, k]) => {
    const curve = (run) => run.held_out_curves[`eval/${kind}@${k}`];
    const lines = runs.filter(curve).map((run) => ({ name: run.name, color: color(run), steps: run.held_out_curves.step, values: curve(run) }));
    return lineChart({ title: `Held-out ${kind}@${k}`, about: KINDS_OF_K[kind], format: percent, lines, smoothing: 0 });
  });
}

function unitRange(lines, dots) {
  const all = [...lines, ...dots].flatMap((line) => [...line.values, ...(line.high ?? []), ...(line.low ?? [])]).filter((value) => value !== null);
  return Math.min(...all) >= 0 && Math.max(...all) <= 1 ? [0, 1] : pad(Math.min(...all), Math.max(...all));
}

function runLegend(state) {
  if (state.runs.length === 1) return null;
  return el("div", { class: "chips", role: "group", "aria-label": "Runs shown" }, state.runs.map((run) => el("button", {
    type: "button", class: "plain", "aria-pressed": String(state.shown.has(run.index)), onclick: () => state.toggle(run.index) },
    el("i", { class: "swatch", style: `background:${color(run)}` }), run.name)));
}

// Distributions -------------------------------------------------------------------------------------------------------

function spreads(state) {
  const charts = visible(state).flatMap((run) => {
    const of = state.runs.length > 1 ? ` · ${run.name}` : "";
    return [["completion_length", "Lengths", "tokens", "Each column is a part of the run; darker: more of its completions. The line is the mean."],
      ["reward", "Rewards", "reward", "The weighted sum of the reward functions, drawn the same way."]]
      .filter(([name]) => run.spread[name]).map(([name, title, unit, about]) => spreadChart({ title: title + of, about, spread: run.spread[name], format: short, unit }));
  });
  return charts.length ? section("spread", "Distributions", "", el("div", { class: "two" }, charts)) : null;
}

// Time and memory -----------------------------------------------------------------------------------------------------

const PHASES = { sample: "--run-0", credit: "--run-3", update: "--run-1", checkpoint: "--run-2", log: "--run-5" };

function resources(state) {
  const runs = visible(state).filter((run) => run.curves.step?.length);
  if (!runs.length) return null;
  const sum = (values) => (values ?? []).reduce((total, value) => total + (value ?? 0), 0);
  const bars = runs.map((run) => {
    const names = Object.keys(run.curves).filter((name) => name.startsWith("seconds/")).map((name) => name.slice(8));
    const stretch = run.steps.length / run.curves.step.length; // of a long run, a point is a mean of several steps
    const parts = names.map((name, i) => ({ name, value: stretch * sum(run.curves[`seconds/${name}`]), color: `var(${PHASES[name] ?? `--run-${i % 6}`})` })).sort((a, b) => b.value - a.value);
    return el("figure", { class: "broad" }, el("figcaption", {}, el("h3", {}, `Where the time went${runs.length > 1 ? ` · ${run.name}` : ""}`),
      el("span", { class: "value" }, `${seconds(sum(parts.map((part) => part.value)))} in all`)), shareBar(parts, "Time by phase", seconds));
  });
  const chart = (name, title, format, about) => { const lines = having(runs, name); return lines.length ? lineChart({ title, about, format, lines, smoothing: state.smoothing }) : null; };
  return section("resources", "Time and memory", "", el("div", { class: "cards" }, bars,
    chart("tokens_per_second", "Speed", (value) => `${short(value)} tok/s`, "Sampled tokens over the wall time of a whole step."),
    chart("seconds", "Time of a step", seconds, "Wall time, everything included."),
    chart("memory/gpu", "GPU memory", (value) => `${short(value)} GiB`, "The most allocated so far."),
    chart("memory/host", "Memory", (value) => `${short(value)} GiB`, "The most that the process has held so far.")));
}

// Diagnosis and tables: plain data from elsewhere ---------------------------------------------------------------------

/** findings: [{severity: error | warning | note, title, why, try, evidence}]. */
function diagnosis(state) {
  const found = visible(state).flatMap((run) => (run.findings ?? []).map((finding) => [run, finding]));
  if (!found.length) return null;
  return section("diagnosis", "Diagnosis", "", found.map(([run, finding]) => el("article", { class: `finding ${finding.severity}` },
    el("p", { class: "label" }, finding.severity + (state.runs.length > 1 ? ` · ${run.name}` : "")), el("h3", {}, finding.title),
    finding.why ? el("p", {}, finding.why) : null, finding.try ? el("p", {}, el("b", {}, "Try: "), finding.try) : null,
    finding.evidence ? el("p", { class: "note small" }, finding.evidence) : null)));
}

/** tables: [{title, note, columns, rows, numbers, shade}]; numbers are set to the right, and shade, from -1 to 1, is behind them. */
function tables(state) {
  const all = visible(state).flatMap((run) => (run.tables ?? []).map((table) => ({ ...table, title: table.title + (state.runs.length > 1 ? ` · ${run.name}` : "") })));
  return all.length ? section("tables", "What other algorithms would do", "", el("div", { class: "stack" }, all.map(oneTable))) : null;
}

function oneTable({ title, note, columns, rows, numbers = true, shade }) {
  const kind = (i) => (i && numbers ? "number" : "");
  const wash = (value) => (value ? `background:rgba(var(--${value > 0 ? "plus" : "minus"}), ${(0.3 * Math.min(1, Math.abs(value))).toFixed(3)})` : "");
  const cell = (value, i, row) => el(i ? "td" : "th", { ...(i ? {} : { scope: "row" }), class: kind(i), style: wash(shade?.[row][i]) }, typeof value === "number" ? short(value) : String(value ?? ""));
  return el("figure", {}, el("h3", {}, title),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title }, el("table", {},
      el("thead", {}, el("tr", {}, columns.map((name, i) => (name ? el("th", { scope: "col", class: kind(i) }, name) : el("td", {}))))),
      el("tbody", {}, rows.map((row, at) => el("tr", {}, row.map((value, i) => cell(value, i, at))))))),
    note ? el("p", { class: "note small" }, note) : null);
}

// Prompts -------------------------------------------------------------------------------------------------------------

const KINDS = { solved: ["Newly solved", "Held-out prompts that were wrong before training and are right after it."],
  unsolved: ["Still wrong", "Held-out prompts that are wrong before and after."], lost: ["Lost", "Held-out prompts that were right before training and are wrong after it."],
  hardest: ["Hardest in training", "Training prompts that did worst when they were last tried."] };

function prompts(state) {
  const [run] = visible(state);
  if (!run) return null;
  const lists = { ...Object.fromEntries(["solved", "unsolved", "lost"].map((kind) => [kind, run.held_out.filter((one) => one.kind === kind)])), hardest: run.hardest };
  const there = Object.keys(KINDS).filter((kind) => lists[kind].length);
  if (!there.length) return null;
  let chosen = there[0], all = false;
  const note = el("p", { class: "note" }), list = el("div", { class: "prompts" }), more = el("button", { type: "button", class: "plain", onclick: () => { all = true; show(); } });
  const total = (kind) => (kind === "hardest" ? lists.hardest.length : lists[kind][0].of);
  const chips = there.map((kind) => el("button", { type: "button", class: "plain", onclick: () => { chosen = kind; all = false; show(); } }, `${KINDS[kind][0]} ${count(total(kind))}`));
  const show = () => {
    chips.forEach((chip, i) => chip.setAttribute("aria-pressed", String(there[i] === chosen)));
    const items = lists[chosen], few = all ? items : items.slice(0, chosen === "hardest" ? 10 : 4);
    note.textContent = KINDS[chosen][1];
    list.replaceChildren(...(chosen === "hardest" ? [hardest(state, run, few)] : few.map(pair)));
    more.hidden = few.length === items.length;
    more.textContent = `Show ${items.length - few.length} more`;
  };
  show();
  return section("prompts", "Prompts", state.runs.length > 1 ? `Of ${run.name}.` : "", el("div", { class: "tools chips", role: "group", "aria-label": "Which prompts" }, chips), note,
    el("div", { style: "margin:.9rem 0" }, list), more);
}

function pair(item) {
  const side = (title, one) => el("div", {}, el("p", { class: `verdict ${one.score > 0.5 ? "good" : "bad"}` }, `${title}: ${one.score > 0.5 ? "right" : "wrong"}, ${plural(one.length, "token")}${one.truncated ? ", truncated" : ""}`), el("div", { class: "said" }, one.text));
  return el("article", { class: "prompt" }, el("h3", { class: "question" }, item.prompt), el("div", { class: "pair" }, side("Before", item.before), side("After", item.after)));
}

function hardest(state, run, items) {
  const open = (item) => el("button", { type: "button", class: "plain", disabled: !state.has(run, item.step, item.group), onclick: () => state.openStep(run, item.step, item.group) }, `step ${count(item.step)}`);
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["Prompt", "Mean", "Tries", "Last tried"].map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, items.map((item) => el("tr", {}, el("td", {}, item.prompt.slice(0, 240)), el("td", {}, el("span", { class: "meter", "aria-hidden": "true" }, el("i", { style: `width:${100 * Math.max(0, Math.min(1, item.mean))}%` })), ` ${percent(item.mean)}`), el("td", {}, count(item.tries)), el("td", {}, open(item)))))));
}

// The formula ---------------------------------------------------------------------------------------------------------

function formula(state) {
  return section("formula", "What was optimised", "", visible(state).map((run) => el("figure", { style: "margin-bottom:1rem" },
    el("h3", {}, run.about.find(([name]) => name === "Algorithm")[1] + (state.runs.length > 1 ? ` · ${run.name}` : "")),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Formula of ${run.name}` }, el("table", { class: "formula" }, el("tbody", {}, run.formula.map(([symbol, text]) => el("tr", {}, el("td", {}, symbol.replace(" ←", "")), el("td", {}, `${symbol.endsWith("←") ? "←" : "="} ${text}`)))))),
    el("p", { class: "note small" }, run.legend))));
}
