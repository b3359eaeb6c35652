// The page of explorer.py: settings in, three canvases and a table out. Mathematics is in
// explorer_scores.js, which stands before this file.
"use strict";

const RULES = { sips: "SIPS", cosine: "cosine", dot: "dot product" };
const DASHES = { sips: [], cosine: [9, 4], dot: [2, 3] };
const READ_BY_SIPS = new Set(["beta", "gamma", "p"]);
const DRAFT = 5e6, WHOLE = 2.5e7; // scores of a plane while a slider moves, and when it rests
const MOST_CELLS = 320, STEPS = 720; // across the plane; around the circle
const LEVELS = 10; // on either side of the neutral logit
const MARGIN = 40; // of a plane's axes

// name, title, least, largest, step; those of a set of anchors get their ends from it
const SETTINGS = [
  ["beta", "beta", 0, 1, 0.01], ["gamma", "gamma", 0.1, 5, 0.1], ["p", "p", 1, 20, 0.5],
  ["temperature", "temperature", 0.02, 4, 0.02], ["heads", "heads (anchors per expert)", 1, 1, 1],
  ["experts", "experts", 2, 2, 1], ["spread", "spread of |k|", 0, 1, 0.05],
];
const VIEW = [
  ["radius", "|q|, radius of the circle", 0.05, 4, 0.05], ["angle", "angle of q, degrees", -180, 180, 1],
  ["shown", "expert of the landscape", 0, 0, 1], ["reach", "plane to |q1|, |q2|", 1, 20, 0.5],
];

let state = {}; // a slider shows its value rounded to its step; this is what counts
let refining = 0;

function slider([name, title, min, max, step], parent) {
  const input = make("input", { type: "range", id: name, min, max, step });
  const output = make("output", { htmlFor: name, id: `${name}-value` });
  input.addEventListener("input", () => {
    state[name] = input.valueAsNumber;
    changed();
  });
  parent.append(make("label", { className: "slider" }, make("span", { textContent: title }), output, input));
}

// ---- settings --------------------------------------------------------------------------------

const current = () => data.sets[state.set];

function choose(set) {
  const { settings, anchors, spreads } = data.sets[set];
  const longest = Math.max(...anchors.flat().map(([x, y]) => Math.hypot(x, y)));
  state = {
    ...settings, set, heads: spreads ? 4 : anchors[0].length, shown: 0, radius: 2, angle: 45,
    experts: spreads ? Math.min(8, anchors.length) : anchors.length, spread: 0,
    reach: Math.max(data.reach, Math.ceil(2.2 * longest) / 2),
  };
  find("heads").max = anchors[0].length;
  find("experts").max = anchors.length;
  for (const name of ["experts", "spread"]) find(name).parentElement.hidden = !spreads;
  find("try-spread").hidden = !spreads;
  find("try-heads").hidden = anchors[0].length === 1;
  find("set").value = set;
}

// Anchors as the sliders have them: the first experts, drawn ones with their lengths.
function anchorsNow() {
  const { anchors, spreads } = current();
  return anchors.slice(0, state.experts).map((expert, n) =>
    expert.map(([x, y], head) => {
      const size = spreads ? Math.exp(state.spread * spreads[n][head]) : 1;
      return [x * size, y * size];
    }));
}

function showSettings() {
  find("radius").max = state.reach;
  state.radius = Math.min(state.radius, state.reach);
  find("shown").max = state.experts - 1;
  state.shown = Math.min(state.shown, state.experts - 1);
  for (const [name] of [...SETTINGS, ...VIEW]) {
    const input = find(name);
    input.max = Math.max(input.max, state[name]);
    input.min = Math.min(input.min, state[name]);
    input.value = state[name];
    find(`${name}-value`).textContent = String(+state[name].toPrecision(4));
    const unread = READ_BY_SIPS.has(name) && state.scoring !== "sips";
    input.parentElement.classList.toggle("unread", unread);
    input.disabled = unread;
  }
  for (const radio of document.getElementsByName("scoring")) radio.checked = radio.value === state.scoring;
}

// ---- drawing ---------------------------------------------------------------------------------

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// A canvas in pixels of the screen, measured in those of the page.
function canvas(id) {
  const element = find(id);
  const ratio = window.devicePixelRatio || 1;
  const width = element.clientWidth, height = element.clientHeight;
  element.width = Math.round(width * ratio);
  element.height = Math.round(height * ratio);
  const pen = element.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  pen.strokeStyle = pen.fillStyle = color("--ink");
  return { pen, width, height };
}

// Colors of values from -1 to 1, blue over white to red.
const HEAT = Array.from({ length: 255 }, (_, n) => {
  const stops = data.diverging.map(rgb), place = n / 254 * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((part, at) => part + (stops[low + 1][at] - part) * (place - low));
});
const diverging = (value) => HEAT[Math.round(127 * (Math.max(-1, Math.min(1, value)) + 1))];

