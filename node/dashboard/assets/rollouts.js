// Reading what contributors' policies wrote: prompts, answers and rewards. All of it is shown as plain text.

import { card, choice, compact, fill, h, number, outcome, shortId } from "/assets/dom.js";
import { ask } from "/assets/ask.js";

const COUNT = 32;
const LISTED = 60;
const ORDERS = [["reward", "best first"], ["worst", "worst first"], ["member", "as handed in"]];

export class Rollouts {
  constructor(root) {
    this.order = "reward";
    this.list = h("div", { class: "files", "data-scroll": "files" });
    this.reader = h("div", { class: "reader" });
    root.append(h("div", { class: "split" }, card("Submissions", "newest first", this.list), this.reader));
    this.say("Choose a submission to read its rollouts. The file comes from a relay and is opened in a process of its own.");
  }

  open(id) {
    if (/^[0-9a-f]{64}$/.test(id) && id !== this.id) this.read(id, 0);
  }

  update({ node, submissions, run }) {
    if (!node || (this.seen === submissions && this.marked === this.id)) return;
    [this.seen, this.marked] = [submissions, this.id];
    const rows = submissions.filter((one) => one.state !== "pending").slice(0, LISTED);
    const empty = run?.run_id ? "Nothing has been handed in yet." : "The run's ledger is still on its way.";
    fill(this.list, rows.length ? rows.map((one) => this.file(one)) : h("p", { class: "none" }, empty));
  }

  file(one) {
    return h(
      "a", { class: "file", href: `#rollouts/${one.id}`, "aria-current": one.id === this.id ? "true" : null, "data-key": one.id },
      h("span", { class: "line-up" }, h("b", {}, `step ${one.step}`), one.state === "accepted" ? h("span", { class: "number" }, number(one.reward)) : outcome(one.state)),
      h("span", { class: "soft small line-up" }, h("span", {}, shortId(one.contributor)), h("span", {}, `${compact(one.tokens)} tokens`)),
    );
  }

  say(text, style = "none") {
    fill(this.reader, h("div", { class: "card", role: "status" }, h("p", { class: style }, text)));
  }

  async read(id, first) {
    [this.id, this.first] = [id, first];
    this.say("Reading…");
    const [found, problem] = await ask(`/api/submissions/${id}/rollouts?first=${first}&count=${COUNT}`);
    if (id !== this.id || first !== this.first) return; // another one was chosen meanwhile
    this.found = found;
    if (problem) this.say(problem, "notice");
    else this.show();
    this.update({ node: true, submissions: this.seen ?? [], run: {} });
  }

  show() {
    const { groups, total, first, decoded } = this.found;
    const last = Math.min(total, first + COUNT);
    fill(
      this.reader,
      h("div", { class: "tools" },
        choice("Order", ORDERS, this.order, (order) => { this.order = order; this.show(); }),
        h("span", { class: "soft" }, `rollouts ${first + 1} to ${last} of ${total}`),
        first > 0 ? h("button", { type: "button", onclick: () => this.read(this.id, Math.max(0, first - COUNT)) }, "earlier") : null,
        last < total ? h("button", { type: "button", onclick: () => this.read(this.id, first + COUNT) }, "later") : null,
      ),
      decoded ? null : h("p", { class: "notice" }, "This node holds no policy and so no tokenizer: token ids are shown instead of text."),
      groups.map((group) => this.group(group)),
    );
  }

  group(group) {
    const rewards = group.answers.map((one) => one.reward).filter((one) => one !== null);
    const mean = rewards.length ? rewards.reduce((sum, one) => sum + one, 0) / rewards.length : null;
    return h(
      "article", { class: "card group" },
      h("h3", { class: "line-up" }, `Prompt ${group.prompt_index + 1}`, h("small", {}, `${group.answers.length} answers, mean reward ${number(mean)}`)),
      passage(group.prompt, "prompt"),
      h("ol", { class: "answers" }, sorted(group.answers, this.order).map((one) => answer(one))),
    );
  }
}

function sorted(answers, order) {
  const value = (one) => one.reward ?? -Infinity;
  const by = { reward: (a, b) => value(b) - value(a), worst: (a, b) => value(a) - value(b), member: (a, b) => a.member - b.member };
  return [...answers].sort(by[order]);
}

function answer(one) {
  const style = one.reward === null ? "warn" : one.reward >= 0.999 ? "good" : one.reward <= 0.001 ? "bad" : "soft";
  return h(
    "li", { class: isLong(one.text) ? "answer long" : "answer" },
    h("div", { class: "answer-head" },
      h("span", { class: `chip ${style}` }, one.reward === null ? "no reward" : `reward ${number(one.reward)}`),
      h("span", { class: "soft small" }, `member ${one.member} · ${one.tokens} tokens · ended by ${one.finish_reason === "stop" ? "a stop token" : "its length"}${one.turns > 1 ? ` · ${one.turns} turns` : ""}`),
    ),
    passage(one, "text"),
  );
}

const isLong = (text) => text.length > 240 || text.split("\n").length > 6;
const isFoldable = (text) => text.length > 900 || text.split("\n").length > 14;

/** A text of a stranger, folded where it is long. */
function passage({ text, cut }, style) {
  const body = h("pre", { class: style, tabindex: "0" }, text || "(empty)");
  if (!isFoldable(text)) return cut ? [body, h("p", { class: "soft small" }, "cut here")] : body;
  body.classList.add("folded");
  const button = h("button", { type: "button", class: "more", "aria-expanded": "false", onclick: () => {
    const folded = body.classList.toggle("folded");
    button.textContent = folded ? "show all" : "show less";
    button.setAttribute("aria-expanded", String(!folded));
  } }, "show all");
  return [body, button, cut ? h("span", { class: "soft small" }, " cut after 20 000 characters") : null];
}
