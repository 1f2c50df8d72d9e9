"use strict";
// Draws status.json, again and again. Every text goes in as text, never as markup: peers choose
// some of it.
const SVG = "http://www.w3.org/2000/svg", PERIOD_MS = 3000;
const LIMIT_MS = 40000;  // of one answer; the server gives one up before
const LANES = 12;  // of more replicas each is a line of dots
const at = id => document.getElementById(id);
const asked = new URLSearchParams(location.search).get("peer") || "";  // an id, or the end of one
let me = "", last = null, heardAt = 0, due = 0, asking = false;

function make(parent, name, attributes = {}, text = null) {
  const svg = parent.namespaceURI === SVG || name === "svg";
  const node = svg ? document.createElementNS(SVG, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.appendChild(node);
  return node;
}
function fill(id, text) { const node = at(id); if (node.textContent !== text) node.textContent = text; }
/* A command: of its words only the invite may be broken. */
function command(node, text) {
  if (node.textContent === text) return;  // else what somebody selects is lost
  node.replaceChildren();
  for (const part of text.split(/((?:--\S+|\.) \S+|\S{40,})/))
    make(node, "span", {class: /^(--|\. )/.test(part) ? "whole" : part.length < 40 ? "" : "long"}, part);
}
function show(id, shown) { at(id).hidden = !shown; }

// ---- numbers and times ----------------------------------------------------------------------------
const known = value => value !== null && value !== undefined;
function short(number, digits = 3) {
  if (!known(number)) return "–";
  for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]])
    if (Math.abs(number) >= size * 0.99995) return Number((number / size).toPrecision(digits)) + unit;
  return String(Number(number.toPrecision(digits)));
}
function whole(number) { return number.toLocaleString("en-US", {maximumFractionDigits: 0}); }
function count(number, one, many = one + "s") { return `${whole(number)} ${number === 1 ? one : many}`; }
function percent(share) { return known(share) ? (100 * share).toFixed(1) + " %" : "–"; }
function loss(value) { return known(value) ? value.toFixed(4) : "–"; }
const iso = seconds => new Date(seconds * 1000).toISOString();
const day = seconds => iso(seconds).slice(0, 10);
function clock(seconds, now) {
  return (now - seconds > 43200 ? iso(seconds).slice(5, 10) + " " : "") + iso(seconds).slice(11, 16);
}
function ago(seconds) {
  if (seconds < 90) return Math.max(0, Math.round(seconds)) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return seconds < 129600 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
}
const lasted = hours => hours < 1 ? `${Math.round(60 * hours)} min` : `${short(hours)} h`;
const lastSix = id => id.slice(-6);
const roundName = round => round < 0 ? "start" : `round ${round}`;
const capital = sentence => sentence[0].toUpperCase() + sentence.slice(1);

// ---- what the figures say together ----------------------------------------------------------------
function roundsOf(status) {
  return (status.curve || []).map(
    ([round, tokens, at, train, validation, low, high, speed, peers, trainLow, trainHigh]) =>
      ({round, tokens, at, train, validation, low, high, speed, peers, trainLow, trainHigh}));
}
/* Rows [at, tokens a second, peers]: of the rounds before this monitor looked, then its own looks.
   Nothing before the first peer, nothing after the last one of a run that has ended. */
function timesOf(status, rounds) {
  const own = status.throughput || [], from = own.length ? own[0][0] : Infinity;
  const rows = rounds.filter(each => known(each.at) && known(each.speed) && each.at < from)
    .map(each => [each.at, each.speed, each.peers]).concat(own);
  let first = 0, end = rows.length;
  while (first < end && !rows[first][2] && !rows[first][1]) first++;
  if (status.health.state === "ended") while (end > first && !rows[end - 1][2]) end--;
  return thinned(rows.slice(first, end));
}
/* Means of what stands closer than a line can show. */
function thinned(rows, most = 180) {
  if (rows.length < 2) return rows;
  const from = rows[0][0], size = (rows[rows.length - 1][0] - from) / most, bins = new Map();
  for (const row of rows) {
    const bin = Math.floor((row[0] - from) / size);
    bins.set(bin, (bins.get(bin) || []).concat([row]));
  }
  const mean = (bin, column) => {
    const values = bin.map(row => row[column]).filter(known);
    return values.length ? values.reduce((a, b) => a + b) / values.length : null;
  };
  return [...bins.values()].map(bin => [bin[bin.length - 1][0], mean(bin, 1), bin[bin.length - 1][2]]);
}
const begunOf = (status, rounds) =>
  Math.min(...rounds.map(each => each.at).filter(known), status.since);
function bestOf(rounds) {
  return rounds.filter(each => known(each.validation))
    .reduce((a, b) => !a || b.validation <= a.validation ? b : a, null);
}
const lastRoundAt = (status, rounds) => Math.max(
  ...status.stages.map(stage => stage.last_round_at || 0), ...rounds.map(each => each.at || 0));
