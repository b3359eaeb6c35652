// The page of mismatch.py: sums as bars, and a text whose tokens are marked where routes differ.
"use strict";

const layer = find("layer");
const count = data.pieces.length;
const ANY = -1;
let current = 0;

function numbers(text, Kind) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = letters.charCodeAt(n);
  return new Kind(bytes.buffer);
}

const Expert = data.wide ? Uint16Array : Uint8Array;
const NO_ROUTE = data.wide ? 65535 : 255;
const arrays = {
  experts: numbers(data.experts, Expert), other: numbers(data.other, Expert),
  changed: numbers(data.changed, Uint8Array), certified: numbers(data.certified, Uint8Array),
  gap: numbers(data.gap, Float32Array), moved: numbers(data.moved, Float32Array),
  own: numbers(data.own, Float32Array), replayed: numbers(data.replayed, Float32Array),
};

const percent = (share) => {
  if (share === null) return "-";
  if (share > 0 && share < 0.00005) return "<0.01%";
  return `${(100 * share).toFixed(share < 0.1 ? 2 : 1)}%`;
};
const shortly = (value) => Number.isNaN(value) ? "-" : Number(value.toPrecision(3)).toString();
const inline = (piece) => piece.replace(/\n/g, "↵").replace(/\t/g, "⇥");

// ---- sums ------------------------------------------------------------------------------------

function bars(title, caption, rows) {
  const largest = Math.max(...rows.map((row) => row.value ?? 0), 1e-9);
  const table = make("table");
  for (const row of rows) {
    const bar = make("i");
    bar.style.width = `${100 * (row.value ?? 0) / largest}%`;
    table.append(make("tr", {}, make("th", { scope: "row" }, row.name), make("td", { className: "bar" }, bar),
      make("td", {}, percent(row.value)), make("td", { className: "note" }, row.note)));
  }
  return make("figure", { style: "margin: 0" }, make("h2", {}, title),
    make("figcaption", {}, caption), table);
}

// A table with a sentence below its title.
function plain({ title, columns, rows }) {
  const cells = (tag, values) => values.map((value) => make(tag, {}, value));
  const table = make("table", {}, make("tr", {}, ...cells("th", columns)));
  for (const row of rows) table.append(make("tr", {}, ...cells("td", row)));
  return make("figure", { style: "margin: 0" }, make("h2", {}, title),
    make("figcaption", {}, `${data.cost} Own experts: each side its own choice. Same experts: the other side takes those of the reference.`), table);
}

// ---- text ------------------------------------------------------------------------------------

const flips = (token) => {
  const wanted = Number(layer.value);
  let found = 0;
  for (let n = 0; n < data.numbers.length; n++)
    if (wanted === ANY || wanted === n) found += arrays.changed[n * count + token];
  return found;
};

const tokens = [];

function write() {
  let place = 0;
  let domain = null;
  for (const passage of data.passages) {
    if (passage.domain !== domain) {
      domain = passage.domain;
      find("text").append(make("h3", {}, data.domains[domain] ?? "answers"));
    }
    const block = make("div", { className: "passage" });
    for (let n = 0; n < passage.tokens; n++, place++) {
      const piece = data.pieces[place];
      const token = make("span", { tabIndex: -1, className: "t" }, inline(piece) || "∅");
      token.place = place;
      tokens.push(token);
      block.append(token, piece.match(/\n*$/)[0]);
    }
    find("text").append(block);
  }
}

function paint() {
  tokens.forEach((token, place) => {
    const found = flips(place);
    token.className = found ? `t f${Math.min(3, found)}` : "t";
  });
  mark(current);
}

function mark(place) {
  tokens[current].classList.remove("current");
  tokens[current].tabIndex = -1;
  current = place;
  tokens[current].classList.add("current");
  tokens[current].tabIndex = 0;
  show(current);
}

const CERTIFIED = ["no", "yes", "-"];

function show(place) {
  const names = (values, n) => {
    const start = (n * count + place) * data.chosen;
    const row = Array.from(values.subarray(start, start + data.chosen)).sort((a, b) => a - b);
    return row[0] === NO_ROUTE ? "no route" : row.join(" ");
  };
  const table = make("table", {}, make("tr", {}, ...["layer", "experts", "other", "margin", "input moved", "certified"]
    .map((name) => make("th", {}, name))));
  data.numbers.forEach((number, n) => {
    const at = n * count + place;
    const values = [number, names(arrays.experts, n), names(arrays.other, n), shortly(arrays.gap[at]),
      shortly(arrays.moved[at]), CERTIFIED[arrays.certified[at]]];
    table.append(make("tr", { className: arrays.changed[at] ? "changed" : "" },
      ...values.map((value) => make("td", {}, String(value)))));
  });
  find("token").replaceChildren(
    make("h2", {}, "Token ", make("span", { className: "piece" }, `“${inline(data.pieces[place])}”`)),
    make("p", {}, `Log-probability of the next token changes by ${shortly(arrays.own[place])} with own experts, `
      + `by ${shortly(arrays.replayed[place])} with the same experts.`), table);
}

function go(place) {
  mark(Math.max(0, Math.min(count - 1, place)));
  tokens[current].focus({ preventScroll: true });
  tokens[current].scrollIntoView({ block: "nearest" });
}

function toFlip(step) {
  for (let place = current + step; place >= 0 && place < count; place += step)
    if (flips(place)) return go(place);
}

find("title").textContent = data.title;
find("verdict").textContent = data.verdict;
find("limits").textContent = data.limits;
find("reference").textContent = data.reference;
find("first").append(
  bars("Decisions that differ, by layer", "Share of tokens whose set of experts is another.", data.layers));
find("charts").append(
  ...data.margins.length  // none where every layer uses all its experts
    ? [bars("By margin", "Decisions in eighths by the k-th minus the next logit, smallest first.", data.margins)]
    : [],
  bars("Tokens that differ in some layer, by position", "Place in the sequence.", data.positions),
  bars("By kind of token", "As its text begins.", data.kinds),
  ...data.tables.map(plain),
);
layer.append(make("option", { value: ANY }, "any layer"),
  ...data.numbers.map((number, n) => make("option", { value: n }, `layer ${number}`)));
layer.addEventListener("change", paint);
find("next").addEventListener("click", () => toFlip(1));
find("previous").addEventListener("click", () => toFlip(-1));
find("text").addEventListener("pointerover", ({ target }) => {
  if (target.place !== undefined) show(target.place);
});
find("text").addEventListener("pointerleave", () => show(current));
find("text").addEventListener("click", ({ target }) => {
  if (target.place !== undefined) mark(target.place);
});
find("text").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) {
    event.preventDefault();
    go(current + step);
  }
});
find("whole").addEventListener("click", ({ target }) => {
  const cut = find("text").classList.toggle("window");
  target.setAttribute("aria-pressed", String(!cut));
});
followTheme();
write();
paint();
// The window of the text opens where the first flip is.
const flip = tokens.find((_, place) => flips(place));
if (flip) find("text").scrollTop = Math.max(0, flip.offsetTop - 60);
