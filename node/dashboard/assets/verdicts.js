// What validators said of each submission, and why: every number beside its limit.

import { card, choice, clock, compact, fill, h, moment, number, outcome, peer, shortId, sized, table } from "/assets/dom.js";
import { ask } from "/assets/ask.js";

const KINDS = [["all", "all"], ["rejected", "rejected"], ["undecided", "undecided"], ["accepted", "accepted"], ["pending", "pending"]];
const PAGE = 50;

export class Verdicts {
  constructor(root, dialog) {
    this.dialog = dialog;
    this.kind = "all";
    this.shown = PAGE;
    this.words = h("input", { type: "search", placeholder: "peer id, submission or reason", "aria-label": "Search submissions", oninput: () => this.again() });
    this.choices = h("div");
    this.list = h("div");
    root.append(card("Verdicts", "the newest submissions, and those not accepted for longer", h("div", { class: "tools" }, this.choices, this.words), this.list));
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  }

  again() {
    this.seen = null;
    this.update(this.state);
  }

  update(state) {
    this.state = state;
    if (!state?.node || this.seen === state.submissions) return;
    this.seen = state.submissions;
    fill(this.choices, choice("Outcome", KINDS, this.kind, (kind) => { this.kind = kind; this.shown = PAGE; this.again(); }));
    const found = matching(state.submissions, this.kind, this.words.value);
    const rest = found.length - this.shown;
    fill(
      this.list, rowsTable(found.slice(0, this.shown), state, (id) => this.detail(id)),
      rest > 0 ? h("button", { type: "button", class: "more", "data-key": "more", onclick: () => { this.shown += PAGE; this.again(); } }, `show ${Math.min(PAGE, rest)} more of ${rest}`) : null,
    );
  }

  async detail(id) {
    fill(this.dialog, h("p", {}, "Asking the node…"));
    this.dialog.showModal();
    const [found, problem] = await ask(`/api/submissions/${id}`);
    fill(this.dialog, h("form", { method: "dialog", class: "close" }, h("button", { "aria-label": "Close" }, "✕")), problem ? h("p", { class: "notice" }, problem) : described(found));
  }
}

export function matching(submissions, kind, words) {
  const text = words.trim().toLowerCase();
  return submissions.filter((one) => (kind === "all" || one.state === kind) && (!text || `${one.id} ${one.contributor} ${one.reason}`.toLowerCase().includes(text)));
}

function rowsTable(rows, state, open) {
  const columns = [
    ["time", (one) => h("time", { title: moment(one.at_ms), datetime: new Date(one.at_ms).toISOString() }, clock(one.at_ms))],
    ["step", (one) => number(one.step), "number"],
    ["outcome", (one) => [outcome(one.state), one.hard ? h("span", { class: "tag bad" }, "hard") : null]],
    ["contributor", (one) => peer(one.contributor, { you: state.node.peer_id })],
    ["reward", (one) => number(one.reward), "number"],
    ["checks", (one) => (one.drawn === null ? "–" : one.drawn ? "in full" : "cheap ones")],
    ["reason", (one) => h("span", { class: "why" }, one.reason || "–")],
    ["more", (one) => h("button", { type: "button", "data-key": `open-${one.id}`, "aria-label": `details of submission ${one.id.slice(0, 8)}`, onclick: () => open(one.id) }, "open")],
  ];
  const empty = state.run?.run_id ? "No submission is like that." : "The run's ledger is still on its way.";
  return table(columns, rows, { empty, caption: "Submissions and verdicts" });
}

function described(one) {
  const facts = [
    ["Contributor", peer(one.contributor)],
    ["Work", `step ${one.step}, number ${one.index}, with the policy of step ${one.checkpoint_step}`],
    ["Handed in", moment(one.at_ms)],
    ["Holds", `${number(one.rollouts)} rollouts, ${compact(one.tokens)} output tokens`],
    ["Made by", `${one.engine}, ${one.dtype}, ${one.software}`],
    ["Trained", one.used_in === null ? "not used in a batch" : `in step ${one.used_in}`],
    ["Submission", h("span", { class: "mono wrap" }, one.id)],
  ];
  return [
    h("h2", { id: "detail-title" }, `Submission ${shortId(one.id)} `, outcome(one.state)),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    h("p", {}, h("a", { href: `#rollouts/${one.id}`, onclick: (event) => event.target.closest("dialog").close() }, "read its rollouts")),
    one.verdicts.length ? one.verdicts.map(verdict) : h("p", { class: "none" }, "No validator has judged it yet."),
  ];
}

function verdict(one) {
  return h(
    "section", { class: "verdict" },
    h("h3", {}, outcome(one.outcome), one.hard ? h("span", { class: "tag bad" }, "hard") : null, h("small", {}, " by ", peer(one.validator), ` · ${moment(one.issued_at_ms)}`)),
    one.reason ? h("p", { class: "why" }, one.reason) : null,
    h("p", { class: "soft small" }, `${one.draw.drawn ? "Drawn" : "Not drawn"} for the costly checks, at a rate of ${number(one.draw.rate)}: ${one.draw.why}`, one.draw.beacon_sequence ? ` · beacon: head ${one.draw.beacon_sequence}` : ""),
    h("div", { class: "checks" }, [...one.checks].sort((a, b) => (b.outcome === "fail") - (a.outcome === "fail")).map(check)),
  );
}

function check(one) {
  const names = Object.keys(one.numbers).sort((a, b) => (a in one.limits ? 0 : 1) - (b in one.limits ? 0 : 1));
  return h(
    "div", { class: `check ${one.outcome}` },
    h("div", { class: "check-head" }, h("b", {}, one.name), outcome(one.outcome)),
    one.detail ? h("p", { class: "small why" }, one.detail) : null,
    names.map((name) => measure(name, one.numbers[name], one.limits[name])),
  );
}

/** A number and how much of its limit it takes. */
function measure(name, value, limit) {
  const bounded = limit !== undefined;
  const part = bounded ? (limit > 0 ? Math.min(1, Math.max(0, value / limit)) : value > limit ? 1 : 0) : 0;
  return h(
    "div", { class: "measure" },
    h("span", { class: "name" }, name.replaceAll("_", " ")),
    bounded ? h("span", { class: "bar", "aria-hidden": "true" }, sized(h("i", { class: value > limit ? "over" : "in" }), { width: `${100 * part}%` })) : h("span"),
    h("span", { class: "number" }, number(value, 4), bounded ? h("span", { class: "soft" }, ` ≤ ${number(limit, 4)}`) : null),
  );
}