// A picture of cells; ``line(n, m)`` says whether neighbors have a line between them.
function picture(cells, colorOf, line, ink) {
  const image = new OffscreenCanvas(cells, cells), pen = image.getContext("2d");
  const pixels = pen.createImageData(cells, cells);
  for (let n = 0; n < cells * cells; n++) {
    const right = (n + 1) % cells ? n + 1 : n, below = n + cells < cells * cells ? n + cells : n;
    const cell = line(n, right) || line(n, below) ? ink : colorOf(n);
    pixels.data.set([...cell, 255], 4 * n);
  }
  pen.putImageData(pixels, 0, 0);
  return image;
}

// Side of a plane; a browser may ask for a picture before the window has any room.
const room = (width, height) => Math.max(0, Math.min(width, height) - MARGIN);

// A plane with axes, anchors, the circle and the query; ``mine`` are the experts whose anchors show.
function plane(id, image, anchors, mine) {
  const { pen, width, height } = canvas(id);
  const size = room(width, height), { reach } = state;
  const at = ([x, y]) => [MARGIN + size * (x / reach + 1) / 2, size * (1 - y / reach) / 2];
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image, MARGIN, 0, size, size);
  pen.strokeRect(MARGIN, 0, size, size);
  for (const part of [-1, -0.5, 0, 0.5, 1]) {
    const text = String(+(part * reach).toPrecision(3));
    const [x, y] = at([part * reach, part * reach]);
    pen.textAlign = part === 1 ? "right" : "center";
    pen.fillText(text, x, size + 15);
    pen.textAlign = "right";
    pen.fillText(text, MARGIN - 5, Math.max(9, Math.min(size, y + 4)));
  }
  pen.textAlign = "center";
  pen.fillText("q1", MARGIN + size / 2, size + 31);
  pen.fillText("q2", 9, size / 2);
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN, 0, size, size);
  pen.clip();
  mine.forEach((expert) => anchors[expert].slice(0, state.heads).forEach((anchor) => {
    pen.beginPath();
    pen.arc(...at(anchor), 4.5, 0, 2 * Math.PI);
    pen.fillStyle = data.colors[expert];
    pen.fill();
    pen.lineWidth = 1.5;
    pen.strokeStyle = "#000000";
    pen.stroke();
  }));
  outlined(pen, () => {
    pen.beginPath();
    pen.arc(...at([0, 0]), size * state.radius / reach / 2, 0, 2 * Math.PI);
  });
  const [x, y] = at(query());
  outlined(pen, () => {
    pen.beginPath();
    [[0, -8], [8, 0], [0, 8], [-8, 0]].forEach(([a, b]) => pen.lineTo(x + a, y + b));
    pen.closePath();
  });
  return { pen, at, size };
}

// Black on white, seen on every color.
function outlined(pen, draw) {
  for (const [ink, width] of [["#ffffff", 4], ["#000000", 1.6]]) {
    pen.strokeStyle = ink;
    pen.lineWidth = width;
    draw();
    pen.stroke();
  }
}

const query = () => circlePoint(state.angle);
const circlePoint = (degrees) => [
  state.radius * Math.cos(degrees * Math.PI / 180), state.radius * Math.sin(degrees * Math.PI / 180),
];

function drawPlanes(anchors, cells, draft) {
  const { reach, heads, shown } = state;
  const found = atQueries(planeQueries(reach, cells), anchors, heads, state, shown);
  const { first, logit } = found;
  // White is the logit where every score is 0; the colors reach as far as the logits.
  const neutral = Math.log(heads) / state.temperature;
  const away = logit.map((value) => value - neutral);
  const largest = away.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-12);
  const level = away.map((value) => Math.floor(value / largest * LEVELS));
  const lines = (kinds) => (n, m) => !draft && kinds[n] !== kinds[m];
  const heat = picture(cells, (n) => diverging(away[n] / largest), lines(level), [140, 115, 40]);
  plane("landscape", heat, anchors, [shown]).pen.restore();
  find("landscape-title").textContent = `Landscape: logit of expert ${shown} (${RULES[state.scoring]})`;
  find("landscape").ariaLabel = `Logit of expert ${shown} over the routing plane, within ${largest.toPrecision(3)} of ${neutral.toPrecision(3)}`;
  find("low").textContent = `logit ${(neutral - largest).toPrecision(3)}`;
  find("high").textContent = (neutral + largest).toPrecision(3);
  find("levels").textContent = `white: ${+neutral.toPrecision(3)} (all scores 0); a line every ${(largest / LEVELS).toPrecision(3)}`;
  const bar = find("scale"), pen = bar.getContext("2d");
  bar.width = 201;
  bar.height = 1;
  for (let n = 0; n <= 200; n++) {
    pen.fillStyle = `rgb(${diverging(n / 100 - 1)})`;
    pen.fillRect(n, 0, 1, 1);
  }
  const colors = data.colors.map(rgb);
  const areas = picture(cells, (n) => colors[first[n]], lines(first), [0, 0, 0]);
  const regions = plane("regions", areas, anchors, anchors.map((_, n) => n));
  label(regions, first, cells);
  const seen = [...new Set(first)].sort((a, b) => a - b);
  find("finding").textContent = countRegions(seen, anchors.length);
  find("regions").ariaLabel = `First experts on the plane: ${seen.join(", ")}`;
}

