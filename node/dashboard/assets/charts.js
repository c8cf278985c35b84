// Line charts as SVG: gaps where nothing was measured, at most a few points a pixel, readable by pointer, keyboard and as
// a table. A chart is made once and given new data; its size follows its place.

import { fill, h, number, sized, svg } from "/assets/dom.js";

const MARGIN = { top: 10, right: 10, bottom: 24, left: 44 };
const MAX_TABLE_ROWS = 200;

/** options: title, series [{key, label, style}], points(rows, key), unit, floor, ceiling, dots, tall, empty */
export class Chart {
  constructor(options) {
    this.options = options;
    this.rows = [];
    this.dots = [];
    this.at = null;
    this.latest = h("span", { class: "latest" });
    this.plot = h("div", {
      class: options.tall ? "plot tall" : "plot", tabindex: "0", role: "group", "aria-roledescription": "line chart", "aria-label": options.title,
      onpointermove: (event) => this.point(event), onpointerleave: () => this.show(null), onblur: () => this.show(null), onkeydown: (event) => this.key(event),
    });
    this.tip = h("div", { class: "tip", hidden: true });
    this.spoken = h("div", { class: "hidden", "aria-live": "polite" });
    this.table = h("details", { class: "data", ontoggle: () => this.tabulate() }, h("summary", {}, "as a table"), h("div"));
    const legend = options.series.length + (options.dots ? 1 : 0) > 1 ? this.legend() : null;
    this.element = h(
      "figure", { class: "card chart" },
      h("figcaption", {}, h("h2", {}, options.title, h("small", {}, options.note ?? "")), this.latest),
      h("div", { class: "holder" }, this.plot, this.tip), h("footer", {}, legend, this.table), this.spoken,
    );
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  update(rows, dots = []) {
    this.rows = rows;
    this.dots = dots;
    this.latest.textContent = this.newest();
    if (this.dotKey) this.dotKey.hidden = !dots.length;
    this.draw();
    if (this.table.open) this.tabulate();
  }

  newest() {
    const { key } = this.options.series.at(-1);
    const row = this.rows.findLast((one) => isNumber(one[key]));
    return row ? `${number(row[key])}${this.options.unit ?? ""}` : "";
  }

  legend() {
    const items = this.options.series.map((one) => h("span", {}, h("i", { class: `key ${one.style}` }), one.label));
    if (this.options.dots) items.push((this.dotKey = h("span", { hidden: true }, h("i", { class: "key dot" }), this.options.dots)));
    return h("div", { class: "legend" }, items);
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    if (!width || !height) return;
    const scale = (this.scale = this.scaleFor(width, height));
    if (!scale) {
      fill(this.plot, h("p", { class: "none" }, this.options.empty ?? "Nothing is measured yet."));
      return;
    }
    this.cross = svg("path", { class: "cross", d: "" });
    this.spots = svg("g");
    const lines = this.options.series.map((one) => svg("path", { class: `line ${one.style}`, d: this.path(one.key) }));
    const picture = svg(
      "svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      this.axes(scale, width, height), lines, this.dotShapes(), this.cross, this.spots,
    );
    fill(this.plot, picture);
    this.show(this.at);
  }

  scaleFor(width, height) {
    const values = this.options.series.flatMap((one) => this.rows.map((row) => row[one.key])).filter(isNumber);
    const edges = this.dots.flatMap((dot) => [dot.low, dot.high]).filter(isNumber);
    if (!values.length && !edges.length) return null;
    const [low, high] = extent([...edges], extent(values));
    const [bottom, top] = [Math.min(low, this.options.floor ?? low), Math.max(high, this.options.ceiling ?? high)];
    const spare = top > bottom ? (top - bottom) * 0.06 : Math.max(Math.abs(top) * 0.1, 0.5);
    const y = [bottom === this.options.floor ? bottom : bottom - spare, top === this.options.ceiling ? top : top + spare];
    const steps = extent([...this.rows.map((row) => row.step), ...this.dots.map((dot) => dot.step)]);
    const x = steps[0] === steps[1] ? [steps[0] - 1, steps[1] + 1] : steps;
    const place = (value, [from, to], start, end) => start + ((value - from) / (to - from)) * (end - start);
    return {
      x, y,
      toX: (step) => place(step, x, MARGIN.left, width - MARGIN.right),
      toY: (value) => place(value, y, height - MARGIN.bottom, MARGIN.top),
      pixels: width - MARGIN.left - MARGIN.right,
    };
  }

  axes(scale, width, height) {
    const across = ticks(...scale.y, 4).map((value) => {
      const y = scale.toY(value).toFixed(1);
      return [svg("path", { class: "grid", d: `M${MARGIN.left} ${y}H${width - MARGIN.right}` }), svg("text", { x: MARGIN.left - 8, y, class: "y" }, number(value, 4))];
    });
    const along = ticks(...scale.x, Math.max(2, Math.floor(scale.pixels / 80))).filter(Number.isInteger).map((step) =>
      svg("text", { x: scale.toX(step).toFixed(1), y: height - 6, class: "x" }, number(step)),
    );
    return svg("g", { class: "axes" }, across, along);
  }

  path(key) {
    let pen = "M";
    const parts = [];
    for (const row of thin(this.rows, key, this.scale.pixels)) {
      if (!isNumber(row[key])) { pen = "M"; continue; }
      parts.push(`${pen}${this.scale.toX(row.step).toFixed(1)} ${this.scale.toY(row[key]).toFixed(1)}`);
      pen = "L";
    }
    const lonely = parts.map((part, at) => (part[0] === "M" && parts[at + 1]?.[0] !== "L" ? `${part}h0.01` : part));
    return lonely.join("");
  }

  dotShapes() {
    return this.dots.filter((dot) => isNumber(dot.value)).map((dot) => {
      const x = this.scale.toX(dot.step).toFixed(1);
      return svg("g", { class: "evaluation" }, svg("path", { d: `M${x} ${this.scale.toY(dot.low).toFixed(1)}V${this.scale.toY(dot.high).toFixed(1)}` }), svg("circle", { cx: x, cy: this.scale.toY(dot.value).toFixed(1), r: 3.5 }));
    });
  }

  point(event) {
    if (!this.scale || !this.rows.length) return;
    const x = event.clientX - this.plot.getBoundingClientRect().left;
    const [from, to] = this.scale.x;
    const step = from + ((x - MARGIN.left) / this.scale.pixels) * (to - from);
    this.show(nearest(this.rows, step));
  }

  key(event) {
    const last = this.rows.length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(last, (this.at ?? last) + moves[event.key])));
    this.spoken.textContent = this.said(this.rows[this.at]).join(", ");
  }

  /** Mark one row, or none. */
  show(at) {
    const row = at === null || !this.scale ? null : this.rows[at];
    this.at = row ? at : null;
    this.tip.hidden = !row;
    if (!this.cross) return;
    if (!row) {
      this.cross.setAttribute("d", "");
      this.spots.replaceChildren();
      return;
    }
    const x = this.scale.toX(row.step);
    this.cross.setAttribute("d", `M${x.toFixed(1)} ${MARGIN.top}V${this.plot.clientHeight - MARGIN.bottom}`);
    this.spots.replaceChildren(...this.options.series.filter((one) => isNumber(row[one.key])).map((one) => svg("circle", { class: `spot ${one.style}`, cx: x, cy: this.scale.toY(row[one.key]), r: 3.5 })));
    const [head, ...lines] = this.said(row);
    fill(this.tip, h("b", {}, head), lines.map((line) => h("div", {}, line)));
    const left = x > this.plot.clientWidth / 2 ? x - this.tip.offsetWidth - 12 : x + 12;
    sized(this.tip, { transform: `translateX(${Math.max(0, left)}px)` });
  }

  said(row) {
    const dot = this.dots.find((one) => one.step === row.step);
    const lines = this.options.series.map((one) => `${one.label} ${number(row[one.key])}${this.options.unit ?? ""}`);
    return [`step ${row.step}`, ...lines, ...(dot ? [`${this.options.dots} ${number(dot.value)} (${number(dot.low)} to ${number(dot.high)})`] : [])];
  }

  tabulate() {
    if (!this.table.open) return;
    const stride = Math.ceil(this.rows.length / MAX_TABLE_ROWS) || 1;
    const rows = this.rows.filter((_, at) => (this.rows.length - 1 - at) % stride === 0).reverse();
    const head = ["step", ...this.options.series.map((one) => one.label)];
    const cells = rows.map((row) => h("tr", {}, h("td", { class: "number" }, row.step), this.options.series.map((one) => h("td", { class: "number" }, number(row[one.key], 5)))));
    const note = stride > 1 ? h("p", { class: "none" }, `every ${stride}th step`) : null;
    fill(this.table.lastElementChild, note, h("div", { class: "scroll rows", tabindex: "0", role: "region", "aria-label": `${this.options.title} as a table` }, h("table", {}, h("thead", {}, h("tr", {}, head.map((name) => h("th", { scope: "col", class: "number" }, name)))), h("tbody", {}, cells))));
  }
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function extent(values, [low, high] = [Infinity, -Infinity]) {
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

/** First, lowest, highest and last row of every pixel column: looks the same as all of them. */
export function thin(rows, key, pixels) {
  if (rows.length <= 2 * pixels) return rows;
  const kept = new Set();
  for (let column = 0; column < pixels; column += 1) {
    const [start, end] = [Math.floor((column * rows.length) / pixels), Math.floor(((column + 1) * rows.length) / pixels)];
    let [low, high] = [start, start];
    for (let at = start; at < end; at += 1) {
      if (rows[at][key] < rows[low][key] || !isNumber(rows[low][key])) low = at;
      if (rows[at][key] > rows[high][key] || !isNumber(rows[high][key])) high = at;
    }
    for (const at of [start, Math.min(low, high), Math.max(low, high), end - 1]) kept.add(at);
  }
  return [...kept].sort((a, b) => a - b).map((at) => rows[at]);
}

/** Round numbers within a range, about so many. */
export function ticks(from, to, count) {
  const rough = (to - from) / Math.max(1, count);
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * size).find((one) => one >= rough * 0.999) ?? rough;
  const found = [];
  for (let value = Math.ceil(from / step); value * step <= to + step * 1e-9 && found.length < 50; value += 1) found.push(Number((value * step).toPrecision(12)));
  return found;
}

/** Place of the row whose step is nearest; rows rise. */
function nearest(rows, step) {
  let [low, high] = [0, rows.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (rows[middle].step < step) low = middle;
    else high = middle;
  }
  return Math.abs(rows[low].step - step) <= Math.abs(rows[high].step - step) ? low : high;
}

/** Mean of each value with its neighbours, a fortieth of all to each side; gaps stay out of it. */
export function smoothed(rows, key) {
  const reach = Math.max(1, Math.round(rows.length / 40));
  const sums = [0], counts = [0];
  rows.forEach((row, at) => {
    sums.push(sums[at] + (isNumber(row[key]) ? row[key] : 0));
    counts.push(counts[at] + (isNumber(row[key]) ? 1 : 0));
  });
  return rows.map((_, at) => {
    const [from, to] = [Math.max(0, at - reach), Math.min(rows.length, at + reach + 1)];
    return counts[to] > counts[from] ? (sums[to] - sums[from]) / (counts[to] - counts[from]) : null;
  });
}
