// Asks the model: a conversation of several turns, or a text to continue, streamed into the page.
"use strict";

// Raw HTML of an answer stays text, and no picture is fetched from anywhere.
const markdown = window.markdownit({ html: false, linkify: false, breaks: true }).disable("image");
for (const cell of ["th_open", "td_open"]) { // alignment would be a style of its own, which the page's policy refuses
  markdown.renderer.rules[cell] = (tokens, index) => `<${tokens[index].tag}>`;
}
let running = null, example = null;
const said = [];

function rendered(answer) {
  const page = new DOMParser().parseFromString(markdown.render(answer), "text/html");
  page.querySelectorAll("h1, h2, h3, h4, h5, h6").forEach((title) => {
    const lower = document.createElement(`h${Math.min(6, Number(title.tagName[1]) + 2)}`);
    lower.append(...title.childNodes);
    title.replaceWith(lower);
  });
  page.querySelectorAll("a").forEach((link) => { link.target = "_blank"; link.rel = "noopener noreferrer"; });
  page.querySelectorAll("pre").forEach((code) => {
    code.tabIndex = 0;
    const box = text("div", "", "code"), words = code.textContent;
    code.replaceWith(box);
    box.append(code, copyButton("Copy code", () => words));
  });
  return [...page.body.childNodes].map((node) => document.adoptNode(node));
}

function copyButton(name, words) {
  const button = text("button", name);
  button.type = "button";
  button.addEventListener("click", () => copy(button, name, words()));
  return button;
}

async function copy(button, name, words) {
  try {
    await navigator.clipboard.writeText(words);
    button.textContent = "Copied";
  } catch (error) { // pages of plain HTTP have no clipboard
    button.textContent = oldCopy(words) ? "Copied" : "Could not copy";
  }
  setTimeout(() => { button.textContent = name; }, 2000);
}

function oldCopy(words) {
  const field = document.createElement("textarea");
  field.value = words;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

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
  byId("turns").hidden = byId("anew").hidden = byId("system-label").hidden = !chat;
  byId("continued").hidden = chat;
  byId("prompt-label").textContent = chat ? "Message" : "Text to continue";
  if (chat && prompt.value === example) prompt.value = "";
  if (!chat && prompt.value === "") prompt.value = example || "";
}

// A turn of the model: thoughts folded away, the answer, what it took.
class Turn {
  constructor() {
    this.item = document.createElement("li");
    this.item.className = "assistant";
    this.body = text("div", "", "said");
    this.facts = text("div", "", "facts");
    this.thoughts = null;
    this.item.append(this.body);
    byId("turns").append(this.item);
  }

  show(reply) {
    if (reply.reasoning_content && !this.thoughts) {
      const fold = text("details", "", "thoughts");
      this.thoughts = document.createElement("div");
      fold.append(text("summary", "Thoughts"), this.thoughts);
      this.item.prepend(fold);
    }
    if (this.thoughts) this.thoughts.textContent = reply.reasoning_content;
    this.body.replaceChildren(...rendered(reply.content));
  }

  end(reply, facts) {
    this.facts.append(text("span", facts), copyButton("Copy", () => reply.content));
    this.item.append(this.facts);
  }
}

// A text that goes on: as it is, without markdown.
class Continued {
  constructor() {
    byId("answer").textContent = byId("answer-facts").textContent = "";
    byId("copy").hidden = true;
    this.item = byId("answer");
  }

  show(reply) { byId("answer").textContent = reply.content; }

  end(reply, facts) {
    byId("answer-facts").textContent = facts;
    byId("copy").hidden = false;
  }
}

// Follows an answer: when its tokens came, and why it ended.
class Clock {
  constructor() {
    this.began = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
    this.ended = "";
  }

  take(chunk) {
    if (chunk.usage) this.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.ended = choice.finish_reason || this.ended;
    const delta = choice.delta || choice;
    if (!(delta.content || delta.reasoning_content || delta.text)) return;
    this.last = performance.now();
    if (this.first === null) this.first = this.last;
  }