// "3 of 8 experts have no region: 3, 4, 7 are first nowhere on this plane."
function countRegions(seen, experts) {
  const none = Array.from({ length: experts }, (_, n) => n).filter((n) => !seen.includes(n));
  if (!none.length) return `Each of the ${experts} experts is first somewhere on this plane.`;
  const most = 10, named = none.slice(0, most).join(", ") + (none.length > most ? " and others" : "");
  const have = none.length === 1 ? "has" : "have", are = none.length === 1 ? "is" : "are";
  return `${none.length} of ${experts} experts ${have} no region: ${named} ${are} first nowhere on this plane.`;
}

// The number of every expert where its regions are widest: the cell farthest from their borders.
function label({ pen, size }, first, cells) {
  const depth = new Int32Array(cells * cells);
  const step = (n, others) => {
    const near = (m) => m >= 0 && m < first.length && Math.abs(m % cells - n % cells) <= 1;
    return Math.min(...others.map((m) => (near(m) && first[m] === first[n] ? depth[m] : 0))) + 1;
  };
  for (let n = 0; n < first.length; n++) depth[n] = step(n, [n - 1, n - cells, n - cells - 1, n - cells + 1]);
  for (let n = first.length - 1; n >= 0; n--) {
    depth[n] = Math.min(depth[n], step(n, [n + 1, n + cells, n + cells + 1, n + cells - 1]));
  }
  const places = new Map();
  depth.forEach((value, n) => {
    if (value > (places.get(first[n])?.value ?? 0)) places.set(first[n], { value, n });
  });
  pen.font = "bold 14px system-ui, sans-serif";
  pen.textAlign = "center";
  pen.lineJoin = "round";
  for (const [expert, { value, n }] of places) {
    if (value * size / cells < 9) continue;
    const x = MARGIN + (n % cells + 0.5) * size / cells, y = (Math.floor(n / cells) + 0.5) * size / cells + 5;
    pen.strokeStyle = "#ffffff";
    pen.lineWidth = 4;
    pen.strokeText(expert, x, y);
    pen.fillStyle = "#000000";
    pen.fillText(expert, x, y);
  }
  pen.restore();
}

function drawCircle(anchors) {
  const { pen, width, height } = canvas("circle");
  const left = 48, right = 22, top = 8, bottom = 58, band = 12;
  const w = width - left - right, h = height - top - bottom;
  const queries = circleQueries(state.radius, STEPS);
  const found = Object.fromEntries(Object.keys(RULES).map((scoring) =>
    [scoring, atQueries(queries, anchors, state.heads, { ...state, scoring })]));
  const most = Math.max(...Object.values(found).flatMap((one) => one.probability));
  const end = [0.02, 0.04, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1].find((value) => most <= value + 1e-9) ?? 1;
  const at = (degrees, value) => [left + w * (degrees + 180) / 360, top + h * (1 - value / end)];
  pen.textAlign = "right";
  for (let n = 0; n <= 4; n++) {
    const [x, y] = at(-180, end * n / 4);
    pen.fillText((end * n / 4).toFixed(3).replace(/0$/, ""), x - 6, y + 4);
    pen.fillStyle = color("--line");
    pen.fillRect(x, y, w, 1);
    pen.fillStyle = color("--ink");
  }
  pen.textAlign = "center";
  for (let degrees = -180; degrees <= 180; degrees += 60) {
    pen.fillText(`${degrees}°`, at(degrees, 0)[0], top + h + band + 20);
  }
  pen.fillText("angle of q", left + w / 2, height - 6);
  found[state.scoring].first.forEach((expert, n) => {
    pen.fillStyle = data.colors[expert];
    pen.fillRect(left + w * n / STEPS - 0.5, top + h + 4, w / STEPS + 1, band);
  });
  const draw = (points, ink, dash, thick) => {
    pen.strokeStyle = ink;
    pen.lineWidth = thick;
    pen.setLineDash(dash);
    pen.beginPath();
    points.forEach((point) => pen.lineTo(...point));
    pen.stroke();
    pen.setLineDash([]);
  };
  const even = 1 / anchors.length;
  draw([at(-180, even), at(180, even)], color("--soft"), [1, 4], 1.5);
  const others = Object.keys(RULES).filter((scoring) => scoring !== state.scoring);
  for (const scoring of [state.scoring, ...others]) { // the thick one below
    const { probability } = found[scoring];
    const points = probability.map((value, n) => at(360 * n / STEPS - 180, value));
    draw(points, data.rules[scoring], DASHES[scoring], scoring === state.scoring ? 4 : 1.8);
  }
  draw([at(state.angle, 0), at(state.angle, end)], color("--ink"), [], 1);
  const { first, probability } = found[state.scoring];
  const title = `Probability of the first expert on the circle |q| = ${+state.radius.toPrecision(3)}`;
  find("circle-title").textContent = title;
  find("circle").ariaLabel = `${title}, ${RULES[state.scoring]}: from ${Math.min(...probability).toPrecision(3)} `
    + `to ${Math.max(...probability).toPrecision(3)}, experts ${[...new Set(first)].join(", ")}`;
}