const bare = stage => stage.peers.length === 0;
const begunWith = status => status.stages.some(stage => !bare(stage) || stage.round !== null);

// ---- charts ---------------------------------------------------------------------------------------
function steps(low, high, wanted) {
  const rough = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 2.5, 5, 10].map(each => each * power).find(each => each >= rough * 0.999);
  const found = [];
  for (let n = Math.ceil(low / size - 1e-9); n * size <= high + size * 1e-9; n++) found.push(n * size);
  return found.map(each => Number(each.toPrecision(12)));
}
function logSteps(low, high, wanted) {
  if (high / low < 8) return steps(low, high, wanted);
  const all = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const lead of [1, 2, 5]) all.push(lead * 10 ** power);
  const inside = all.filter(each => each >= low * 0.999 && each <= high * 1.001);
  const tens = inside.filter(each => Math.abs(Math.log10(each) % 1) < 1e-6);
  return inside.length > wanted * 1.6 && tens.length > 1 ? tens : inside;
}
function timeSteps(low, high, wanted) {
  const sizes = [5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800,
    604800, 2592000];
  const size = sizes.find(each => (high - low) / each <= wanted) || sizes[sizes.length - 1];
  const [from, to] = size >= 86400 ? [5, 10] : size < 60 ? [11, 19] : [11, 16];
  const found = [];
  for (let n = Math.ceil(low / size); n * size <= high; n++) found.push([n * size, iso(n * size).slice(from, to)]);
  return found;
}
/* Points [x, y] in pieces: parted where `apart` says so of two neighbours. */
function pieces(points, apart) {
  const found = [];
  points.forEach((point, n) => {
    if (n === 0 || apart(points[n - 1], point)) found.push([]);
    found[found.length - 1].push(point);
  });
  return found;
}
/* Where a label may stand beside a point: [how unwelcome, left edge, base line]. */
function labelPlaces(x, y, wide) {
  return [14, 20, 27, 34, 42, 50].flatMap((gap, n) => [-4, 4 - wide, -wide / 2, 10, -wide - 10].flatMap(shift =>
    [[n, x + shift, y + gap + 6], [n, x + shift, y - gap + 2]]));
}
/* How many points of these lines, one each few pixels, are in a box. */
function hits(lines, left, right, top, bottom) {
  let found = 0;
  for (const line of lines) line.slice(1).forEach(([x, y], n) => {
    const [fromX, fromY] = line[n], parts = Math.ceil(Math.hypot(x - fromX, y - fromY) / 4) || 1;
    for (let part = 0; part <= parts; part++) {
      const px = fromX + (x - fromX) * part / parts, py = fromY + (y - fromY) * part / parts;
      if (px > left && px < right && py > top && py < bottom) found++;
    }
  });
  return found;
}
/* series: {name, pieces, low, high}; options: {label, height, logX, logY, zero, least, ticks,
   readout, best, marks, whole}. Points are [x, y, ...]. */
