"use strict";
// The group browser: a step, a prompt of it, and the completions of that prompt side by side, token by token.

const FILTERS = {
  all: ["All", () => true],
  right: ["Right", (one, run) => isRight(one, run)],
  wrong: ["Wrong", (one, run) => one.valid && !isRight(one, run)],
  truncated: ["Truncated", (one) => one.finish === "length"],
  invalid: ["Invalid", (one) => !one.valid],
};
const isRight = (one, run) => one.valid && (one.rewards[0] ?? 0) > run.right;
const NAT = 1000; // log-probs come in thousandths

/** How a token is coloured: its value, the strength in [-1, 1] that it is drawn with, and what the ends of the scale say. */
const COLORS = {
  advantage: { title: "Advantage", ends: ["pushed down", "pushed up"], there: () => true,
    value: (one, i) => one.advantages?.[i] ?? one.advantage ?? 0, strength: (value, most) => Math.sign(value) * Math.sqrt(Math.abs(value) / most) },
  logprob: { title: "Log-prob", ends: ["expected", "surprising"], there: () => true,
    value: (one, i) => one.logprobs[i] / NAT, strength: (value) => Math.max(-1, value / 4) },
  change: { title: "Log-prob change", ends: ["less likely now", "more likely now"], there: (one) => one.change,
    value: (one, i) => one.change[i] / NAT, strength: (value, most) => value / most },
  drift: { title: "Against the reference", ends: ["less likely", "more likely"], there: (one) => one.drift,
    value: (one, i) => one.drift[i] / NAT, strength: (value, most) => value / most },
  entropy: { title: "Entropy", ends: ["certain", "undecided"], there: (one) => one.entropies,
    value: (one, i) => one.entropies[i] / NAT, strength: (value) => -Math.min(1, value / 2) },
};

/** The texts of a completion's tokens. */
const textsOf = (one, pieces) => one.tokens.map((token) => pieces[token]);

