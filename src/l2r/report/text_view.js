// The page of text_view.py. A token of a text is known by its number i among those shown; it
// stands in the row shown[i / columns] of the whole text.
"use strict";

const controls = { left: find("left"), right: find("right"), layer: find("layer") };
const NONE = -1;
const WRITTEN = "The model wrote the text behind this mark.";

// What is on the screen: the panes, the token that has the focus, the expert chosen in each pane.
let panes = [];
let current = { pane: 0, row: 0, token: 0 };

// A text of so few tokens is shown once per layer, one below the other; a longer one in the layer
// of the slider.
const stacked = data.texts.every((text) => text.shown.length * text.columns <= 400) &&
  data.checkpoints.every(({ layers, text }) =>
    layers.length * data.texts[text].shown.length * data.texts[text].columns <= 10000);

// ---- reading ---------------------------------------------------------------------------------

function numbers(text, Kind) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = letters.charCodeAt(n);
  return new Kind(bytes.buffer);
}

const KINDS = {
  weights: Uint16Array, margin: Float32Array, entropy: Float32Array, radius: Float32Array,
  contexts: Int32Array, context_weights: Float32Array,
  vocabulary: Int32Array, vocabulary_counts: Int32Array,
};

// One layer of a checkpoint, decoded when it is first shown.
function layerOf({ checkpoint }, row = current.row) {
  const number = stacked ? row : controls.layer.valueAsNumber;
  const raw = checkpoint.layers[Math.min(number, checkpoint.layers.length - 1)];
  if (!raw.read) {
    raw.read = { experts: numbers(raw.experts, checkpoint.experts > 256 ? Uint16Array : Uint8Array) };
    for (const [name, Kind] of Object.entries(KINDS)) raw.read[name] = numbers(raw[name], Kind);
  }
  return { ...raw, ...raw.read };
}

function choicesOf(layer, token) {
  const found = [];
  for (let n = token * layer.chosen; n < (token + 1) * layer.chosen; n++) {
    found.push({ expert: layer.experts[n], weight: layer.weights[n] / 65535 * layer.largest });
  }
  return found;
}

for (const text of data.texts) {
  text.tokens = numbers(text.tokens, Uint32Array);
  text.counts = new Uint32Array(text.pieces.length);
  for (const token of text.tokens) text.counts[token]++;
  text.places = text.shown.flatMap((row) =>
    Array.from({ length: text.columns }, (_, column) => row * text.length + column));
}

// ---- drawing ---------------------------------------------------------------------------------

const inline = (piece) => piece.replace(/\n/g, "↵").replace(/\t/g, "⇥");
// Signs for breaks and tabs; breaks that end a token stand behind it and its number.
const breaksAfter = (piece) => piece.match(/\n*$/)[0];
const visible = (piece) => {
  const ends = breaksAfter(piece);
  const body = inline(piece.slice(0, piece.length - ends.length)).replace(/↵/g, "↵\n");
  return body + inline(ends) || "∅";
};
const shortly = (value) => Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "∞";

// The colors of every page (palette.py), each with black or white letters.
function writeColors() {
  const rules = data.colors.map(([color, ink], e) => `.e${e}{background:${color};color:${ink}}`);
  document.head.append(make("style", { textContent: rules.join("") }));
}

// The color of each expert of the first checkpoint, then those that the one beside it has more; a
// click chooses an expert.
function showKey() {
  find("experts").replaceChildren(...panes.map(({ checkpoint }, number) => {
    const swatches = Array.from({ length: checkpoint.experts }, (_, e) => {
      const button = make("button", { type: "button" }, String(e));
      button.setAttribute("aria-label", `choose expert ${e} of ${checkpoint.name}`);
      button.addEventListener("click", () => choose(number, panes[number].expert === e ? NONE : e));
      return button;
    });
    const which = number ? `Only ${checkpoint.name} ` : "Experts ";
    return make("div", { className: "key" }, which, ...swatches);
  }));
}

// The text once, passage by passage, at the end of ``root``: its tokens.
function passagesOf(root, checkpoint, number, row) {
  const text = data.texts[checkpoint.text];
  const tokens = [];
  let domain = null;
  text.shown.forEach((place, n) => {
    if (text.domain[place] !== domain) {
      domain = text.domain[place];
      if (!stacked) root.append(make("h3", {}, text.domains[domain]));
    }
    const passage = make("div", { className: "passage", role: "group" });
    passage.setAttribute("aria-label", `${text.domains[domain]}, passage ${n + 1}`);
    for (let c = 0; c < text.columns; c++) {
      const piece = text.pieces[text.tokens[text.places[tokens.length]]];
      const space = /^ +(?=\S)/.exec(piece)?.[0] ?? ""; // uncolored: it may hang at a line's end
      const token = make("span", { tabIndex: -1 }, visible(piece.slice(space.length)));
      token.setAttribute("role", "button");
      token.place = { pane: number, row, token: tokens.length };
      if (tokens.length === checkpoint.written) passage.append(make("b", { title: WRITTEN }, "▸"));
      tokens.push(token);
      passage.append(space, token, breaksAfter(piece));
    }
    root.append(passage);
  });
  return tokens;
}