function chart(id, series, options) {
  const box = at(id), width = Math.max(220, box.clientWidth), height = options.height;
  const left = 46, right = 18, top = 8, bottom = 24;
  box.replaceChildren();
  const svg = make(box, "svg", {width, height, role: "img", "aria-label": options.label});
  const points = series.flatMap(each => each.pieces.flat()), ys = points.map(p => p[1]);
  const bands = series.flatMap(each => each.band || []);
  if (!points.length) {
    make(svg, "text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, options.empty);
    return;
  }
  let lowX = Math.min(...points.map(p => p[0])), highX = Math.max(...points.map(p => p[0]));
  const logX = options.logX && lowX > 0 && highX > lowX;
  if (lowX === highX) { lowX -= options.least; highX += options.least; }
  let lowY = options.zero ? 0 : Math.min(...ys, ...bands.map(p => p[1]));
  let highY = Math.max(...ys, ...bands.map(p => p[2]));
  const logY = options.logY && lowY > 0;
  if (logY) { const room = Math.max(1.02, (highY / lowY) ** 0.06); lowY /= room ** 3; highY *= room; }
  else {
    const room = (highY - lowY || Math.abs(highY) || 1) * 0.08;
    highY += room; if (!options.zero) lowY -= room;
  }
  const place = (v, low, high, log) => log ? Math.log(v / low) / Math.log(high / low) : (v - low) / (high - low);
  const x = v => left + place(v, lowX, highX, logX) * (width - left - right);
  const y = v => height - bottom - place(v, lowY, highY, logY) * (height - top - bottom);
  let above = Infinity;  // of labels one above the other none may touch
  for (const v of (logY ? logSteps : steps)(lowY, highY, height / 48)) {
    if (options.whole && !Number.isInteger(v)) continue;
    if (above - y(v) < 14) continue;
    above = y(v);
    make(svg, "line", {class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v)});
    make(svg, "text", {x: left - 7, y: y(v) + 4, "text-anchor": "end"}, short(v));
  }
  let end = -Infinity;
  for (const [v, text] of options.ticks(lowX, highX, Math.max(2, Math.floor(width / 100)), logX)) {
    const half = text.length * 3.2;  // no label is cut, and none touches another
    const middle = Math.min(Math.max(x(v), half), width - half);
    if (middle - half < end + 8) continue;
    end = middle + half;
    make(svg, "line", {class: "axis", x1: x(v), x2: x(v), y1: height - bottom, y2: height - bottom + 4});
    make(svg, "text", {x: middle, y: height - 5, "text-anchor": "middle"}, text);
  }
  make(svg, "line", {class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom});
  for (const [v, text] of options.marks || []) {
    const line = make(svg, "line", {class: "back", x1: x(v), x2: x(v), y1: top, y2: height - bottom});
    make(line, "title", {}, text);
  }
  const path = line => line.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
  for (const each of series) if (each.band && each.band.length > 1)
    for (const piece of pieces(each.band, each.apart || (() => false)))
      make(svg, "polygon", {class: "band " + each.name, points: path(piece.map(p => [p[0], p[2]])) + " " +
        path(piece.map(p => [p[0], p[1]]).reverse())});
  for (const each of series) {
    for (const piece of each.pieces) {
      if (piece.length > 1) make(svg, "polyline", {class: each.name, points: path(piece)});
      else make(svg, "circle", {class: "dot " + each.name, cx: x(piece[0][0]), cy: y(piece[0][1]), r: 2});
    }
    const tail = each.pieces.length ? each.pieces[each.pieces.length - 1].slice(-1)[0] : null;
    if (tail) make(svg, "circle", {class: "dot " + each.name, cx: x(tail[0]), cy: y(tail[1]), r: 3.5});
  }
  if (options.best) {
    const [a, b] = options.best, text = `best ${loss(b)}`, wide = 7.4 * text.length;
    make(svg, "circle", {class: "ring", cx: x(a), cy: y(b), r: 4});
    const lines = series.flatMap(each => each.pieces).map(piece => piece.map(p => [x(p[0]), y(p[1])]))
      .concat((options.marks || []).map(([v]) => [[x(v), top], [x(v), height - bottom]]));
    const [, leftmost, base] = labelPlaces(x(a), y(b), wide)
      .filter(([, from, at]) => from > left && from + wide <= width - right + 8 && at > top + 12 && at < height - bottom - 3)
      .map(([far, from, at]) => [far + 3 * hits(lines, from - 3, from + wide + 3, at - 13, at + 4), from, at])
      .reduce((one, other) => other[0] < one[0] ? other : one, [Infinity, x(a) - wide, y(b) - 12]);
    make(svg, "text", {class: "best", x: leftmost, y: base}, text);
  }
  const cross = make(svg, "line", {class: "axis", y1: top, y2: height - bottom, visibility: "hidden"});
  svg.addEventListener("pointermove", event => {
    const near = points.reduce((a, b) =>
      Math.abs(x(b[0]) - event.offsetX) < Math.abs(x(a[0]) - event.offsetX) ? b : a);
    cross.setAttribute("x1", x(near[0])); cross.setAttribute("x2", x(near[0]));
    cross.setAttribute("visibility", "visible");
    fill(id + "-readout", options.readout(near));
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden"); fill(id + "-readout", "");
  });
}
function drawLoss(status, rounds) {
  const byTokens = rounds.some(each => each.tokens > 0);
  const rows = byTokens ? rounds.filter(each => each.tokens > 0) : rounds;
  const x = each => byTokens ? each.tokens : each.round;
  const apart = (a, b) =>
    status.rollbacks && status.rollbacks.some(round => a[2].round <= round && round < b[2].round);
  const line = name => pieces(rows.filter(each => known(each[name])).map(each => [x(each), each[name], each]), apart);
  const band = (low, high) => ({apart: (a, b) => apart([0, 0, a[3]], [0, 0, b[3]]),
    band: rows.filter(each => known(each[low]) && known(each[high])).map(each => [x(each), each[low], each[high], each])});
  const best = bestOf(rows);
  const after = round => rows.find(each => each.round > round);
  const marks = (status.rollbacks || []).filter(after).map(round => [x(after(round)), `back to round ${round}`]);
  show("loss-range", rows.some(each => each.high > each.low || each.trainHigh > each.trainLow));
  show("loss-back", marks.length > 0);
  fill("loss-title", byTokens ? "Loss by tokens" : "Loss by round");
  chart("loss", [{name: "second", pieces: line("train"), ...band("trainLow", "trainHigh")},
    {name: "first", pieces: line("validation"), ...band("low", "high")}], {
    label: byTokens ? "loss by tokens" : "loss by round", empty: "no loss has been told yet",
    height: innerWidth < 560 ? 240 : 386, least: byTokens ? rows.length && x(rows[0]) / 2 : 1, logX: byTokens, logY: true,
    best: best && [x(best), best.validation],
    marks,
    ticks: (low, high, n, log) => (log ? logSteps : steps)(low, high, n)
      .filter(v => byTokens || Number.isInteger(v) && v >= -1)
      .map(v => [v, byTokens ? short(v) : v < 0 ? "start" : String(v)]),
    readout: ([, , each]) => roundName(each.round) + (byTokens ? `, ${short(each.tokens)} tokens` : "") +
      `: validation ${loss(each.validation)}, train ${loss(each.train)}`,
  });
}
function drawTimes(status, rounds) {
  const rows = timesOf(status, rounds), height = innerWidth < 560 ? 170 : 150;
  const gaps = rows.slice(1).map((row, n) => row[0] - rows[n][0]).sort((a, b) => a - b);
  const usual = gaps.length ? gaps[Math.floor(gaps.length * 0.9)] : 0;
  const apart = (a, b) => b[0] - a[0] > 4 * usual;  // nobody looked
  const common = {height, empty: "nothing has been seen yet", least: 30, zero: true, ticks: timeSteps};
  const line = column => pieces(rows.filter(row => known(row[column])).map(row => [row[0], row[column]]), apart);
  chart("throughput", [{name: "first", pieces: line(1)}], {...common, label: "tokens a second over time",
    readout: ([time, speed]) => `${clock(time, status.now)}: ${short(speed)} tokens/s`});
  chart("peers", [{name: "third", pieces: line(2)}], {...common, whole: true, label: "peers over time",
    readout: ([time, peers]) => `${clock(time, status.now)}: ${count(peers, "peer")}`});
}

