"use strict";
// Puts the page together, and keeps it up to date while a run goes on.

const data = JSON.parse(document.getElementById("data").textContent);
const numbered = (runs) => runs.map((run, index) => ({ ...run, index }));
const POLL = 2000; // milliseconds

// Light and dark ------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = null;
const paint = () => { document.documentElement.dataset.theme = chosenTheme ?? (dark.matches ? "dark" : "light"); };
dark.addEventListener("change", paint);
document.getElementById("theme").addEventListener("click", () => {
  chosenTheme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  paint();
});
paint();

// The state -----------------------------------------------------------------------------------------------------------

const address = (path) => { // the token of the page's own address goes along
  const url = new URL(path, location.href);
  const token = new URLSearchParams(location.search).get("token");
  if (token) url.searchParams.set("token", token);
  return url;
};

const state = {
  runs: numbered(data.runs),
  shown: new Set(data.runs.map((_, index) => index)),
  smoothing: 0.6,
  toggle(index) {
    if (state.shown.has(index) && state.shown.size > 1) state.shown.delete(index);
    else state.shown.add(index);
    redraw();
  },
  stepsWithGroups: (run) => (data.live ? run.steps : Object.keys(data.groups[run.index].steps).map(Number).sort((a, b) => a - b)),
  has(run, step, group) {
    return data.live || (data.groups[run.index].steps[step] ?? []).some((one) => one.group === group);
  },
  async load(run, step) {
    const loaded = data.live ? await (await fetch(address(`step.json?run=${run.index}&step=${step}`))).json() : data.groups[run.index];
    return { pieces: loaded.pieces, groups: loaded.steps[step] };
  },
  openStep(run, step, group = null) {
    browser.run = run;
    browser.which.value = run.index;
    browser.open(step, group);
    document.getElementById("completions").scrollIntoView();
  },
};

// The sections --------------------------------------------------------------------------------------------------------

const SECTIONS = { result: hero, diagnosis, curves, spread: spreads, resources, completions: null, prompts, tables, formula };
const TITLES = { result: "Result", diagnosis: "Diagnosis", curves: "Curves", spread: "Distributions", resources: "Time", completions: "Completions", prompts: "Prompts", tables: "Compare", formula: "Formula" };
const main = document.getElementById("main");
const drawn = new Map();
const browser = new Browser(state);

/** Draw some sections anew; a control that has the focus keeps it. */
function redraw(names = Object.keys(SECTIONS)) {
  for (const name of names) {
    const old = drawn.get(name);
    const made = SECTIONS[name] ? SECTIONS[name](state) : old ?? browser.element();
    const fresh = made ?? el("div", { hidden: true });
    const controls = "input, button, svg, [tabindex]";
    const focused = old?.contains(document.activeElement) ? [...old.querySelectorAll(controls)].indexOf(document.activeElement) : -1;
    if (!old) main.append(fresh);
    else if (old !== fresh) old.replaceWith(fresh);
    drawn.set(name, fresh);
    if (focused >= 0 && old !== fresh) fresh.querySelectorAll(controls)[focused]?.focus({ preventScroll: true });
  }
  const there = Object.keys(SECTIONS).filter((name) => document.getElementById(name));
  document.getElementById("nav").replaceChildren(...there.map((name) => el("a", { href: `#${name}` }, TITLES[name])));
}

redraw();
browser.open(null);

// Live ----------------------------------------------------------------------------------------------------------------

const live = document.getElementById("live");
let tag = null;

function progress() {
  live.textContent = state.runs.map((run) => `step ${count(run.steps.at(-1) ?? 0)} of ${count(run.planned)}`).join(" · ");
}

async function poll() {
  try {
    const answer = await fetch(address("data.json"), { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag");
      const before = JSON.stringify(state.runs);
      state.runs = numbered((await answer.json()).runs);
      if (JSON.stringify(state.runs) !== before) {
        redraw(Object.keys(SECTIONS).filter((name) => name !== "completions"));
        state.runs.forEach((run) => browser.grown(run));
      }
    }
    live.classList.toggle("gone", !answer.ok && answer.status !== 304);
    progress();
  } catch {
    live.classList.add("gone");
    live.textContent = "not served any more";
  }
  setTimeout(poll, POLL);
}

if (data.live) {
  live.hidden = false;
  progress();
  poll();
}
