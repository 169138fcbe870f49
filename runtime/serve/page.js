// Draws the state of the server every second.
"use strict";

const EVERY_MS = 1000, POINTS = 120;
const SVG = "http://www.w3.org/2000/svg";
const byId = (name) => document.getElementById(name);
const series = { tokens: [], first: [], gap: [] };
let before = null, drawn = "";

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function text(name, value, kind) {
  const made = document.createElement(name);
  made.textContent = value;
  if (kind) made.className = kind;
  return made;
}

// Only what differs is written: screen readers say what is.
function put(id, value) {
  if (byId(id).textContent !== String(value)) byId(id).textContent = value;
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes < 1 ? 0 : Math.min(units.length - 1, Math.floor(Math.log2(bytes) / 10));
  return `${(bytes / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function bitsOf(precision) {
  return Number(/^w(\d+)/.exec(precision)[1]);
}

function drawPlan(plan) {
  const key = JSON.stringify(plan);
  if (!plan || key === drawn) return;
  drawn = key;
  const layers = plan.stages.reduce((sum, stage) => sum + stage.bits.length, 0);
  const rate = plan.tokens_per_s === null ? "" : `, ${plan.tokens_per_s.toFixed(0)} tokens/s predicted`;
  byId("plan-text").textContent =
    `${layers} layers over ${plan.stages.length} device${plan.stages.length > 1 ? "s" : ""}, ` +
    `KV cache ${plan.kv}${rate}`;
  byId("stages").replaceChildren(...plan.stages.map(stageCard));
  const all = [...new Set(plan.stages.flatMap((stage) => stage.bits.map(bitsOf)))].sort((a, b) => b - a);
  byId("legend").replaceChildren(...all.map((bits) => {
    const item = document.createElement("li"), box = shape("svg", { viewBox: "0 0 1 1", "aria-hidden": "true" });
    box.append(shape("rect", { width: 1, height: 1, class: `bits-${bits}` }));
    item.append(box, ` ${bits} bits`);
    return item;
  }));
}

function stageCard(stage, index) {
  const card = document.createElement("li"), last = stage.first_layer + stage.bits.length - 1;
  card.className = stage.lost ? "lost" : "";
  const picture = shape("svg", {
    viewBox: `0 0 ${stage.bits.length} 1`, preserveAspectRatio: "none", role: "img",
    "aria-label": `layers ${stage.first_layer} to ${last}: ${stage.bits.join(", ")}`,
  });
  stage.bits.forEach((precision, place) => picture.append(shape("rect", {
    x: place + 0.05, y: 0, width: 0.9, height: 1, class: `bits-${bitsOf(precision)}`,
  })));
  const load = document.createElement("meter");
  load.min = 0; load.max = 1; load.id = `load-${index}`;
  load.setAttribute("aria-label", `load of ${stage.device}`);
  const share = text("p", stage.lost ? "lost; another one is started in its place" : "load", stage.lost ? "lost" : "");
  share.id = `share-${index}`;
  const held = text("p", "");
  held.id = `held-${index}`;
  card.append(
    text("h3", stage.device), text("p", `${stage.kind} on ${stage.node}`),
    text("p", `layers ${stage.first_layer} to ${last}`), picture, held, share, load,
  );
  return card;
}

function drawChart(id, title, values) {
  const chart = byId(id), most = Math.max(1e-9, ...values);
  chart.setAttribute("viewBox", `0 0 ${POINTS} 1`);
  chart.setAttribute("preserveAspectRatio", "none");
  const newest = values.length ? values[values.length - 1] : 0;
  const label = values.length ? `${title}: ${newest.toFixed(1)}, at most ${most.toFixed(1)}` : title;
  chart.setAttribute("aria-label", label);
  put(`${id}-title`, label);
  const points = values.map((value, at) => `${POINTS - values.length + at},${0.95 - 0.9 * value / most}`);
  chart.replaceChildren(shape("polyline", { points: points.join(" ") }));
}

function push(list, value) {
  list.push(value);
  if (list.length > POINTS) list.shift();
}

function draw(state, now) {
  put("model", state.model);
  document.title = `${state.model} - llmpq`;
  put("version", `llmpq ${state.version}`);
  put("status", state.status);
  byId("status").className = state.status;
  put("running", state.running);
  put("waiting", state.waiting);
  const held = state.blocks_held / Math.max(1, state.blocks);
  put("kv", `${Math.round(100 * held)} %`);
  put("kv-text", state.blocks ? `${state.blocks_held} of ${state.blocks} blocks` : "");
  byId("kv-held").value = held;
  put("recoveries", recovered(state.recoveries));
  drawPlan(state.plan);
  dispatchEvent(new CustomEvent("asks", { detail: state.asks }));
  if (before) {
    const seconds = (now - before.now) / 1000, sums = state.sums, old = before.state.sums;
    const mean = (sum, count) =>
      sums[count] > old[count] ? 1000 * (sums[sum] - old[sum]) / (sums[count] - old[count]) : 0;
    push(series.tokens, (sums.tokens - old.tokens) / seconds);
    push(series.first, mean("first_token_s", "first_tokens"));
    push(series.gap, mean("gap_s", "gaps"));
    put("tokens-per-s", series.tokens[series.tokens.length - 1].toFixed(0));
    state.stages.forEach((stage, index) => {
      const was = before.state.stages[index], load = byId(`load-${index}`);
      if (!was || !load) return;
      put(`held-${index}`, `weights ${size(stage.weights_bytes)}, KV cache ${size(stage.kv_bytes)}`);
      load.value = Math.min(1, Math.max(0, (stage.busy_s - was.busy_s) / seconds));
      const share = `load ${Math.round(100 * load.value)} %`;
      put(`share-${index}`, share + stepTime(stage, was));
    });
  }
  drawChart("chart-tokens", "tokens/s", series.tokens);
  drawChart("chart-first", "first token, ms", series.first);
  drawChart("chart-gap", "time of a token, ms", series.gap);
  before = { state, now };
}

// What became of stages that were lost, in words.
function recovered(recoveries) {
  const last = recoveries[recoveries.length - 1];
  if (!last) return "";
  const planned = last.action === "replan" ? "the devices that are left are planned anew" : "another stage is started in its place";
  if (last.measured_s === null) {
    const expected = last.predicted_s === null ? "" : `, in about ${last.predicted_s.toFixed(1)} s`;
    return `A stage was lost: ${last.reason}. Now ${planned}${expected}; answers pause and go on from the tokens that they have.`;
  }
  const times = recoveries.length === 1 ? "once" : `${recoveries.length} times`;
  const predicted = last.predicted_s === null ? "" : ` (predicted ${last.predicted_s.toFixed(1)})`;
  return `Recovered ${times} from lost stages, last at ${last.began} in ${last.measured_s.toFixed(1)} s${predicted}: ${last.reason}`;
}

// What a step of decoding took since the last beat, beside what the plan promised of it.
function stepTime(stage, was) {
  const now = stage.kinds.decode, then = was.kinds.decode || { steps: 0, busy_s: 0 };
  if (!now || now.steps <= then.steps) return "";
  const ms = 1000 * (now.busy_s - then.busy_s) / (now.steps - then.steps);
  const planned = stage.predicted.decode;
  const promise = planned ? ` (planned ${(1000 * planned.seconds).toFixed(1)})` : "";
  return `, step ${ms.toFixed(1)} ms${promise}`;
}

async function beat() {
  try {
    const answer = await fetch("page/state");
    draw(await answer.json(), performance.now());
  } catch (error) {
    put("status", "not reachable");
    byId("status").className = "failed";
  }
  setTimeout(beat, EVERY_MS);
}

beat();
