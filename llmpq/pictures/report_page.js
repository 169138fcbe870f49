// Draws the charts of a report from the data in the file, zooms them, and saves parts of the file.
"use strict";

const held = JSON.parse(document.getElementById("data").textContent);
const views = new Map();

function save(name, text, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// A picture for paper has the page's colours as they are now, not their names.
function withColours(svg) {
  const style = getComputedStyle(document.documentElement);
  return svg.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
}

// Moves or narrows what a chart shows of its time.
function zoom(view, how) {
  const [low, high] = view.scale("x").domain(), span = high - low, middle = (low + high) / 2;
  const to = {
    in: [middle - span / 4, middle + span / 4], out: [middle - span, middle + span],
    earlier: [low - span / 3, high - span / 3], later: [low + span / 3, high + span / 3], all: null,
  }[how];
  view.signal("window_start_s", to).runAsync();
}

async function draw(figure) {
  const name = figure.dataset.chart, place = figure.querySelector(".chart");
  const made = await vegaEmbed(place, held.charts[name], { mode: "vega-lite", renderer: "svg", actions: false });
  views.set(name, made.view);
  place.querySelector("svg").setAttribute("aria-hidden", "true"); // its caption and the tables say it
  figure.querySelectorAll("[data-zoom]").forEach((button) =>
    button.addEventListener("click", () => zoom(made.view, button.dataset.zoom)));
  figure.querySelector("[data-save]").addEventListener("click", async () =>
    save(`${name}.svg`, withColours(await made.view.toSVG()), "image/svg+xml"));
}

document.querySelectorAll("[data-file]").forEach((button) => button.addEventListener("click", () => {
  const name = button.dataset.file, whole = held[name.replace(/\.json$/, "")];
  if (whole === undefined) save(name, held.files[name], "image/svg+xml");
  else save(name, JSON.stringify(whole, null, 1) + "\n", "application/json");
}));
document.querySelectorAll("[data-chart]").forEach((figure) => draw(figure).catch((error) => {
  figure.querySelector(".chart").textContent = `This chart cannot be drawn: ${error.message}`;
}));
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.open = true; }));