class Browser {
  constructor(state) {
    Object.assign(this, { state, run: state.runs[0], step: null, group: 0, chosen: false, filter: "all", color: "change", term: "", many: 24 });
    this.range = el("input", { type: "range", min: 0, step: 1, "aria-label": "Step", oninput: () => this.open(this.steps()[Number(this.range.value)]) });
    this.where = el("output", { class: "mono" });
    this.back = el("button", { type: "button", class: "plain", "aria-label": "Previous step", onclick: () => this.move(-1) }, "←");
    this.forth = el("button", { type: "button", class: "plain", "aria-label": "Next step", onclick: () => this.move(1) }, "→");
    this.which = el("select", { "aria-label": "Run", onchange: () => { this.run = state.runs[Number(this.which.value)]; this.open(null); } }, state.runs.map((run) => el("option", { value: run.index }, run.name)));
    this.list = el("ul", { class: "groups", role: "listbox", tabindex: 0, "aria-label": "Prompts of this step", onkeydown: (event) => this.key(event) });
    this.answers = el("div", { class: "answers" });
    this.asked = el("div");
    this.filters = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, el("button", { type: "button", class: "plain", onclick: () => { this.filter = name; this.show(); } })]));
    this.search = el("input", { type: "search", placeholder: "Search", "aria-label": "Search prompts and completions; Enter goes to the next match in another step", oninput: () => { this.term = this.search.value.toLowerCase(); this.show(); }, onkeydown: (event) => { if (event.key === "Enter") this.findNext(); } });
    this.colors = el("select", { onchange: () => { this.color = this.colors.value; this.show(); } });
    this.scale = el("span", { class: "scale" });
    this.more = el("button", { type: "button", class: "plain", style: "margin-top:.9rem", onclick: () => { this.many += 48; this.show(); } });
  }

  element() {
    return section("completions", "Completions", "One prompt, and every answer that its group gave. In the list, ↑ and ↓ change the prompt, ← and → the step.",
      el("div", { class: "stepper" }, this.state.runs.length > 1 ? this.which : null, this.back, this.range, this.forth, this.where),
      el("div", { class: "tools" }, el("div", { class: "chips", role: "group", "aria-label": "Filter completions" }, Object.values(this.filters)),
        this.search, el("label", {}, "Colour", this.colors), this.scale),
      el("div", { class: "browser" }, this.list, el("div", {}, this.asked, this.answers, this.more)));
  }

  steps() { return this.state.stepsWithGroups(this.run); }

  /** Load a step (by default the last) and show it, or the nearest that the page has. */
  async open(step, group = null) {
    const steps = this.steps();
    if (!steps.length) { this.answers.replaceChildren(el("p", { class: "empty" }, "No completion has been written yet.")); this.list.hidden = true; return; }
    const target = step ?? steps.at(-1);
    this.step = steps.reduce((best, one) => (Math.abs(one - target) < Math.abs(best - target) ? one : best), steps[0]);
    const asked = this.step, loaded = await this.state.load(this.run, asked);
    if (asked !== this.step) return; // another step was asked for meanwhile
    Object.assign(this, { pieces: loaded.pieces, groups: loaded.groups, many: 24 });
    const place = this.groups.findIndex((one) => one.group === group);
    this.group = place >= 0 ? place : this.chosen ? Math.min(this.group, this.groups.length - 1) : this.mostMixed();
    this.list.hidden = false;
    this.show();
    this.list.scrollTop = Math.max(0, (this.list.querySelector("[aria-selected=true]")?.offsetTop ?? 0) - 80);
  }

  /** The group whose completions disagree most: it has the most to show. */
  mostMixed() {
    const followed = this.groups.findIndex(({ completions }) => completions.every((one) => one.change));
    if (followed >= 0) return followed; // its log-probs after the update are known
    const mixed = this.groups.map(({ completions }) => {
      const right = completions.filter((one) => isRight(one, this.run)).length;
      return Math.min(right, completions.length - right);
    });
    return mixed.indexOf(Math.max(...mixed));
  }

  /** What has changed when a live run has gone on; a reader at the last step follows it. */
  grown(run) {
    if (run.index !== this.run.index) return;
    const atEnd = this.step === null || Number(this.range.value) === Number(this.range.max);
    this.run = run;
    if (atEnd && !this.list.contains(document.activeElement)) this.open(null);
    else this.place();
  }

  move(by) {
    const steps = this.steps();
    const next = steps[steps.indexOf(this.step) + by];
    if (next !== undefined) return this.open(next);
    return undefined;
  }

  key(event) {
    const across = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const shown = this.shownGroups(), at = shown.indexOf(this.group);
    const down = { ArrowUp: at - 1, ArrowDown: at + 1, Home: 0, End: shown.length - 1 }[event.key];
    if (across) this.move(across);
    else if (down !== undefined) this.choose(shown[Math.max(0, Math.min(shown.length - 1, down))]);
    else return;
    event.preventDefault();
  }

  choose(group) {
    if (group === undefined) return;
    Object.assign(this, { group, chosen: true, many: 24 });
    this.show();
    this.list.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" });
  }

  text(one) { return textsOf(one, this.pieces).join(""); }

  matches(group) {
    return !this.term || group.prompt.toLowerCase().includes(this.term) || group.completions.some((one) => this.text(one).toLowerCase().includes(this.term));
  }

  keeps(one, group) {
    const wanted = FILTERS[this.filter][1](one, this.run);
    return wanted && (!this.term || group.prompt.toLowerCase().includes(this.term) || this.text(one).toLowerCase().includes(this.term));
  }

  shownGroups() {
    return this.groups.map((_, i) => i).filter((i) => this.groups[i].completions.some((one) => this.keeps(one, this.groups[i])));
  }

  /** The next step that has a match of the search, from here on and around. */
  async findNext() {
    const steps = this.steps(), here = steps.indexOf(this.step);
    for (let i = 1; this.term && i <= steps.length; i += 1) {
      const step = steps[(here + i) % steps.length];
      const { pieces, groups } = await this.state.load(this.run, step);
      this.pieces = pieces;
      if (groups.some((group) => this.matches(group))) { await this.open(step); return; }
    }
  }

  place() {
    const steps = this.steps();
    this.range.max = steps.length - 1;
    this.range.value = steps.indexOf(this.step);
    this.range.setAttribute("aria-valuetext", `step ${this.step}`);
    this.where.textContent = `step ${count(this.step)} of ${count(this.run.steps.at(-1))}`;
    this.back.disabled = this.step === steps[0];
    this.forth.disabled = this.step === steps.at(-1);
  }

  show() {
    if (!this.groups) return;
    this.place();
    const shown = this.shownGroups();
    if (shown.length && !shown.includes(this.group)) [this.group] = shown;
    const everyone = this.groups.flatMap((group) => group.completions);
    for (const [name, [title, keeps]] of Object.entries(FILTERS)) {
      this.filters[name].textContent = `${title} ${count(everyone.filter((one) => keeps(one, this.run)).length)}`;
      this.filters[name].setAttribute("aria-pressed", String(name === this.filter));
    }
    const here = this.groups[this.group].completions;
    const usable = Object.entries(COLORS).filter(([, { there }]) => here.every(there)).map(([name]) => name);
    // What the update did says most, where it is known; elsewhere the advantage says what it wanted to do.
    this.tint = usable.includes(this.color) ? this.color : usable[0];
    this.colors.replaceChildren(...usable.map((name) => el("option", { value: name, selected: name === this.tint }, COLORS[name].title)));
    this.list.replaceChildren(...shown.map((i) => this.option(i)));
    this.list.setAttribute("aria-activedescendant", shown.length ? `group-${this.group}` : "");
    this.showGroup(shown.length ? this.groups[this.group] : null);
  }

  option(i) {
    const group = this.groups[i], right = group.completions.filter((one) => isRight(one, this.run)).length;
    return el("li", { id: `group-${i}`, role: "option", "aria-selected": String(i === this.group), onclick: () => { this.list.focus({ preventScroll: true }); this.choose(i); } },
      el("span", { class: "ask" }, question(group.prompt)),
      el("span", { class: "unseen" }, `, ${right} of ${group.completions.length} right`),
      el("span", { class: "dots", "aria-hidden": "true" }, group.completions.slice(0, 64).map((one) => el("i", { class: one.valid ? (isRight(one, this.run) ? "right" : "") : "invalid" }))));
  }

  showGroup(group) {
    if (!group) {
      this.asked.replaceChildren();
      this.more.hidden = true;
      this.answers.replaceChildren(el("p", { class: "empty" }, "No completion of this step is like that. Try another filter, or press Enter in the search for another step."));
      return;
    }
    this.asked.replaceChildren(el("details", { class: "asked" }, el("summary", {}, question(group.prompt)), el("div", { class: "said" }, group.prompt)));
    const kept = group.completions.filter((one) => this.keeps(one, group));
    const { value } = COLORS[this.tint];
    const most = group.completions.reduce((best, one) => one.tokens.reduce((most, _, i) => Math.max(most, Math.abs(value(one, i))), best), 1e-9);
    this.answers.replaceChildren(...kept.slice(0, this.many).map((one) => this.answer(one, most)));
    this.more.hidden = kept.length <= this.many;
    this.more.textContent = `Show ${kept.length - this.many} more`;
    const [low, high] = COLORS[this.tint].ends, ends = this.tint === "logprob" || this.tint === "entropy" ? ["transparent", "rgb(var(--minus))"] : ["rgb(var(--minus))", "transparent", "rgb(var(--plus))"];
    this.scale.replaceChildren(low, el("i", { style: `background:linear-gradient(90deg,${ends.join(",")});opacity:.55`, "aria-hidden": "true" }), high);
  }

  answer(one, most) {
    const right = isRight(one, this.run), verdict = !one.valid ? "invalid" : right ? "right" : "wrong";
    const { value, strength } = COLORS[this.tint];
    const texts = textsOf(one, this.pieces);
    const said = el("div", { class: "said", onpointermove: (event) => this.tell(event, one, texts), onpointerleave: tip.hide });
    const cut = one.left_out ? one.tokens.length / 2 : -1;
    texts.forEach((text, i) => {
      if (i === cut) said.append(el("i", {}, ` … ${plural(one.left_out, "token")} left out … `));
      const force = Math.max(-1, Math.min(1, strength(value(one, i), most)));
      const told = one.sampled && !one.sampled[i];
      const wash = told || Math.abs(force) < .02 ? null : `background:rgba(var(--${force > 0 ? "plus" : "minus"}), ${(Math.abs(force) * .4).toFixed(3)})`;
      said.append(el("span", { class: told ? "token told" : "token", "data-i": i, style: wash }, ...marked(text, this.term)));
    });
    const parts = this.run.rewards.length > 1 ? el("p", { class: "parts" }, this.run.rewards.map((name, i) => `${name} ${short(one.rewards[i])}`).join(" · ")) : null;
    return el("article", { class: "answer", "aria-label": `Completion, ${verdict}, reward ${short(one.reward)}` },
      el("header", {}, el("span", { class: `verdict ${right ? "good" : "bad"}` }, verdict), el("b", {}, `reward ${short(one.reward)}`),
        el("span", { class: "push" }, `advantage ${signed(one.advantage)}`), el("span", { class: "push" }, `${plural(one.length, "token")}${one.finish === "length" ? ", truncated" : ""}`)),
      said, one.problem ? el("p", { class: "parts bad" }, one.problem) : null, parts);
  }

  tell(event, one, texts) {
    const i = event.target.dataset?.i;
    if (i === undefined) { tip.hide(); return; }
    const logprob = one.logprobs[i] / NAT;
    const lines = [JSON.stringify(texts[i])];
    if (one.sampled && !one.sampled[i]) lines.push("not sampled: said by the environment");
    else lines.push(`probability ${percent(Math.exp(logprob))}, log-prob ${minus(logprob.toFixed(3))}`, `advantage ${signed(COLORS.advantage.value(one, i))}`);
    if (one.entropies) lines.push(`entropy ${(one.entropies[i] / NAT).toFixed(2)} nats`);
    if (one.change) lines.push(`${signed(one.change[i] / NAT)} nats by this step's update`);
    if (one.drift) lines.push(`${signed(one.drift[i] / NAT)} nats from the reference`);
    tip.show(lines.join("\n"), event.clientX, event.clientY);
  }
}

/** A text with what is searched for marked. */
function marked(text, term) {
  const place = term ? text.toLowerCase().indexOf(term) : -1;
  return place < 0 ? [text] : [text.slice(0, place), el("mark", {}, text.slice(place, place + term.length)), text.slice(place + term.length)];
}

/** What a prompt asks: its last part between the marks of a chat template, as in completions.py. */
function question(prompt) {
  const parts = prompt.split(/(?:<[|｜][^|｜<>]*[|｜]>|<(?:start|end)_of_turn>|\[\/?INST\])(?:(?:system|user|assistant|model)\n)?/).map((part) => part.trim());
  return parts.filter((part) => part && !["<think>", "system", "user", "assistant", "model"].includes(part)).at(-1) ?? prompt.trim();
}