  words(stopped) {
    if (this.first === null) return stopped ? "stopped before the first token" : "no text";
    const parts = [`${this.tokens} tokens`, `first token ${((this.first - this.began) / 1000).toFixed(2)} s`];
    if (this.tokens > 1 && this.last > this.first) {
      parts.push(`${(1000 * (this.tokens - 1) / (this.last - this.first)).toFixed(1)} tokens/s`);
    }
    if (stopped) parts.push("stopped");
    if (this.ended === "length") parts.push("cut off at the limit of tokens (Settings)");
    return parts.join(", ");
  }
}

function bodyOf(chat, prompt, question) {
  const body = {
    max_tokens: Number(byId("max-tokens").value), stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
  for (const [id, name] of [["temperature", "temperature"], ["top-p", "top_p"]]) {
    if (byId(id).value !== "") body[name] = Number(byId(id).value);
  }
  if (!chat) return { ...body, prompt };
  const system = byId("system").value.trim();
  body.messages = [...(system ? [{ role: "system", content: system }] : []), ...said, question];
  if (byId("thinking").value) body.chat_template_kwargs = { enable_thinking: byId("thinking").value === "true" };
  return body;
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
  const question = { role: "user", content: prompt }, reply = { role: "assistant", content: "" };
  const body = bodyOf(chat, prompt, question), clock = new Clock();
  let asked = null;
  if (chat) {
    said.push(question, reply);
    asked = text("li", prompt, "user");
    byId("turns").append(asked);
    byId("prompt").value = "";
  }
  const shown = chat ? new Turn() : new Continued(), turns = byId("turns");
  shown.item.setAttribute("aria-busy", "true");
  turns.scrollTop = turns.scrollHeight;
  let due = false;
  const draw = () => {
    due = false;
    const atEnd = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
    shown.show(reply);
    if (atEnd) turns.scrollTop = turns.scrollHeight;
  };
  let refused = false, stopped = false;
  try {
    const path = chat ? "v1/chat/completions" : "v1/completions";
    const answer = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal: own.signal });
    if (!answer.ok) throw new Error(await refusal(answer));
    await read(answer.body.getReader(), (chunk) => {
      clock.take(chunk);
      for (const choice of chunk.choices) {
        const delta = chat ? choice.delta : { content: choice.text };
        if (delta.reasoning_content) reply.reasoning_content = (reply.reasoning_content || "") + delta.reasoning_content;
        reply.content += delta.content || "";
      }
      if (!due) { due = true; requestAnimationFrame(draw); }
    });
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) {
      const began = Boolean(reply.content || reply.reasoning_content);
      byId("problem").textContent = inWords(error, began);
      refused = chat && !began;
    }
  }
  shown.item.removeAttribute("aria-busy");
  if (refused) forget(question, reply, [asked, shown.item], prompt);
  else {
    draw();
    shown.end(reply, clock.words(stopped));
    turns.scrollTop = turns.scrollHeight;
  }
  if (running === own) { running = null; byId("stop").disabled = true; }
}

async function refusal(answer) {
  const said = await answer.json().catch(() => ({ error: { message: `HTTP ${answer.status}` } }));
  if (answer.status === 401) return `This server wants an API key: type it under Settings. (${said.error.message})`;
  const again = answer.headers.get("Retry-After");
  return said.error.message + (again ? `; try again in ${again} s` : "");
}

function inWords(error, began) {
  if (!(error instanceof TypeError)) return began ? `The answer broke off: ${error.message}` : error.message;
  return began ? "The answer broke off: the connection to the server was lost."
    : "The server cannot be reached: it has ended, or the network between has.";
}

// A turn that was refused is none: its text goes back to where it can be corrected.
function forget(question, reply, items, prompt) {
  const place = said.indexOf(question);
  if (place >= 0) said.splice(place, 2);
  items.forEach((item) => item.remove());
  if (byId("prompt").value === "") byId("prompt").value = prompt;
}

function anew() {
  if (running) running.abort();
  said.length = 0;
  byId("turns").replaceChildren();
  byId("problem").textContent = "";
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
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      take(chunk);
    }
  }
}

byId("ask").addEventListener("submit", ask);
byId("stop").addEventListener("click", () => running && running.abort());
byId("copy").addEventListener("click", () => copy(byId("copy"), "Copy", byId("answer").textContent));
byId("anew").addEventListener("click", anew);
byId("form").addEventListener("change", show);
byId("prompt").addEventListener("keydown", (event) => {
  if (byId("form").value !== "chat" || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
addEventListener("asks", (event) => offer(event.detail));
show();
