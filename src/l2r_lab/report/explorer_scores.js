// Scores over the routing plane, the same functions as l2r.functional (equation numbers of the
// paper), for queries q = (x, y) of rank 2. No page, so that tests can run it by itself.
//
// Settings: scoring ("sips", "cosine" or "dot"), gamma, beta, p, temperature, eps, and scale and
// shift, which make the norm that phi sees: scale |q| + shift (BatchNorm of |q|; else 1 and 0).
"use strict";

// Query magnitude transform, Eq. 9.
function phi(rho, settings) {
  return settings.gamma * (1 + settings.beta * Math.tanh(settings.scale * rho + settings.shift));
}

// Anchor magnitude transform, Eq. 11.
function psi(kappa, p) {
  return 1 + (kappa - 1) / p;
}

// What a query's vector meets: k, k / |k| or psi(|k|) k / |k| of every anchor, one after another.
// anchors[expert][head] = [x, y]; the first ``heads`` of every expert count.
function effectiveAnchors(anchors, heads, settings) {
  const flat = new Float64Array(anchors.length * heads * 2);
  let place = 0;
  for (const expert of anchors) {
    for (let head = 0; head < heads; head++) {
      const [x, y] = expert[head];
      const kappa = Math.hypot(x, y);
      let size = 1;
      if (settings.scoring !== "dot") size /= Math.max(kappa, settings.eps);
      if (settings.scoring === "sips") size *= psi(kappa, settings.p);
      flat[place++] = x * size;
      flat[place++] = y * size;
    }
  }
  return flat;
}

// Factor of the query: 1 for the dot product (Eq. 7), 1 / |q| for the cosine, phi / |q| for SIPS.
function queryFactor(x, y, settings) {
  if (settings.scoring === "dot") return 1;
  const rho = Math.hypot(x, y);
  const factor = settings.scoring === "sips" ? phi(rho, settings) : 1;
  return factor / Math.max(rho, settings.eps);
}

// Logits of all experts at one query into ``logits``: log-sum-exp over the anchors (Eq. 13) of the
// scores (Eq. 8), divided by the temperature (Eq. 2).
function logitsAt(x, y, effective, heads, settings, logits) {
  const factor = queryFactor(x, y, settings);
  for (let expert = 0, place = 0; expert < logits.length; expert++) {
    const start = place;
    let largest = -Infinity;
    for (let head = 0; head < heads; head++, place += 2) {
      const score = factor * (x * effective[place] + y * effective[place + 1]);
      if (score > largest) largest = score;
    }
    let sum = 1; // of one anchor alone: exp(0)
    if (heads > 1) {
      sum = 0;
      for (let at = start; at < place; at += 2) {
        sum += Math.exp(factor * (x * effective[at] + y * effective[at + 1]) - largest);
      }
    }
    logits[expert] = (largest + Math.log(sum)) / settings.temperature;
  }
  return logits;
}

// First expert, and its probability under the softmax over all experts.
function firstOf(logits) {
  let first = 0;
  for (let expert = 1; expert < logits.length; expert++) {
    if (logits[expert] > logits[first]) first = expert;
  }
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - logits[first]);
  return { first, probability: 1 / sum };
}

// Each query of a list: first expert, its probability, and the logit of ``expert``.
function atQueries(queries, anchors, heads, settings, expert = 0) {
  const effective = effectiveAnchors(anchors, heads, settings);
  const logits = new Float64Array(anchors.length);
  const found = { first: [], probability: [], logit: [] };
  for (const [x, y] of queries) {
    logitsAt(x, y, effective, heads, settings, logits);
    const { first, probability } = firstOf(logits);
    found.first.push(first);
    found.probability.push(probability);
    found.logit.push(logits[expert]);
  }
  return found;
}

// The plane from -reach to reach in cells, row by row from the top, each at its center.
function planeQueries(reach, cells) {
  const queries = [];
  const at = (n) => reach * ((2 * n + 1) / cells - 1);
  for (let row = 0; row < cells; row++) {
    for (let column = 0; column < cells; column++) queries.push([at(column), -at(row)]);
  }
  return queries;
}

// A circle of queries, at angles in degrees from -180 to 180.
function circleQueries(radius, steps) {
  return Array.from({ length: steps + 1 }, (_, n) => {
    const turn = Math.PI * ((2 * n) / steps - 1);
    return [radius * Math.cos(turn), radius * Math.sin(turn)];
  });
}