// ---- stages and replicas --------------------------------------------------------------------------
const color = index => `var(--s${index % 8})`;
/* Names that several peers of a stage have: their ids stand beside them. */
function sharedNames(stage) {
  const names = stage.peers.map(peer => peer.name);
  return new Set(names.filter((name, n) => name && names.indexOf(name) < n));
}
function drawPeer(parent, peer, sitsOut, options = {}) {
  const state = ["training", "spare", "joining"].includes(peer.state) ? peer.state : "spare";
  const node = make(parent, "span", {class: `peer ${state} id` + (peer.id === me ? " you" : "") +
    (sitsOut ? " out" : "") + (options.tiny ? " tiny" : "")}, peer.name || lastSix(peer.id));
  if (options.shared && options.shared.has(peer.name)) node.textContent += ` ${lastSix(peer.id)}`;
  const who = peer.name ? `${peer.name} (${peer.id})` : peer.id;
  node.title = `${who}: ${peer.state}, round ${peer.round}, version ${peer.version}` +
    Object.entries(peer.figures).map(([name, value]) => `, ${name} ${percent(value)}`).join("") +
    (peer.dial_out ? ", can only dial out" : "") + (peer.blocked ? "; " + peer.blocked : "") +
    (sitsOut ? "; sits out: what it sent was left out or came too late, again and again" : "");
  return node;
}
function drawStages(status) {
  const box = at("stages"), stages = status.stages, room = box.clientWidth, begun = begunWith(status);
  const most = Math.max(1, Math.floor((room + 8) / (room < 560 ? 116 : 128)));
  const even = [];  // rows of the same length, where they are not much shorter
  for (let n = most; n >= most / 2; n--) if (stages.length % n === 0) even.push(n);
  const columns = even[0] || Math.ceil(stages.length / Math.ceil(stages.length / most));
  box.style.setProperty("--columns", columns);
  box.replaceChildren();
  const busy = new Set(status.replicas.flatMap(replica => replica.members));
  for (const stage of stages) {
    const missing = bare(stage) && begun;
    const card = make(box, "div", {class: "stage" + (missing ? " missing" : bare(stage) ? " open" : "")});
    const title = make(card, "div", {class: "title"});
    make(title, "b", {}, `Stage ${stage.stage}`);
    make(title, "span", {class: missing ? "bad" : ""}, bare(stage) ? missing ? "no peer" : "no peer yet"
      : count(stage.peers.length + stage.more, "peer"));
    const ranks = [...new Set(stage.ranks || [])], facts = [];
    if (stage.round !== null) facts.push(`round ${stage.round}`);
    if (stage.inner_steps !== null) facts.push(`next H ${stage.inner_steps}`);
    if (ranks.length) facts.push(`rank ${ranks.length > 1 ? `${ranks[0]} to ${ranks[ranks.length - 1]}` : ranks[0]}`);
    if (stage.record_bytes !== null) facts.push(short(stage.record_bytes) + "B a record");
    for (const fact of facts) make(card, "span", {}, fact);
    if (stage.unreachable) make(card, "span", {class: "bad",
      title: "all its peers can only dial out: no two of them can average"}, "no way in");
    const free = stage.peers.filter(peer => !busy.has(peer.id));
    if (stage.spares > free.filter(peer => peer.state === "spare").length) make(card, "span", {}, count(stage.spares, "spare"));
    if (!free.length) continue;
    const row = make(card, "div", {class: "free"}), shared = sharedNames(stage), tiny = free.length > 6;
    for (const peer of free) {
      const sitsOut = stage.sits_out.includes(peer.id);
      drawPeer(row, peer, sitsOut, {tiny, shared});
      if (sitsOut && !tiny) make(row, "span", {}, "sits out");
    }
  }
  drawReplicas(status, columns, room);
}
function drawReplicas(status, columns, room) {
  const box = at("replicas"), {stages, replicas} = status;
  box.replaceChildren();
  const lanes = replicas.length <= LANES && columns === stages.length && room / columns >= 84;
  const narrow = room < 560 && stages.length <= 8;
  box.className = lanes ? "lanes" : narrow ? "dots narrow" : "dots";
  box.style.setProperty("--columns", stages.length);
  box.style.setProperty("--strip", `${narrow ? 58 + 12 * stages.length : 127 + Math.max(80, 16 * stages.length)}px`);
  const peers = new Map(stages.flatMap(stage => stage.peers.map(peer => [`${stage.stage} ${peer.id}`, peer])));
  const shared = stages.map(sharedNames), more = status.totals.replicas - replicas.length;
  fill("stages-words", !replicas.length ? "" : (lanes ? "each line is a replica: one peer of every stage"
    : "each line of dots is a replica: one peer of every stage") + "; spares stand in their stage" +
    (more > 0 ? `; ${count(more, "more replica")}` : ""));
  show("replicas", replicas.length > 0);
  replicas.forEach((replica, index) => {
    const line = make(box, "div", {class: "replica"});
    line.style.setProperty("--c", lanes ? color(index) : color(0));
    const head = peers.get(`0 ${replica.head}`);
    line.title = `replica ${lastSix(replica.head)}: round ${replica.round}, inner step ` +
      `${replica.inner_step}, ${short(replica.tokens_per_s)} tokens/s, epoch ${replica.epoch}`;
    const name = (head && head.name) || "", alone = name !== "" && !shared[0].has(name);
    if (!lanes) {
      const label = make(line, "span", {class: "label"});
      if (name && (alone || !narrow)) make(label, "span", {}, name);
      if (!alone) make(label, "span", {class: "id"}, lastSix(replica.head));
    }
    const cells = lanes ? line : make(line, "div", {class: "line"});
    stages.forEach((stage, n) => {
      const cell = make(cells, "div", {class: "cell"}), id = replica.members[n];
      const peer = peers.get(`${stage.stage} ${id}`);
      if (!peer) return;
      const sitsOut = stage.sits_out.includes(id);
      drawPeer(cell, peer, sitsOut, {shared: shared[n]});
      if (lanes && sitsOut) make(cell, "span", {class: "soft"}, "sits out");
    });
  });
}

