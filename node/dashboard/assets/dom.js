// Building the page. Texts from other nodes become text nodes and nothing else: there is no way here to write HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes, listeners (`onclick`) and children: elements, texts, or lists of them. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace what an element holds; whoever types, scrolls or has the focus in it is not disturbed. */
export function fill(element, ...children) {
  const active = document.activeElement;
  const key = element.contains(active) ? active.dataset?.key : null;
  const scrolled = [...element.querySelectorAll("[data-scroll]")].map((one) => [one.dataset.scroll, one.scrollTop, one.scrollLeft]);
  element.replaceChildren(...children.flat(3).filter(Boolean));
  for (const [name, top, left] of scrolled) {
    const again = element.querySelector(`[data-scroll="${name}"]`);
    if (again) [again.scrollTop, again.scrollLeft] = [top, left];
  }
  if (key) element.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
}

/** Lets a width or height be set where the content security policy forbids style attributes. */
export function sized(element, styles) {
  for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, value);
  return element;
}

export function card(title, note, ...children) {
  return h("div", { class: "card" }, h("h2", {}, title, note ? h("small", {}, note) : null), children);
}

/** A table that becomes a list of cards on a phone. Columns: [title, cell of a row, "number" or ""]. */
export function table(columns, rows, { empty, caption, rowAttributes = () => ({}) }) {
  if (!rows.length) return h("p", { class: "none" }, empty);
  const head = columns.map(([title, , style]) => h("th", { scope: "col", class: style }, title || h("span", { class: "hidden" }, "place")));
  const body = rows.map((row, at) =>
    h("tr", rowAttributes(row), columns.map(([title, cell, style]) => h("td", { class: style, "data-label": title }, h("div", {}, cell(row, at))))),
  );
  return h(
    "div", { class: "scroll", "data-scroll": caption },
    h("table", { class: "stack" }, h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body)),
  );
}

/** One of several choices, as buttons. Options: [value, label]. */
export function choice(label, options, chosen, onchoose) {
  return h(
    "div", { class: "choice", role: "group", "aria-label": label },
    options.map(([value, text]) =>
      h("button", { type: "button", "aria-pressed": String(value === chosen), "data-key": `${label}-${value}`, onclick: () => onchoose(value) }, text),
    ),
  );
}

/** A peer id: short, whole in its title, and whole for whoever copies it. */
export function peer(id, { you } = {}) {
  if (!id) return "–";
  return h(
    "span", { class: "peer" },
    h("button", { type: "button", class: "id", title: `${id}: copy`, "aria-label": `peer ${shortId(id)}: copy the whole id`, "data-key": `peer-${id}`, onclick: (event) => copy(event.currentTarget, id) }, shortId(id)),
    you === id ? h("span", { class: "tag" }, "you") : null,
  );
}

export const shortId = (id) => (id.length > 16 ? `${id.slice(0, 4)}…${id.slice(-7)}` : id);

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "not allowed";
  }
  setTimeout(() => { button.textContent = before; }, 900);
}

const OUTCOMES = {
  accepted: ["good", "✓", "accepted"], rejected: ["bad", "✗", "rejected"], undecided: ["warn", "?", "undecided"], pending: ["soft", "…", "pending"],
  accept: ["good", "✓", "accepted"], reject: ["bad", "✗", "rejected"], pass: ["good", "✓", "passed"], fail: ["bad", "✗", "failed"],
  active: ["good", "✓", "active"], evicted: ["bad", "✗", "evicted"],
};

/** A word with a mark, so that colour is never all that tells. */
export function outcome(name) {
  const [style, mark, text] = OUTCOMES[name] ?? ["warn", "?", String(name)];
  return h("span", { class: `outcome ${style}` }, h("span", { "aria-hidden": "true" }, mark), ` ${text}`);
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return compact(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 10 ** -digits) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export function compact(value) {
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(value) >= limit) return `${Number((value / limit).toPrecision(3))} ${unit}`;
  return String(Math.round(value));
}

export function bytes(count) {
  for (const [limit, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (count >= limit) return `${(count / limit).toFixed(1)} ${unit}`;
  return `${count} B`;
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), whole % 60];
  if (hours >= 48) return `${Math.floor(hours / 24)} days`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${String(rest).padStart(2, "0")} s` : `${rest} s`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
export const moment = (ms) => new Date(ms).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });

/** How long ago something was; kept up to date by `tick`. */
export function since(ms, { after = "" } = {}) {
  const element = h("time", { datetime: new Date(ms).toISOString(), title: moment(ms), "data-since": ms, "data-after": after });
  element.textContent = duration((Date.now() - ms) / 1000) + after;
  return element;
}

export function tick() {
  for (const element of document.querySelectorAll("time[data-since]"))
    element.textContent = duration((Date.now() - Number(element.dataset.since)) / 1000) + element.dataset.after;
}
