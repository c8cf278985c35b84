// What the node does now, how the run learns, and who carries the bytes.

import { Chart, isNumber, smoothed } from "/assets/charts.js";
import { bytes, card, choice, fill, h, number, outcome, since, sized, svg } from "/assets/dom.js";

const SPANS = [["all", "all"], ["1000", "last 1000"], ["100", "last 100"]];
const TIMELINE_S = 15 * 60;

const CHARTS = {
  reward: {
    title: "Reward", note: "mean of each step's rollouts", tall: true, floor: 0, ceiling: 1, dots: "held-out pass@1, 95 %", empty: "No step is trained yet.",
    series: [{ key: "reward", label: "reward", style: "raw" }, { key: "smooth", label: "smoothed", style: "main" }],
  },
  length: { title: "Answer length", note: "mean tokens", floor: 0, series: [{ key: "length", label: "tokens", style: "main" }] },
  tokens: { title: "Tokens a second", note: "trained on, whole run", floor: 0, series: [{ key: "tokens_per_s", label: "tokens/s", style: "main" }] },
  loss: { title: "Loss", note: "mean of a step's updates", series: [{ key: "loss", label: "loss", style: "main" }] },
  staleness: {
    title: "Staleness", note: "checkpoints behind", floor: 0,
    series: [{ key: "staleness_max", label: "most", style: "raw" }, { key: "staleness", label: "mean", style: "main" }],
  },
  entropy: { title: "Entropy", note: "nats a token", floor: 0, series: [{ key: "entropy", label: "entropy", style: "main" }] },
  time: {
    title: "Seconds a step", note: "trainer", floor: 0, unit: " s",
    series: [{ key: "wait_s", label: "waiting", style: "raw" }, { key: "train_s", label: "training", style: "main" }],
  },
};

export class Overview {
  constructor(root) {
    this.span = "all";
    this.now = h("div", { class: "card now" });
    this.tiles = h("div", { class: "tiles" });
    this.spans = h("div", { class: "line-up" });
    this.charts = Object.fromEntries(Object.entries(CHARTS).map(([name, options]) => [name, new Chart(options)]));
    this.relays = h("div");
    const { reward, ...others } = this.charts;
    root.append(this.now, this.tiles, this.spans, reward.element, h("div", { class: "grid" }, Object.values(others).map((chart) => chart.element)), this.relays);
  }

  update(state) {
    const { node, run, steps } = state;
    if (!node) return;
    fill(this.now, nowCard(node, run));
    fill(this.tiles, tiles(state));
    fill(this.spans, h("h2", {}, "Learning"), steps.length > 100 ? choice("Steps shown", SPANS, this.span, (value) => { this.span = value; this.seen = null; this.update(state); }) : null);
    fill(this.relays, relayCard(node));
    const empty = emptyText(state);
    for (const chart of Object.values(this.charts)) chart.options.empty = empty;
    if (this.empty !== empty || this.seen !== steps || this.evaluations !== state.evaluations) this.drawCharts(steps, state.evaluations);
    [this.seen, this.evaluations, this.empty] = [steps, state.evaluations, empty];
  }

  drawCharts(steps, evaluations) {
    const means = smoothed(steps, "reward");
    const rows = steps.map((row, at) => ({ ...row, smooth: means[at] }));
    const kept = this.span === "all" ? rows : rows.slice(-Number(this.span));
    const first = kept[0]?.step ?? 0;
    const dots = evaluations.map(([step, value, low, high]) => ({ step, value, low, high })).filter((dot) => dot.step >= first);
    for (const [name, chart] of Object.entries(this.charts)) chart.update(kept, name === "reward" ? dots : []);
    this.charts.entropy.element.hidden = !kept.some((row) => isNumber(row.entropy));
  }
}

function emptyText({ run }) {
  return run?.run_id ? "No step is trained yet." : "The run's ledger is still on its way.";
}

const STATES = { working: "good", waiting: "soft", starting: "soft", finished: "good", stopping: "warn", evicted: "bad" };