// ---- what is trained, and how to take part --------------------------------------------------------
function drawIntroduction(status, rounds) {
  const trained = status.trained || {}, ended = status.health.state === "ended";
  fill("about", trained.about || "");
  const facts = [], list = at("trained"), since = begunOf(status, rounds);
  if (trained.model) facts.push(["model", trained.model + (trained.preset ? ` (${trained.preset})` : "") +
    (trained.parameters ? `, ${short(trained.parameters)} parameters` : "") + `, ${count(trained.stages, "stage")}`]);
  if (trained.checkpoint) facts.push(["started from", trained.checkpoint]);
  if (trained.data) facts.push(["data", trained.data.join(", ")
    .replace("stdlib", "the source of Python's standard library")]);
  if (trained.licence) facts.push(["licence", trained.licence]);
  facts.push([since < status.since ? "since" : "watched since", `${day(since)} ${clock(since, since)} UTC`]);
  list.replaceChildren();
  for (const [term, text] of facts) { make(list, "dt", {}, term); make(list, "dd", {}, text); }
  const project = /^https:\/\//.test(trained.project || "") ? trained.project : "";
  fill("join-title", ended ? "Take the model home" : "Take part");
  show("take-part", !ended); show("take-home", ended);
  fill("install-words", "On a Linux machine (x86-64) with Python 3.10 to 3.13" +
    (project ? ":" : ", in a copy of dilocox's folder, which the run's operator has:"));
  command(at("install"), project ? `pip install "dilocox @ git+${project}"` : "make install && . .venv/bin/activate");
  command(at("join"), "dilocox peer " + status.invite);
  command(at("export"), `dilocox export ${status.invite} my-model`);
  command(at("generate"), `dilocox generate ${status.invite} "Once upon a time"`);
  show("project", project !== ""); if (project) at("project").href = project;
}
function drawCalls(status) {
  const box = at("calls");
  const open = status.health.state === "ended" || !begunWith(status) ? [] : status.stages.filter(bare);
  const wanted = open.map(stage => `dilocox peer ${status.invite} --stage ${stage.stage}`).join("\n");
  if (box.dataset.wanted === wanted) return;
  box.dataset.wanted = wanted;
  box.replaceChildren();
  if (!open.length) return;
  const call = make(box, "div", {class: "call"}), one = open.length === 1;
  make(call, "b", {}, one ? `Stage ${open[0].stage} needs a peer. ` : `${open.length} stages need a peer. `);
  make(call, "span", {}, `The run waits for ${one ? "it" : "them"}. With dilocox installed, this takes ` +
    (one ? "it:" : "one:"));
  open.slice(0, 4).forEach(stage => {
    const row = make(call, "div", {class: "command"});
    command(make(row, "pre", {id: `call-${stage.stage}`}), `dilocox peer ${status.invite} --stage ${stage.stage}`);
    make(row, "button", {"data-copies": `call-${stage.stage}`}, "copy");
  });
  if (open.length > 4) make(call, "span", {class: "soft"},
    `and stages ${open.slice(4).map(stage => stage.stage).join(", ")}`);
}
function drawProgress(status) {
  const {totals, health} = status, share = Math.min(1, totals.tokens / (totals.end_tokens || 1));
  const left = totals.end_tokens - totals.tokens;
  show("progress", totals.tokens > 0);
  at("done").style.width = 100 * share + "%";
  fill("progress-tokens", `${short(totals.tokens)} of ${short(totals.end_tokens)} tokens, ${percent(share)}`);
  at("progress-tokens").title = whole(totals.tokens) + " tokens";
  const seconds = health.state === "training" && totals.tokens_per_s > 0 ? left / totals.tokens_per_s : 0;
  fill("progress-left", seconds > 0 && seconds < 3e9 ? `about ${ago(seconds)} left at this pace` +
    (seconds > 86400 ? `, until ${day(status.now + seconds)}` : "") : "");
}
function drawTiles(status, rounds) {
  const totals = status.totals, box = at("tiles"), best = bestOf(rounds);
  const spares = status.stages.reduce((sum, stage) => sum + stage.spares, 0);
  const losses = [["validation", loss(totals.validation), known(totals.validation_round)
    ? `validation, ${roundName(totals.validation_round)}` : "validation loss"],
    ["best", loss(best && best.validation), best ? `best loss, ${roundName(best.round)}` : "best loss"]];
  const began = begunOf(status, rounds), {state} = status.health, ended = state === "ended";
  const until = Math.max(lastRoundAt(status, rounds), ...timesOf(status, rounds).map(row => row[0]));
  const peers = ["peers", whole(totals.peers), `${totals.peers === 1 ? "peer" : "peers"}, ` +
    count(totals.replicas, "replica") + (spares ? `, ${count(spares, "spare")}` : "")];
  const tiles = state !== "training" ? [
    ["tokens", short(totals.tokens), "tokens"], ...losses,
    ["rounds", whole(Math.max(0, ...status.stages.map(stage => stage.rounds))), "rounds"],
    ["contributors", whole(totals.contributors), `${totals.contributors === 1 ? "peer" : "peers"} contributed`],
    ended ? ["took", until > began ? ago(until - began) : "–", `from ${day(began)} on`] : peers,
  ] : [
    ["speed", short(totals.tokens_per_s), "tokens a second"], ...losses,
    ["pace", short(totals.rounds_per_hour), "rounds an hour"], peers,
    ["waiting", percent(totals.waiting), "of the time waiting for averages"],
  ];
  box.replaceChildren();
  for (const [id, text, note] of tiles) {
    const tile = make(box, "div", {class: "tile"});
    make(tile, "b", {id: "tile-" + id}, text); make(tile, "span", {class: "soft", id: "note-" + id}, note);
  }
}