function buildPane(checkpoint, number) {
  const text = data.texts[checkpoint.text];
  const chooser = make("select", { className: "chooser" }, make("option", { value: NONE }, "none"));
  for (let e = 0; e < checkpoint.experts; e++) chooser.append(make("option", { value: e }, String(e)));
  const about = make("span");
  const heading = make("p", {}, about, make("label", {}, " Expert ", chooser));
  const root = make("section", { className: "pane", ariaLabel: checkpoint.name },
    make("h2", {}, checkpoint.name), heading);
  const depth = stacked ? checkpoint.layers.length : 1;
  const rows = Array.from({ length: depth }, (_, row) => {
    const label = make("p", { className: "finding" });
    root.append(label);
    return { label, tokens: passagesOf(root, checkpoint, number, row) };
  });
  const pane = { checkpoint, text, root, about, chooser, rows, expert: NONE };
  chooser.addEventListener("change", () => choose(number, Number(chooser.value)));
  return pane;
}

function rebuild() {
  const right = Number(controls.right.value);
  const shown = [Number(controls.left.value), ...(right === NONE ? [] : [right])];
  panes = shown.map((number, pane) => buildPane(data.checkpoints[number], pane));
  find("panes").replaceChildren(...panes.map((pane) => pane.root));
  controls.layer.max = Math.max(...panes.map((pane) => pane.checkpoint.layers.length)) - 1;
  current.pane = Math.min(current.pane, panes.length - 1);
  const { rows } = panes[current.pane];
  current.row = Math.min(current.row, rows.length - 1);
  current.token = Math.min(current.token, rows[current.row].tokens.length - 1);
  showKey();
  paint();
}

// Colors and frames of every token, then what stands beside the text.
function paint() {
  for (const pane of panes) {
    const { checkpoint, expert } = pane;
    pane.rows.forEach(({ label, tokens }, row) => {
      const layer = layerOf(pane, row);
      const k = layer.chosen;
      for (let i = 0; i < tokens.length; i++) {
        const first = layer.experts[i * k];
        let name = `t e${layer.colors[first]}`;
        if (expert !== NONE) {
          if (first === expert) name += " first";
          else if (layer.experts.subarray(i * k, (i + 1) * k).includes(expert)) name += " among";
        }
        if (checkpoint.written !== NONE && i >= checkpoint.written) name += " written";
        tokens[i].className = name;
        tokens[i].dataset.e = first;
      }
      label.replaceChildren(make("b", {}, `Layer ${blockOf(layer, row)}`), ` ${layer.finding}`);
    });
    pane.root.classList.toggle("choosing", expert !== NONE);
    pane.about.textContent = stacked ? "" : layerOf(pane).name;
    pane.chooser.value = expert;
  }
  const left = new Set(layerOf(panes[0]).colors);
  find("experts").querySelectorAll(".key").forEach((key, number) => {
    const { colors } = layerOf(panes[number]);
    key.hidden = number > 0 && colors.every((color) => left.has(color));
    key.querySelectorAll("button").forEach((button, e) => {
      button.className = `swatch e${colors[e]}`;
      button.hidden = number > 0 && left.has(colors[e]);
    });
  });
  // The slider is as long as the deepest model, which names its layers.
  const depth = Number(controls.layer.max) + 1;
  const deepest = panes.find(({ checkpoint }) => checkpoint.layers.length === depth);
  const number = controls.layer.valueAsNumber;
  const name = `${blockOf(layerOf(deepest), number)} (${number + 1} of ${depth})`;
  find("layer-number").textContent = name;
  controls.layer.setAttribute("aria-valuetext", name);
  mark();
  showToken(current);
  showExperts();
}

// The layer's number as the model counts its blocks, or its position.
function blockOf({ name }, position) {
  const block = /\.(\d+)\./.exec(name);
  return block ? block[1] : position;
}

const together = ({ pane }) => panes.filter((p) => p.text === panes[pane].text);