function nowCard(node, run) {
  const total = run?.total_steps, trained = run?.trained;
  const part = total ? Math.min(1, (trained ?? node.step ?? 0) / total) : 0;
  return [
    h(
      "div", { class: "doing" },
      h("span", { class: `chip ${STATES[node.state] ?? "soft"}` }, node.state),
      h("p", { class: "activity" }, sentence(node)),
      h("p", { class: "soft" }, "for ", since(node.since_ms)),
    ),
    total
      ? h(
          "div", { class: "progress" },
          h("div", { class: "line-up" }, h("span", {}, h("b", {}, number(trained)), ` of ${number(total)} steps trained`), h("span", { class: "soft" }, `${Math.floor(part * 100)} %`)),
          h("div", { class: "track", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": trained, "aria-label": "steps trained" }, sized(h("i"), { width: `${part * 100}%` })),
        )
      : null,
    strip(node),
  ];
}

/** "waiting" and "step 4" read as "Waiting for step 4". */
export function sentence(node) {
  const text = node.state === "waiting" ? `waiting for ${node.activity}` : node.activity;
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The last minutes: when it worked and when it waited. */
function strip(node) {
  const end = node.state === "finished" ? node.since_ms : Date.now();
  const start = Math.max(node.started_ms, end - TIMELINE_S * 1000);
  const spans = node.timeline.map(([at, kind, what], place) => ({ at: Math.max(at, start), to: Math.min(node.timeline[place + 1]?.[0] ?? end, end), kind, what })).filter((one) => one.to > one.at && one.to > start);
  if (!spans.length) return null;
  const x = (ms) => ((ms - start) / (end - start)) * 1000;
  const worked = spans.filter((one) => one.kind === "working").reduce((sum, one) => sum + one.to - one.at, 0);
  const shapes = spans.map((one) => svg("rect", { class: one.kind, x: x(one.at).toFixed(1), y: 0, width: Math.max(0.5, x(one.to) - x(one.at)).toFixed(1), height: 10 }, svg("title", {}, `${one.what}`)));
  const share = Math.round((100 * worked) / (end - start));
  const length = Math.max(1, Math.round((end - start) / 60000));
  return h(
    "div", { class: "strip" },
    svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `working ${share} % of the last ${length} minutes` }, shapes),
    h("div", { class: "line-up soft small" }, h("span", {}, h("i", { class: "key working" }), "working ", h("i", { class: "key waiting" }), "waiting"), h("span", {}, `${share} % working, last ${length} min`)),
  );
}

function tiles({ node, run, steps, contributors, submissions }) {
  const rejected = Object.values(node.rejected ?? {}).reduce((sum, count) => sum + count, 0);
  const me = contributors.find((one) => one.peer_id === node.peer_id);
  const last = steps.at(-1);
  const rewards = mean(steps.slice(-10)), first = mean(steps.slice(0, 10));
  const evicted = contributors.filter((one) => one.standing === "evicted").length;
  const traffic = node.relays.reduce((sum, one) => sum + one.bytes_in + one.bytes_out, 0) + (node.details.bytes_out ?? 0) + (node.details.bytes_in ?? 0);
  const speed = node.details.tokens_per_s ?? last?.tokens_per_s;
  const reasons = Object.entries(node.rejected ?? {}).map(([reason, count]) => `${count} × ${reason}`).slice(0, 2).join(", ");
  return [
    tile("Step", number(node.step), `policy ${number(node.checkpoint_step)}`),
    tile("Reward", number(rewards), rewards !== null && steps.length > 20 ? `last ten; ${signed(rewards - first)} since the first ten` : "mean of the last ten steps"),
    tile("Accepted", number(node.accepted), node.role === "relay" ? "counted by others" : "submissions"),
    tile("Rejected", number(rejected), reasons || "none", rejected && node.role === "inference" ? "bad" : ""),
    node.role === "inference" ? tile("Credits", number(me?.credits ?? 0), me ? outcome(me.standing) : "after the first verdict") : tile("Contributors", number(contributors.length), evicted ? `${evicted} evicted` : "none evicted"),
    tile("Tokens a second", number(Math.round(speed ?? 0)), node.details.tokens_per_s !== undefined ? "generated here" : "trained on, whole run"),
    tile("Traffic", bytes(traffic), node.role === "relay" ? "through this relay" : "with relays"),
    tile("Pending", number(node.pending), "not judged yet"),
  ];
}

const tile = (label, value, note, style = "") => h("div", { class: `tile ${style}` }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "note" }, note));
const signed = (value) => `${value >= 0 ? "+" : "−"}${number(Math.abs(value), 2)}`;

function mean(rows) {
  const values = rows.map((row) => row.reward).filter(isNumber);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

export function relayCard(node) {
  const own = node.role === "relay" ? [{ peer_id: node.peer_id, url: node.details.http_url ?? "", bytes_in: node.details.bytes_in ?? 0, bytes_out: node.details.bytes_out ?? 0, failures: 0 }] : [];
  const relays = [...own, ...node.relays];
  const most = Math.max(1, ...relays.map((one) => Math.max(one.bytes_in, one.bytes_out)));
  const bar = (value, style, label) => h("div", { class: "bar-line" }, h("span", { class: "bar" }, sized(h("i", { class: style }), { width: `${(100 * value) / most}%` })), h("span", { class: "number" }, `${bytes(value)} ${label}`));
  const rows = relays.map((one) =>
    h("div", { class: "relay" },
      h("div", { class: "clip" }, h("b", { class: "mono", title: one.peer_id }, one.peer_id.slice(-8)), " ", h("span", { class: "soft", title: one.url }, one.url.replace("https://", "")), one.failures ? h("span", { class: "outcome warn" }, ` ⚠ ${one.failures} failures`) : null),
      bar(one.bytes_in, "in", "in"), bar(one.bytes_out, "out", "out"),
    ),
  );
  return card("Bytes by relay", "what this node received and sent", rows.length ? h("div", { class: "relays" }, rows) : h("p", { class: "none" }, "No relay has given or taken anything yet."));
}