// ---- samples, people, events ----------------------------------------------------------------------
function drawSamples(status) {
  const rows = status.samples || [], box = at("samples"), key = JSON.stringify(rows);
  show("samples-section", rows.length > 0);
  if (!rows.length || box.dataset.key === key) return;
  box.dataset.key = key;
  fill("prompt", rows[0].prompt);
  box.replaceChildren();
  for (const each of rows) {
    const card = make(box, "div", {class: "sample"});
    const when = make(card, "div");
    make(when, "b", {}, `${short(each.tokens)} tokens`);
    make(when, "span", {class: "soft"}, `round ${each.round}`);
    const text = make(card, "blockquote");
    make(text, "span", {class: "soft"}, each.prompt);
    make(text, "span", {}, each.text);
  }
}
/* Which peer the page's address means: of those in view or, by the monitor's answer, in a record. */
function findMe(status, rows) {
  const known = status.stages.flatMap(stage => stage.peers).concat(rows).map(each => each.id);
  const ids = new Set(asked.length < 4 ? [] : known.filter(id => id.endsWith(asked)));
  me = ids.size === 1 ? [...ids][0] : "";
  status.mine = rows.find(row => row.id === me);
  status.you = me && status.mine ? `You are number ${whole(status.mine.rank)} of ${whole(status.totals.contributors)}: ` +
    `${short(status.mine.tokens)} tokens, ${percent(status.mine.share)} of the run.`
    : me ? `Peer ${lastSix(me)} (you) is in no record yet.`
    : ids.size ? `Several ids end in ${asked}: ask for the whole id.`
    : asked ? `No peer in view or in a record has an id that ends in ${lastSix(asked)}.` : "";
}
function drawWho(line, row) {
  const id = row.id, cell = make(line, "td", {class: "who"});
  const who = make(cell, "a", {href: `card/${encodeURIComponent(id)}.svg`});
  if (row.name) { make(who, "span", {}, row.name + " "); make(who, "span", {class: "soft id"}, lastSix(id)); }
  else make(who, "span", {class: "id"}, lastSix(id));
  cell.title = id + (row.here === false ? ": away" : "");
  if (row.here === false) make(cell, "span", {class: "soft"}, " (away)");
  if (id === me) make(cell, "span", {class: "badge"}, "you");
  if (row.team) make(cell, "div", {class: "soft"}, row.team);
}
function drawContributions(status) {
  const {mine} = status, table = at("contributions"), shown = status.contributions;
  const rows = mine && !shown.some(row => row.id === me) ? shown.concat([mine]) : shown, hours = rows.some(row => known(row.hours));
  table.replaceChildren();
  fill("contributors", rows.length ? `${count(status.totals.contributors, "peer")} so far` : "");
  show("you", status.you !== ""); fill("you", status.you);
  if (!rows.length) { make(make(table, "tr"), "td", {class: "soft"}, "none yet"); return; }
  const top = make(table, "tr"), heads = [["", ""], ["peer", ""], ["stage", "number narrow-off"], ["tokens", "number"],
    ["share", "number"]].concat(hours ? [["time", "number narrow-off"]] : [], [["", "wide"]]);
  for (const [text, name] of heads) make(top, "th", {class: name}, text);
  const most = rows[0].tokens || 1;
  for (const row of rows) {
    const line = make(table, "tr", row.id === me ? {class: "you"} : {});
    make(line, "td", {class: "number soft"}, String(row.rank));
    drawWho(line, row);
    make(line, "td", {class: "number narrow-off"}, [].concat(row.stages || []).join(", "));
    make(line, "td", {class: "number", title: whole(row.tokens)}, short(row.tokens));
    make(line, "td", {class: "number"}, percent(row.share));
    if (hours) make(line, "td", {class: "number narrow-off"}, known(row.hours) ? lasted(row.hours) : "–");
    make(make(line, "td", {class: "wide"}), "span", {class: "bar"}).style.width = 100 * row.tokens / most + "%";
  }
}
function drawTeams(status) {
  const rows = (status.teams || []).filter(row => row.team), table = at("teams");
  show("teams-box", rows.length > 0);
  table.replaceChildren();
  for (const row of rows) {
    const line = make(table, "tr");
    make(line, "td", {class: "who"}, row.team);
    make(line, "td", {class: "number soft"}, known(row.peers) ? count(row.peers, "peer") : "");
    make(line, "td", {class: "number", title: whole(row.tokens)}, short(row.tokens));
    make(line, "td", {class: "number"}, percent(row.share));
  }
}
function drawEvents(status) {
  const list = at("events"), rows = status.events || [], {totals} = status;
  list.classList.toggle("dated", rows.some(event => clock(event.at, status.now).length > 5));
  list.replaceChildren();
  if (!rows.length) make(list, "li", {class: "soft"}, `none since ${clock(status.since, status.now)} UTC`);
  for (const event of rows) {
    const line = make(list, "li", {class: event.kind});
    make(line, "time", {}, clock(event.at, status.now));
    make(line, "span", {class: "mark", title: event.kind});
    make(line, "span", {class: "text"}, event.text);
    if (event.count > 1) make(line, "span", {class: "times"}, `${event.count} times`);
  }
  fill("event-count", `${count(totals.joined, "peer")} joined, ${whole(totals.left)} left; times in UTC`);
}