// The current token can be reached by Tab; its partner in the other pane is underlined.
function mark() {
  for (const token of document.querySelectorAll(".current, .partner, [tabindex='0'].t")) {
    token.classList.remove("current", "partner");
    token.tabIndex = -1;
  }
  for (const pane of together(current)) {
    const { tokens } = pane.rows[Math.min(current.row, pane.rows.length - 1)];
    tokens[current.token].classList.add("partner");
  }
  const own = panes[current.pane].rows[current.row].tokens[current.token];
  own.classList.replace("partner", "current");
  own.tabIndex = 0;
  own.setAttribute("aria-label", spoken(current));
}

function spoken({ pane, row, token }) {
  const { text } = panes[pane];
  const told = choicesOf(layerOf(panes[pane], row), token)
    .map(({ expert, weight }) => `expert ${expert} weight ${weight.toFixed(3)}`);
  return `${inline(text.pieces[text.tokens[text.places[token]]])}: ${told.join(", ")}`;
}

// ---- beside the text -------------------------------------------------------------------------

function showToken(place) {
  const { text } = panes[place.pane];
  const piece = text.pieces[text.tokens[text.places[place.token]]];
  find("token").replaceChildren(
    make("h2", {}, "Token ", make("span", { className: "piece" }, `“${inline(piece)}”`)),
    make("div", { className: "beside" }, ...together(place).map((pane) => factsOf(pane, place))));
}

function factsOf(pane, { row, token }) {
  const { checkpoint } = pane;
  const layer = layerOf(pane, row);
  const number = panes.indexOf(pane);
  const largest = Math.max(...panes.map((pane) => layerOf(pane, row).largest)); // one scale
  const table = make("table");
  for (const { expert, weight } of choicesOf(layer, token)) {
    const bar = make("i");
    bar.style.width = `${100 * weight / largest}%`;
    const button = make("button", { type: "button", className: `swatch e${layer.colors[expert]}` }, String(expert));
    button.setAttribute("aria-label", `expert ${expert} of ${checkpoint.name}`);
    button.addEventListener("click", () => choose(number, expert));
    table.append(make("tr", {}, make("td", {}, button),
      make("td", { className: "weight" }, weight.toFixed(4)), make("td", { className: "bar" }, bar)));
  }
  const sum = choicesOf(layer, token).reduce((all, { weight }) => all + weight, 0);
  const radius = layer.radius[token];
  const facts = make("dl");
  for (const [name, value] of [
    ["margin", shortly(layer.margin[token])],
    ["entropy", shortly(layer.entropy[token])],
    ["certified radius", Number.isNaN(radius) ? `none: ${layer.remark}` : shortly(radius)],
    ["sum of weights", sum.toFixed(2)],
  ]) facts.append(make("dt", {}, name), make("dd", {}, value));
  return make("div", {}, make("h3", {}, checkpoint.name), table, facts);
}

function choose(pane, expert) {
  panes[pane].expert = expert;
  paint();
}

function showExperts() {
  const parts = panes.flatMap((pane) => pane.expert === NONE ? [] : expertOf(pane));
  const hint = make("p", {}, "Choose an expert to see its contexts and vocabulary.");
  find("expert").replaceChildren(...(parts.length ? parts : [hint]));
}

function expertOf(pane) {
  const { checkpoint, text, expert } = pane;
  const layer = layerOf(pane);
  const row = (values, width) => values.subarray(expert * width, (expert + 1) * width);
  const contexts = make("ol", { className: "contexts" });
  row(layer.contexts, checkpoint.contexts).forEach((place, n) => {
    if (place === NONE) return;
    const weight = row(layer.context_weights, checkpoint.contexts)[n];
    contexts.append(make("li", {}, ...around(text, place), note(weight.toFixed(3))));
  });
  const vocabulary = make("ol", { className: "vocabulary" });
  row(layer.vocabulary, checkpoint.vocabulary).forEach((piece, n) => {
    if (piece === NONE) return;
    const hits = row(layer.vocabulary_counts, checkpoint.vocabulary)[n];
    const share = `${(100 * hits / text.counts[piece]).toFixed(0)}% (${hits} of ${text.counts[piece]})`;
    vocabulary.append(make("li", {},
      make("span", { className: "piece" }, `“${inline(text.pieces[piece])}”`), note(share)));
  });
  const none = () => make("p", {}, "No token went to it.");
  return [
    make("h2", {}, make("span", { className: `swatch e${layer.colors[expert]}` }, String(expert)),
      `Expert ${expert} of ${checkpoint.name}`),
    make("h3", {}, "Contexts with its largest weights"),
    contexts.childElementCount ? contexts : none(),
    make("h3", {}, "Vocabulary: share of a token's occurrences that come to it"),
    vocabulary.childElementCount ? vocabulary : none(),
  ];
}

