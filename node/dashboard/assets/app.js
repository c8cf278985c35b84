// The page: follows the node's stream, keeps the newest of each section, and shows the part that the address names.

import { fill, h, tick } from "/assets/dom.js";
import { Overview, sentence } from "/assets/overview.js";
import { Contributors } from "/assets/contributors.js";
import { Verdicts } from "/assets/verdicts.js";
import { Rollouts } from "/assets/rollouts.js";
import { ThisNode } from "/assets/this_node.js";

const SECTIONS = ["node", "run", "evaluations", "contributors", "submissions"];
const MAX_STEPS = 20000;
const HIDDEN_S = 60; // a page that nobody looks at gives its connection back
const LAST_RETRY_S = 60;

const state = { node: null, run: null, evaluations: [], contributors: [], submissions: [], steps: [] };
const byId = (id) => document.getElementById(id);
const views = {
  overview: new Overview(byId("overview")),
  nodes: new Contributors(byId("nodes")),
  verdicts: new Verdicts(byId("verdicts"), byId("detail")),
  rollouts: new Rollouts(byId("rollouts")),
  node: new ThisNode(byId("node")),
};
let shown = "overview";
let stream = null, retryS = 3, hideTimer = null, drawing = false;

/** Draw at most once a frame, and only what can be seen. */
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    header();
    views[shown].update(state);
  });
}

function header() {
  const { node, run, submissions, contributors } = state;
  if (!node) return;
  const name = run?.name ?? node.run.split("/").at(-1);
  byId("run-name").textContent = name;
  byId("run-sub").textContent = sentence(node);
  byId("role").textContent = node.role === "watch" ? "looking on" : node.role;
  byId("role").hidden = false;
  document.title = `${node.state === "working" ? "" : `${node.state}: `}${name}, step ${node.step ?? "–"}`;
  byId("count-nodes").textContent = contributors.length || "";
  const rejected = submissions.filter((one) => one.state === "rejected").length;
  byId("count-verdicts").textContent = rejected ? `${rejected} ✗` : "";
}

function route() {
  const [name, argument] = location.hash.slice(1).split("/");
  shown = name in views ? name : "overview";
  for (const key of Object.keys(views)) byId(key).hidden = key !== shown;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${shown}`) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ inline: "nearest", block: "nearest" });
    } else link.removeAttribute("aria-current");
  }
  views[shown].open?.(argument ?? "");
  draw();
}

function take(name, data) {
  if (name === "series") takeSteps(data);
  else state[name] = data;
  draw();
}

/** Steps arrive as rows; each becomes an object. What lies from `first` on is replaced. */
function takeSteps({ first, columns, rows }) {
  const steps = rows.map((row) => Object.fromEntries(columns.map((column, at) => [column, row[at]])));
  state.steps = [...state.steps.slice(0, first), ...steps].slice(-MAX_STEPS);
}

function connect() {
  stream?.close();
  stream = new EventSource("/api/events");
  stream.onopen = () => { retryS = 3; link("live", "live"); byId("notice").hidden = true; };
  stream.onerror = lost;
  for (const name of [...SECTIONS, "series"]) stream.addEventListener(name, (event) => take(name, JSON.parse(event.data)));
}

/** The browser tries again by itself unless the node said no; then it is asked more and more seldom. */
function lost() {
  link("lost", "not connected");
  const notice = byId("notice");
  notice.hidden = false;
  fill(notice, h("b", {}, "The node does not answer."), " It may have ended (", h("code", {}, "intellect-node status"), " says so), or too many pages are open. What you see is what it said last.");
  if (stream.readyState === EventSource.CLOSED) {
    setTimeout(connect, retryS * 1000);
    retryS = Math.min(LAST_RETRY_S, retryS * 2);
  }
}

function link(style, text) {
  byId("link").className = `link ${style}`;
  byId("link").lastElementChild.textContent = text;
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(hideTimer);
  if (!document.hidden && stream?.readyState === EventSource.CLOSED) connect();
  if (document.hidden) hideTimer = setTimeout(() => stream?.close(), HIDDEN_S * 1000);
});
addEventListener("hashchange", route);
setInterval(tick, 1000);
route();
connect();
