// Draws the state of the server every second, and streams an answer into the page.
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

function text(name, value) {
  const made = document.createElement(name);
  made.textContent = value;
  return made;
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
  const share = text("p", "load");
  share.id = `share-${index}`;
  card.append(
    text("h3", stage.device), text("p", `${stage.kind} on ${stage.node}`),
    text("p", `layers ${stage.first_layer} to ${last}`), picture, share, load,
  );
  return card;
}

function drawChart(id, title, values) {
  const chart = byId(id), most = Math.max(1e-9, ...values);
  chart.setAttribute("viewBox", `0 0 ${POINTS} 1`);
  chart.setAttribute("preserveAspectRatio", "none");
  const newest = values.length ? values[values.length - 1] : 0;
  const told = values.length ? `${title}: ${newest.toFixed(1)}, at most ${most.toFixed(1)}` : title;
  chart.setAttribute("aria-label", told);
  byId(`${id}-title`).textContent = told;
  const points = values.map((value, at) => `${POINTS - values.length + at},${0.95 - 0.9 * value / most}`);
  chart.replaceChildren(shape("polyline", { points: points.join(" ") }));
}

function push(list, value) {
  list.push(value);
  if (list.length > POINTS) list.shift();
}

function draw(state, now) {
  byId("model").textContent = state.model;
  document.title = `${state.model} - llmpq`;
  byId("version").textContent = `llmpq ${state.version}`;
  byId("status").textContent = state.status;
  byId("status").className = state.status;
  byId("running").textContent = state.running;
  byId("waiting").textContent = state.waiting;
  byId("kv").textContent = `${Math.round(100 * state.blocks_held / Math.max(1, state.blocks))} %`;
  byId("recoveries").textContent = recovered(state.recoveries);
  drawPlan(state.plan);
  offer(state.asks);
  if (before) {
    const seconds = (now - before.now) / 1000, sums = state.sums, old = before.state.sums;
    const mean = (sum, count) =>
      sums[count] > old[count] ? 1000 * (sums[sum] - old[sum]) / (sums[count] - old[count]) : 0;
    push(series.tokens, (sums.tokens - old.tokens) / seconds);
    push(series.first, mean("first_token_s", "first_tokens"));
    push(series.gap, mean("gap_s", "gaps"));
    byId("tokens-per-s").textContent = series.tokens[series.tokens.length - 1].toFixed(0);
    state.stages.forEach((stage, index) => {
      const was = before.state.stages[index], load = byId(`load-${index}`);
      if (!was || !load) return;
      load.value = Math.min(1, Math.max(0, (stage.busy_s - was.busy_s) / seconds));
      const share = `load ${Math.round(100 * load.value)} %`;
      byId(`share-${index}`).textContent = share + stepTime(stage, was);
    });
  }
  drawChart("chart-tokens", "tokens/s", series.tokens);
  drawChart("chart-first", "first token, ms", series.first);
  drawChart("chart-gap", "time of a token, ms", series.gap);
  before = { state, now };
}

// What became of stages that were lost.
function recovered(recoveries) {
  const last = recoveries[recoveries.length - 1];
  if (!last) return "";
  if (last.measured_s === null) return `Recovering since ${last.began}: ${last.reason}`;
  const times = recoveries.length === 1 ? "once" : `${recoveries.length} times`;
  const seconds = `in ${last.measured_s.toFixed(1)} s (predicted ${last.predicted_s.toFixed(1)})`;
  return `Recovered ${times} from lost stages, last at ${last.began} ${seconds}: ${last.reason}`;
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
    byId("status").textContent = "not reachable";
    byId("status").className = "failed";
  }
  setTimeout(beat, EVERY_MS);
}

let running = null, example = null;
const said = [];

// Offer what the model can do, once that is known: a chat by its template, else texts to continue.
function offer(asks) {
  if (!asks || example !== null) return;
  example = asks.example;
  byId("form").value = asks.chat ? "chat" : "text";
  byId("form").disabled = !asks.chat;
  show();
}

function show() {
  const chat = byId("form").value === "chat", prompt = byId("prompt");
  byId("turns").hidden = byId("anew").hidden = !chat;
  byId("continued").hidden = chat;
  byId("prompt-label").textContent = chat ? "Message" : "Text to continue";
  if (chat && prompt.value === example) prompt.value = "";
  if (!chat && prompt.value === "") prompt.value = example || "";
}

function addTurn(turn) {
  const item = text("li", turn.content);
  item.className = turn.role;
  byId("turns").append(item);
  return item;
}

function anew() {
  if (running) running.abort();
  said.length = 0;
  byId("turns").replaceChildren();
  byId("problem").textContent = "";
}

async function ask(event) {
  event.preventDefault();
  const chat = byId("form").value === "chat", prompt = byId("prompt").value;
  if (chat && !prompt.trim()) return;
  if (running) running.abort();
  const own = running = new AbortController();
  byId("problem").textContent = "";
  byId("stop").disabled = false;
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const body = { max_tokens: Number(byId("max-tokens").value), stream: true };
  if (byId("temperature").value !== "") body.temperature = Number(byId("temperature").value);
  const question = { role: "user", content: prompt }, reply = { role: "assistant", content: "" };
  let shown = byId("answer"), items = [], thoughts = null;
  if (chat) {
    body.messages = [...said, question];
    said.push(question, reply);
    items = [addTurn(question), addTurn(reply)];
    shown = items[1];
    byId("prompt").value = "";
    byId("turns").scrollTop = byId("turns").scrollHeight;
  } else {
    body.prompt = prompt;
    shown.textContent = "";
  }
  try {
    const path = chat ? "v1/chat/completions" : "v1/completions";
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: own.signal });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await read(answer.body.getReader(), (choice) => {
      const thought = (chat && choice.delta.reasoning_content) || "";
      if (thought) {
        if (!thoughts) {
          thoughts = document.createElement("details");
          thoughts.append(text("summary", "Thoughts"));
          shown.append(thoughts);
        }
        reply.reasoning_content = (reply.reasoning_content || "") + thought;
        thoughts.append(thought);
      }
      const piece = (chat ? choice.delta.content : choice.text) || "";
      if (!piece) return;
      reply.content += piece;
      shown.append(piece);
    });
  } catch (error) {
    if (error.name !== "AbortError") {
      byId("problem").textContent = error.message;
      if (chat && !reply.content && !reply.reasoning_content) forget(question, reply, items, prompt);
    }
  }
  if (running === own) { running = null; byId("stop").disabled = true; }
}

// A turn that was refused is none: its text goes back to where it can be corrected.
function forget(question, reply, items, prompt) {
  const place = said.indexOf(question);
  if (place >= 0) said.splice(place, 2);
  items.forEach((item) => item.remove());
  if (byId("prompt").value === "") byId("prompt").value = prompt;
}

async function read(reader, take) {
  const decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    const events = held.split("\n\n");
    held = events.pop();
    for (const one of events) {
      const data = one.slice("data: ".length);
      if (data === "[DONE]") continue;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      told.choices.forEach(take);
    }
  }
}

byId("ask").addEventListener("submit", ask);
byId("stop").addEventListener("click", () => running && running.abort());
byId("anew").addEventListener("click", anew);
byId("form").addEventListener("change", show);
byId("prompt").addEventListener("keydown", (event) => {
  if (byId("form").value !== "chat" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
show();
beat();