const note = (words) => make("span", { className: "note" }, words);

function around(text, place) {
  const start = place - place % text.length;
  const words = (from, to) => Array.from(text.tokens.subarray(from, to),
    (token) => inline(text.pieces[token])).join("");
  const before = words(Math.max(start, place - 12), place);
  const after = words(place + 1, Math.min(start + text.length, place + 7));
  const piece = (tag, shown) => make(tag, { className: "piece" }, shown);
  return [piece("span", before), piece("mark", words(place, place + 1)), piece("span", after)];
}

// ---- hands -----------------------------------------------------------------------------------

function tokenAt(event) {
  const token = event.target.closest(".t");
  return token && token.place;
}

function go(place) {
  const { rows } = panes[place.pane];
  const { tokens } = rows[Math.max(0, Math.min(place.row, rows.length - 1))];
  const token = tokens[Math.max(0, Math.min(place.token, tokens.length - 1))];
  token.focus();
  token.scrollIntoView({ block: "nearest" });
}

// The token of the next line (step 1) or the line before (-1) that stands nearest.
function acrossLines({ pane, row, token }, step) {
  const { tokens } = panes[pane].rows[row];
  // The last of its parts: the space before a word may hang at the end of the line above.
  const box = (i) => [...tokens[i].getClientRects()].at(-1);
  const here = box(token);
  let best = token;
  let nearest = Infinity;
  let line = null;
  for (let i = token + step; i >= 0 && i < tokens.length; i += step) {
    const there = box(i);
    if (Math.abs(there.top - here.top) < 4) continue;
    line ??= there.top;
    if (Math.abs(there.top - line) >= 4) break;
    if (Math.abs(there.left - here.left) < nearest) {
      nearest = Math.abs(there.left - here.left);
      best = i;
    }
  }
  return { pane, row, token: best };
}

function moveLayer(step) {
  if (stacked) return go({ ...current, row: current.row + step });
  controls.layer.valueAsNumber += step;
  paint();
}

function pressed(event) {
  const place = tokenAt(event);
  if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
  const { pane, row, token } = place;
  const { text } = panes[pane];
  const passage = token - token % text.columns;
  const chooseOf = (n) => {
    const choices = choicesOf(layerOf(panes[pane], row), token);
    if (n < choices.length) choose(pane, choices[n].expert);
  };
  const actions = {
    ArrowRight: () => go({ pane, row, token: token + 1 }),
    ArrowLeft: () => go({ pane, row, token: token - 1 }),
    ArrowDown: () => go(acrossLines(place, 1)),
    ArrowUp: () => go(acrossLines(place, -1)),
    Home: () => go({ pane, row, token: passage }),
    End: () => go({ pane, row, token: passage + text.columns - 1 }),
    Enter: () => chooseOf(0),
    " ": () => chooseOf(0),
    "+": () => moveLayer(1),
    "-": () => moveLayer(-1),
  };
  const action = /^[1-9]$/.test(event.key) ? () => chooseOf(Number(event.key) - 1) : actions[event.key];
  if (action) {
    event.preventDefault();
    action();
  }
}

function start() {
  const shared = (n) => data.checkpoints[n].text === data.checkpoints[0].text;
  const last = data.checkpoints.length - 1;
  controls.right.append(make("option", { value: NONE }, "none"));
  data.checkpoints.forEach(({ name }, n) => {
    for (const list of [controls.left, controls.right]) list.append(make("option", { value: n }, name));
  });
  controls.right.value = last > 0 && shared(last) ? last : NONE;
  writeColors();
  find("headline").textContent = data.headline;
  find("limits").textContent = data.limits;
  controls.layer.parentElement.hidden = stacked;

  followTheme();
  controls.left.addEventListener("change", rebuild);
  controls.right.addEventListener("change", rebuild);
  controls.layer.addEventListener("input", paint);
  find("numbers").addEventListener("change", (event) =>
    find("panes").classList.toggle("numbers", event.target.checked));

  const field = find("panes");
  field.addEventListener("keydown", pressed);
  field.addEventListener("focusin", (event) => {
    const place = tokenAt(event);
    if (!place) return;
    current = place;
    mark();
    showToken(place);
    if (stacked) showExperts();
  });
  // Pointing previews; away from the text the token that has the focus is shown again, so that
  // its experts can be reached with the mouse.
  field.addEventListener("pointerover", (event) => {
    const place = tokenAt(event);
    if (place) showToken(place);
  });
  field.addEventListener("pointerleave", () => showToken(current));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      for (const pane of panes) pane.expert = NONE;
      paint();
    }
  });
  rebuild();
}

start();