// ---- the whole page -------------------------------------------------------------------------------
function drawTab(status) {
  const {totals, health} = status, share = Math.min(1, totals.tokens / (totals.end_tokens || 1));
  const figures = [capital(health.sentence)];
  if (health.state === "training" && totals.tokens) figures.unshift(`${Math.floor(100 * share)} %`);
  document.title = `${figures.join(" · ")} · ${status.name}`;
  const paint = health.warns ? "#d08700" : {training: "#1a9d5b", ended: "#2f6fde", paused: "#2f6fde",
    waiting: "#d08700"}[health.state] || "#d64545";
  const ring = `<svg xmlns="${SVG}" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6" fill="none" stroke="${paint}"` +
    ` stroke-opacity=".3" stroke-width="3.5"/><circle cx="8" cy="8" r="6" fill="none" stroke="${paint}"` +
    ` stroke-width="3.5" stroke-dasharray="${(37.7 * share).toFixed(1)} 99" transform="rotate(-90 8 8)"/>` +
    `<circle cx="8" cy="8" r="2.5" fill="${paint}"/></svg>`;
  const href = "data:image/svg+xml," + encodeURIComponent(ring);
  if (at("icon").getAttribute("href") !== href) at("icon").setAttribute("href", href);
}
function draw(status) {
  const {health} = status, up = status.bootstraps.filter(Boolean).length, all = status.bootstraps.length;
  const rounds = roundsOf(status);
  fill("name", status.name); fill("run", "run " + status.run.slice(0, 12));
  fill("health", capital(health.sentence));
  at("health").className = health.state + (health.warns ? " warns" : "");
  const newest = lastRoundAt(status, rounds);
  const told = [newest ? `last round ${ago(status.now - newest)} ago`
    : status.stages.some(stage => stage.round !== null) ? "no round seen to come yet" : "no round yet"];
  told.push(all > 1 ? `${up} of ${all} bootstraps answer` : up ? "the bootstrap answers"
    : "the bootstrap does not answer");
  const meaning = {paused: "the operator has paused it: peers keep what they have, and go on when it is resumed",
    ended: (status.totals.tokens >= status.totals.end_tokens ? "all its tokens are trained"
      : "the operator has ended it") + ": the model can be had"}[health.state];
  fill("detail", (meaning ? [meaning] : told).join(", "));
  show("figures", rounds.length > 0 || timesOf(status, rounds).length > 0);
  drawTab(status); drawProgress(status); drawCalls(status); drawIntroduction(status, rounds);
  if (!at("figures").hidden) {
    drawTiles(status, rounds); drawLoss(status, rounds); drawTimes(status, rounds);
  }
  show("stages-section", health.state !== "ended");
  show("people", status.contributions.length > 0 || (status.events || []).length > 0);
  if (health.state !== "ended") drawStages(status);
  drawSamples(status); drawContributions(status); drawTeams(status);
  drawEvents(status);
  fill("foot", `As of ${iso(status.now).slice(0, 19).replace("T", " ")} UTC, ` +
    `by dilocox ${status.version}. A replica's tokens count once; each of its peers has its part of them.`);
}
/* Ask, and again some time after the answer, but not while nobody sees the page. */
async function look() {
  if (asking || document.hidden) return;
  clearTimeout(due);
  asking = true;
  let status = {};
  try {
    const get = async path =>
      (await fetch(path, {cache: "no-cache", signal: AbortSignal.timeout(LIMIT_MS)})).json();
    status = await get("status.json");
    if (status.run) findMe(status, /^\w{4,}$/.test(asked) ? await get(`peer/${asked}.json`) : []);
    show("lost", false);
  } catch (error) {
    fill("lost", "The monitor does not answer" +
      (heardAt ? `; these figures are ${ago((Date.now() - heardAt) / 1000)} old.` : "."));
    show("lost", true);
  }
  asking = false;
  due = setTimeout(look, PERIOD_MS);
  if (status.run) { last = status; heardAt = Date.now(); draw(status); }
}
/* Without TLS there is no clipboard for pages: then what is to be copied is selected first. */
async function copy(button) {
  const source = at(button.dataset.copies), range = document.createRange();
  let done = true;
  try { await navigator.clipboard.writeText(source.textContent); } catch (error) {
    range.selectNodeContents(source);
    getSelection().removeAllRanges(); getSelection().addRange(range);
    done = document.execCommand("copy");
  }
  button.textContent = done ? "copied" : "Ctrl-C";
  setTimeout(() => { button.textContent = "copy"; }, 2000);
}
let width = 0;
addEventListener("resize", () => {
  if (last && document.body.clientWidth !== width) { width = document.body.clientWidth; draw(last); }
});
addEventListener("click", event => {
  if (event.target.dataset && event.target.dataset.copies) copy(event.target);
});
document.addEventListener("visibilitychange", look);
look();
