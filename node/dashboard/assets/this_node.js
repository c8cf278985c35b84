// The node itself: what it is, what it did last, whom it knows.

import { bytes, card, clock, duration, fill, h, moment, number, peer, since, table } from "/assets/dom.js";
import { relayCard } from "/assets/overview.js";

const RECENT = 60;

export class ThisNode {
  constructor(root) {
    this.root = root;
  }

  update({ node }) {
    if (!node || this.seen === node) return;
    this.seen = node;
    fill(this.root, h("div", { class: "grid" }, factsCard(node), timelineCard(node)), relayCard(node), discoveryCard(node.details.discovery), detailsCard(node.details));
  }
}

function factsCard(node) {
  const facts = [
    ["Role", node.role === "watch" ? "none: looking on" : node.role],
    ["Peer id", peer(node.peer_id)],
    ["Run", h("span", { class: "mono wrap" }, node.run)],
    ["Started", h("span", {}, moment(node.started_ms), " (", since(node.started_ms, { after: " ago" }), ")")],
    ["Process", String(node.pid)],
    ["Software", `${node.software}, protocol ${node.protocol}`],
    ["Head", node.head_sequence === null ? "none yet" : `sequence ${node.head_sequence}`],
  ];
  return card("This node", null, h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function timelineCard(node) {
  const entries = node.timeline.map(([at, kind, what], place) => ({ at, kind, what, seconds: place + 1 < node.timeline.length ? (node.timeline[place + 1][0] - at) / 1000 : null })).slice(-RECENT).reverse();
  const items = entries.map((one) => h("li", { class: one.kind }, h("time", { datetime: new Date(one.at).toISOString() }, clock(one.at)), h("span", {}, one.what), h("span", { class: "soft number" }, one.seconds === null ? "now" : duration(one.seconds))));
  return card("What it did", "newest first", h("ol", { class: "timeline", "data-scroll": "timeline", tabindex: "0", "aria-label": "What the node did, newest first" }, items));
}

function discoveryCard(discovery) {
  if (!discovery) return null;
  const columns = [
    ["DHT server", (one) => peer(one.peer_id)],
    ["connected", (one) => (one.connected ? "yes" : "no")],
    ["heard of", (one) => `${number(one.silent_s)} s ago`, "number"],
    ["failures", (one) => number(one.failures), "number"],
    ["addresses", (one) => h("span", { class: "mono wrap" }, (one.addresses ?? []).join(" "))],
  ];
  return card("Discovery", discovery.reachability, table(columns, discovery.peers ?? [], { empty: "No other DHT server has answered yet.", caption: "DHT servers" }));
}

function shown(name, value) {
  if (typeof value !== "number") return String(value);
  return /(^|_)bytes($|_)/.test(name) ? bytes(value) : value.toLocaleString("en");
}

function detailsCard(details) {
  const rows = Object.entries(details).filter(([, value]) => ["number", "string", "boolean"].includes(typeof value));
  if (!rows.length) return null;
  return card("Details", null, h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", {}, name.replaceAll("_", " ")), h("dd", { class: "wrap" }, shown(name, value))])));
}
