// Standing and credits of everybody who handed something in, from the ledger's replay.

import { card, compact, fill, h, number, outcome, peer, sized, table } from "/assets/dom.js";

export class Contributors {
  constructor(root) {
    this.root = root;
  }

  update({ node, run, contributors }) {
    if (!node || (this.seen === contributors && this.run === run)) return;
    [this.seen, this.run] = [contributors, run];
    const most = Math.max(1, ...contributors.map((one) => one.credits));
    const columns = [
      ["", (_, at) => h("span", { class: "rank" }, at + 1), "number"],
      ["contributor", (one) => peer(one.peer_id, { you: node.peer_id })],
      ["standing", (one) => [outcome(one.standing), one.reason ? h("div", { class: "soft small why" }, one.reason) : null]],
      ["credits", (one) => h("div", { class: "bar-line" }, h("span", { class: "bar" }, sized(h("i", { class: "in" }), { width: `${(100 * one.credits) / most}%` })), h("span", { class: "number", title: number(one.credits) }, compact(one.credits)))],
      ["maturing", (one) => number(one.maturing), "number"],
      ["forfeited", (one) => number(one.forfeited), "number"],
      ["accepted", (one) => number(one.accepted), "number"],
      ["rejected", (one) => number(count(one.rejected)), "number"],
      ["by check", (one) => reasons(one.rejected)],
    ];
    const note = run?.run_id ? `from ${number(run.ledger_length)} ledger entries` : "";
    const empty = run?.run_id ? "Nobody has handed anything in yet." : "The run's ledger is still on its way.";
    fill(
      this.root,
      card("Contributors", note, table(columns, contributors, { empty, caption: "Contributors by credits" })),
      h("p", { class: "soft small" }, "Credits are for accepted work, and safe once they are mature; an eviction forfeits those that are still maturing. Everybody who replays the ledger gets this table."),
      run?.run_id ? runCard(run) : null,
    );
  }
}

const count = (rejected) => Object.values(rejected).reduce((sum, one) => sum + one, 0);

function reasons(rejected) {
  const rows = Object.entries(rejected).sort((a, b) => b[1] - a[1]).slice(0, 8);
  return rows.length ? rows.map(([reason, times]) => h("span", { class: "reason" }, `${times} × ${reason}`)) : h("span", { class: "soft" }, "–");
}

function runCard(run) {
  const facts = [
    ["Address", h("span", { class: "mono wrap" }, run.address)],
    ["Environment", run.environment],
    ["Batch", `${number(run.rollouts_per_step)} rollouts a step, groups of ${run.group_size}, answers of up to ${number(run.max_new_tokens)} tokens`],
    ["Asynchrony", `policies up to ${run.max_staleness} checkpoints old are taken`],
    ["Validators", run.validators.map((id) => h("div", {}, peer(id)))],
    ["Quorum", number(run.quorum)],
    ["Ledger", [`${number(run.ledger_length)} entries, tip `, h("span", { class: "mono wrap" }, run.ledger_tip)]],
  ];
  return card("The run", null, h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}