function drawLegend() {
  const sample = (ink, dash, thick) =>
    `<svg width="34" height="8" aria-hidden="true"><line x1="0" x2="34" y1="4" y2="4" stroke="${ink}" `
    + `stroke-width="${thick}" stroke-dasharray="${dash}"/></svg>`;
  const rows = Object.entries(RULES).map(([scoring, name]) => {
    const chosen = scoring === state.scoring;
    return `<span>${sample(data.rules[scoring], DASHES[scoring], chosen ? 4 : 1.8)}${name}${chosen ? " (chosen)" : ""}</span>`;
  });
  find("lines").innerHTML = rows.join("") + `<span>${sample(color("--soft"), [1, 4], 1.5)}even, 1 / ${state.experts}</span>`
    + "<span>band: first expert of the chosen score</span>";
}

function showQuery(anchors) {
  const [x, y] = query();
  const effective = effectiveAnchors(anchors, state.heads, state);
  const logits = logitsAt(x, y, effective, state.heads, state, new Float64Array(anchors.length));
  const { first, probability } = firstOf(logits);
  const order = [...logits.keys()].sort((a, b) => logits[b] - logits[a]);
  find("query-title").textContent =
    `At q = (${x.toFixed(2)}, ${y.toFixed(2)}): margin ${(logits[order[0]] - logits[order[1]]).toPrecision(3)}`;
  find("query").tBodies[0].replaceChildren(...order.slice(0, 4).map((expert) => {
    const share = probability * Math.exp(logits[expert] - logits[first]);
    const bar = make("i");
    Object.assign(bar.style, { width: `${100 * share}%`, background: data.colors[expert] });
    const texts = [expert, logits[expert].toFixed(4), share.toFixed(4)];
    return make("tr", {}, ...texts.map((text) => make("td", { textContent: text })), make("td", {}, bar));
  }));
}

// ---- what happens ----------------------------------------------------------------------------

function draw(cells, draft) {
  const anchors = anchorsNow();
  drawPlanes(anchors, cells, draft);
  drawCircle(anchors);
  drawLegend();
  showQuery(anchors);
}

// A draft at once where a whole picture takes long, and that when the slider rests.
function changed(moving = true) {
  showSettings();
  const cells = (work) => Math.min(MOST_CELLS, Math.floor(Math.sqrt(work / (state.experts * state.heads))));
  const draft = moving && cells(DRAFT) < cells(WHOLE);
  draw(cells(draft ? DRAFT : WHOLE), draft);
  clearTimeout(refining);
  if (draft) refining = setTimeout(() => changed(false), 150);
}

SETTINGS.forEach((one) => slider(one, find("sliders")));
VIEW.forEach((one) => slider(one, find("query-sliders")));
data.sets.forEach(({ name }, n) => find("set").append(make("option", { value: n, textContent: name })));
find("set").addEventListener("change", (event) => { choose(Number(event.target.value)); changed(); });
find("controls").addEventListener("reset", (event) => { event.preventDefault(); choose(state.set); changed(); });
find("controls").addEventListener("submit", (event) => event.preventDefault());
for (const radio of document.getElementsByName("scoring")) {
  radio.addEventListener("change", () => { state.scoring = radio.value; changed(); });
}
for (const id of ["landscape", "regions"]) {
  find(id).addEventListener("click", ({ offsetX, offsetY, target }) => {
    const size = room(target.clientWidth, target.clientHeight);
    const x = state.reach * (2 * (offsetX - MARGIN) / size - 1), y = state.reach * (1 - 2 * offsetY / size);
    state.radius = Math.max(0.05, Math.hypot(x, y));
    state.angle = Math.atan2(y, x) * 180 / Math.PI;
    state.reach = Math.max(state.reach, state.radius);
    changed();
  });
}
window.addEventListener("resize", () => changed());
choose(0);
followTheme(() => changed(false));
