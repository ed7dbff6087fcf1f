// The page shows the form, sends its run to the engine and shows the answer. All rules are in ask.py and the package.
// A run is a list of [name, value] pairs; the address holds the same pairs behind "#".
"use strict";

const $ = (id) => document.getElementById(id);
const form = $("form");
const DEPENDENT = ["dtype", "offload", "vae", "tile", "slicing", "torch", "frames"];
let choices;
if (location.protocol !== "file:") $("needs-server").remove();

function make(tag, settings = {}, ...children) {
  const element = Object.assign(document.createElement(tag), settings);
  element.append(...children);
  return element;
}

function draw(tag, settings, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(settings)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// ---- the engine ----

// Start an engine, and return the function that asks it.
function startEngine() {
  const waiting = new Map();
  const worker = new Worker("worker.js");
  const ready = new Promise((resolve) => {
    worker.onmessage = ({ data }) => {
      if (data.ready) return resolve();
    if (data.failed) return showError({ error: `The calculator did not load: ${data.failed}` });
      waiting.get(data.id)(JSON.parse(data.text));
      waiting.delete(data.id);
    };
  });
  worker.onerror = (event) => showError({ error: `The calculator did not load: ${event.message || "no answer"}` });
  let count = 0;
  return async (request) => {
    await ready;
    count += 1;
    worker.postMessage({ id: count, text: JSON.stringify(request) });
    return new Promise((resolve) => waiting.set(count, resolve));
  };
}

const ask = startEngine();
let slow;
let turn = Promise.resolve();

// Ask another engine, so that long searches keep no answer waiting: one after the other, without those that nobody
// wants any more.
function askSlowly(request, isStale = () => false) {
  slow ??= startEngine();
  turn = turn.then(() => (isStale() ? {} : slow(request)));
  return turn;
}

// ---- the form ----

function setOptions(select, values, wanted, labels = {}, keeps = false) {
  const all = keeps && wanted && !values.includes(wanted) ? [...values, wanted] : values;
  const spell = (value) => labels[value] ?? (value === "" ? "as usual" : value);
  select.replaceChildren(...all.map((value) => make("option", { value }, spell(value))));
  select.value = all.includes(wanted) ? wanted : values[0];
}

// Offer what a run's operation, program and model have. keeps: whether values that are not offered stay, as those of
// an address do.
function offer(run, keeps) {
  const wanted = Object.fromEntries(run);
  const label = (name) => ({ ...choices.labels[name], ...choices.labels[`${form.runtime.value} ${name}`] });
  setOptions(form.op, Object.keys(choices.runs), wanted.op ?? "", label("op"), keeps);
  setOptions(form.os, choices.os, wanted.os, label("os"), keeps);
  const programs = choices.runs[form.op.value] ?? {};
  setOptions(form.runtime, Object.keys(programs), wanted.runtime, label("runtime"), keeps);
  const models = programs[form.runtime.value] ?? {};
  const fields = models[offerModels(models, wanted.model ?? "", keeps)] ?? {};
  for (const name of DEPENDENT) {
    const field = form.elements[name];
    const isTyped = keeps && !field.options && wanted[name];
    field.closest("label").hidden = !fields[name] && !isTyped;
    if (field.options) setOptions(field, fields[name] ?? [""], wanted[name], label(name), keeps);
  }
  const roles = Object.entries(fields.component ?? {});
  const given = run.filter(([name]) => name === "component").map(([, value]) => value);
  $("weights").hidden = !roles.length;
  $("components").replaceChildren(...roles.map(([role, types]) => {
    const select = make("select", { name: "component" });
    const short = Object.fromEntries(types.slice(1).map((type) => [type, type.slice(role.length + 1)]));
    setOptions(select, types, given.find((value) => value.startsWith(`${role}=`)) ?? "", short, keeps);
    if (select.value) $("weights").open = true;
    return make("label", {}, `${role} `, select);
  }));
}

// Offer models, and choose the wanted one or a relative of it. Return its name in the choices.
function offerModels(models, wanted, keeps) {
  const own = Object.keys(models);
  const names = choices.names[form.op.value ? "vae" : "pipeline"];
  const others = own.flatMap((model) => names[model] ?? []);
  const pipelines = choices.runs[""].diffusers;
  let model = wanted;
  if (![...own, ...others].includes(wanted) && !keeps) {
    const near = pipelines[wanted]?.with ?? Object.keys(pipelines).find((one) => pipelines[one].with === wanted);
    model = own.includes(near) ? near : own[0];
  }
  const is_listed = own.includes(model) || others.includes(model);
  const option = (value) => make("option", { value }, value);
  $("models").replaceChildren(
    make("optgroup", { label: "Models" }, ...own.map(option)),
    make("optgroup", { label: "Other names" }, ...others.map(option), make("option", { value: "" }, "another name …")),
  );
  $("models").value = is_listed ? model : "";
  form.model.type = is_listed ? "hidden" : "text";
  form.model.value = model;
  return own.find((one) => one === model || names[one]?.includes(model)) ?? own[0];
}

// Read the run. A list's first value is the default, and stays out.
function readRun() {
  const fields = [...form.elements].filter((field) => field.name && field.value && !field.closest("label[hidden]"));
  const chosen = fields.filter((field) => !field.options || field.selectedIndex > 0);
  return chosen.map((field) => [field.name, field.value.trim()]);
}

function fillForm(run) {
  const given = Object.fromEntries(run);
  for (const field of form.elements) {
    if (field.name && !field.options) field.value = given[field.name] ?? "";
  }
  offer(run, true);
  const unknown = run.filter(([name]) => !form.elements[name] && name !== "component");
  $("more").replaceChildren(
    ...unknown.map(([name, value]) => make("label", {}, `${name} `, make("input", { name, value }))),
  );
  showSize();
}

function showSize() {
  for (const slider of form.querySelectorAll("[data-for]")) slider.value = $(slider.dataset.for).value;
  const size = `${form.width.value}x${form.height.value}`;
  $("sizes").value = [...$("sizes").options].some((option) => option.value === size) ? size : "";
}

const addressOf = (run) => `#${new URLSearchParams(run)}`;
const runOf = (address) => [...new URLSearchParams(address.slice(1))].filter(([, value]) => value);

// ---- the answer ----

let latest = 0;

async function answer() {
  const run = readRun();
  latest += 1;
  const own = latest;
  const isStale = () => own !== latest;
  $("answer").setAttribute("aria-busy", "true");
  const found = await ask({ do: "predict", run });
  if (isStale()) return;
  $("answer").removeAttribute("aria-busy");
  for (const field of form.elements) field.removeAttribute("aria-invalid");
  if (found.error) return showError(found);
  showAnswer(found);
  $("instead").hidden = found.verdict === "fits";
  $("instead").lastElementChild.replaceChildren(make("li", {}, "Searching …"));
  $("timeline").hidden = !found.phases.length;
  await new Promise((resolve) => setTimeout(resolve, 300));
  if (!found.phases.length && !isStale()) {
    const played = await ask({ do: "timeline", run });
    if (!isStale() && !played.error) showTimeline(played, found);
  }
  if (isStale() || found.verdict === "fits") return;
  const { ways = [] } = await askSlowly({ do: "instead", run }, isStale);
  const none = make("li", {}, "Nothing that was tried.");
  if (!isStale()) $("instead").lastElementChild.replaceChildren(...(ways.length ? ways.map(showWay) : [none]));
}

function showError({ error, argument }) {
  $("figures").hidden = true;
  showBrief("problem", error);
  $("verdict").className = "problem";
  $("verdict").replaceChildren(make("p", {}, error));
  const field = argument && form.elements[argument];
  if (!field || !field.setAttribute) return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "verdict");
  field.closest("details")?.setAttribute("open", "");
}

// On a narrow page a line at the foot shows the answer while its place is out of sight.
function showBrief(kind, text) {
  $("brief").className = kind;
  $("brief").textContent = text;
  $("brief").hidden = isVerdictSeen;
}

let isVerdictSeen = false;
new IntersectionObserver(([seen]) => {
  isVerdictSeen = seen.isIntersecting;
  $("brief").hidden = isVerdictSeen || !$("brief").textContent;
}).observe($("verdict"));

function showAnswer(found) {
  const kind = found.verdict.replaceAll(" ", "-");
  const [first, ...rest] = found.sentences;
  $("verdict").className = kind;
  $("verdict").replaceChildren(
    make("p", { className: "first" }, make("strong", {}, first.slice(0, found.verdict.length)),
      first.slice(found.verdict.length)),
    ...rest.map((sentence) => make("p", {}, sentence)),
  );
  showBrief(kind, `${first.slice(0, found.verdict.length)}: ${found.number} ${found.meaning}`);
  $("card").replaceChildren(
    make("p", { className: "number" }, make("b", {}, found.number), ` ${found.meaning}`),
    make("p", { className: "told" }, found.caption),
    bar(found.parts, found.size, found.size),
    legend(found.parts),
  );
  if (found.phases.length) showPhases(found);
  showFurther(...found.further);
  $("facts").replaceChildren(
    ...[...found.facts, ...found.notes.map((note) => ["note", note])].flatMap(([name, text]) => [
      make("dt", {}, name), make("dd", {}, text),
    ]),
  );
  $("command").textContent = found.command;
  $("figures").hidden = false;
}

// Draw parts side by side, and a line at `edge` bytes. The bar is `least` bytes wide or more.
function bar(parts, edge, least) {
  const whole = Math.max(least, edge, parts.reduce((sum, [, size]) => sum + size, 0));
  const pieces = parts.map(([, size, , colour]) => {
    const piece = make("span");
    piece.style.width = `${100 * size / whole}%`;
    piece.style.background = colour;
    return piece;
  });
  const line = make("i");
  line.style.left = `${100 * edge / whole}%`;
  return make("div", { className: "bar", ariaHidden: "true" }, ...pieces, ...(edge < whole ? [line] : []));
}

function legend(parts) {
  return make("ul", { className: "legend" }, ...parts.map(([name, , text, colour]) => {
    const swatch = make("span", { className: "swatch", ariaHidden: "true" });
    swatch.style.background = colour;
    return make("li", {}, swatch, `${name} `, make("b", {}, text));
  }));
}

function showPhases(found) {
  const total = (parts) => parts.reduce((sum, [, size]) => sum + size, 0);
  const most = 1.01 * Math.max(found.available, ...found.phases.map(([, , , parts]) => total(parts)));
  const rows = found.phases.map(([name, outcome, text, parts]) => {
    const held = parts.map((part) => `${part[0]} ${part[2]}`).join(", ");
    return make("tr", { className: outcome.replaceAll(" ", "-") },
      make("th", { scope: "row" }, name),
      make("td", { title: held }, bar(parts, found.available, most)),
      make("td", {}, text), make("td", {}, outcome));
  });
  const heads = ["phase", "the line is what the card gives", "memory", "outcome"];
  $("timeline").lastElementChild.replaceChildren(make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows)));
}

function showTimeline({ moments, at }, { available, gives }) {
  const [width, height] = [600, 160];
  const most = 1.05 * Math.max(available, ...moments.map((moment) => moment[2]));
  const x = (i) => (width * i / moments.length).toFixed(1);
  const y = (size) => (height * (1 - size / most)).toFixed(1);
  const steps = (which) => moments.map((moment, i) => `V${y(moment[which])}H${x(i + 1)}`).join("");
  const area = (which, name) => draw("path", { class: name, d: `M0,${height}${steps(which)}V${height}Z` });
  const mark = draw("line", { class: "mark", y1: 0, y2: height });
  const chart = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    area(2, "reserved"), area(1, "allocated"),
    draw("line", { class: "limit", x1: 0, x2: width, y1: y(available), y2: y(available) }), mark);
  const peak = `Its peak is at ${at}.`;
  const told = make("p", { className: "told" }, peak);
  chart.addEventListener("pointermove", (event) => {
    const i = Math.min(Math.floor(moments.length * event.offsetX / chart.clientWidth), moments.length - 1);
    const [name, , , text] = moments[Math.max(i, 0)];
    mark.setAttribute("x1", x(i + 0.5));
    mark.setAttribute("x2", x(i + 0.5));
    told.textContent = `${name}: ${text}`;
  });
  chart.addEventListener("pointerleave", () => { told.textContent = peak; });
  const key = (name, text) => make("li", {}, make("span", { className: `swatch ${name}`, ariaHidden: "true" }), text);
  $("timeline").hidden = false;
  $("timeline").lastElementChild.replaceChildren(chart, make("ul", { className: "legend" },
    key("allocated", "allocated"), key("reserved", "reserved by PyTorch, if there is room"),
    key("limit", `what the card gives, ${gives}`)), told);
}

function showWay({ what, verdict, outcome, command, run }) {
  const name = run ? make("a", { href: addressOf(run) }, what) : make("span", {}, what);
  const cut = outcome.startsWith(verdict) ? verdict.length : 0;
  const told = make("strong", {}, outcome.slice(0, cut));
  const className = verdict.replaceAll(" ", "-");
  return make("li", { className }, name, " ", told, outcome.slice(cut), ...(run ? [] : [make("code", {}, command)]));
}

// Offer a longer search.
function showFurther(name, text) {
  const own = latest;
  const place = $("further");
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", async () => {
    const status = make("p", { role: "status" }, "Searching. This may take a minute …");
    button.replaceWith(status);
    const isStale = () => own !== latest;
    const { error, sentences = [error], ways = [] } = await askSlowly({ do: name, run: readRun() }, isStale);
    if (isStale()) return;
    status.textContent = sentences.join(" ");
    place.append(make("ul", {}, ...ways.map(showWay)));
  });
  place.replaceChildren(button);
}

// ---- events ----

form.addEventListener("input", ({ target }) => {
  if (target.dataset.for) $(target.dataset.for).value = target.value;
  if (target.id === "sizes" && target.value) [form.width.value, form.height.value] = target.value.split("x");
  if (target.id === "models") form.model.value = target.value;
  if (target.id === "models" && !target.value) {
    form.model.type = "text";
    form.model.focus();
  } else if (target.id === "models" || ["op", "runtime"].includes(target.name)) {
    offer(readRun(), false);
  }
  showSize();
  if (form.model.value) later();
});
form.addEventListener("change", ({ target }) => {
  if (target.name === "model") offer(readRun(), true);
  const address = addressOf(readRun());
  if (form.model.value && address !== location.hash) history.pushState(null, "", address);
});
form.addEventListener("submit", (event) => event.preventDefault());

let timer;
function later() {
  clearTimeout(timer);
  timer = setTimeout(answer, 120);
}

$("swap").addEventListener("click", () => {
  [form.width.value, form.height.value] = [form.height.value, form.width.value];
  form.dispatchEvent(new Event("input"));
  form.dispatchEvent(new Event("change"));
});
$("brief").addEventListener("click", () => $("answer").scrollIntoView());
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("answer").focus();
});

async function copy(text, what) {
  await navigator.clipboard.writeText(text);
  $("copied").textContent = `Copied ${what}.`;
}
$("copy-command").addEventListener("click", () => copy($("command").textContent, "the command"));
$("copy-link").addEventListener("click", () => {
  copy(`${location.origin}${location.pathname}${addressOf(readRun())}`, "the link");
});

$("explain-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const place = $("explanation");
  place.replaceChildren(make("p", {}, "Searching …"));
  const found = await askSlowly({ do: "explain", message: event.target.message.value });
  if (found.error) return place.replaceChildren(make("p", { className: "problem" }, found.error));
  const list = (items) => make("ul", {}, ...items);
  place.replaceChildren(
    ...found.sentences.map((sentence) => make("p", {}, sentence)),
    ...found.lists.flatMap(([title, items]) => [
      ...(title ? [make("p", {}, title)] : []), list(items.map((item) => make("li", {}, item))),
    ]),
    ...(found.run ? [make("p", {}, make("a", { href: addressOf(found.run) }, "Open the first run in the form"))] : []),
    ...(found.ways.length ? [make("p", {}, "What would have fitted, for the first run of a VAE:"),
      list(found.ways.map(showWay))] : []),
  );
});

for (const list of [$("instead"), $("further"), $("explanation")]) {
  list.addEventListener("click", ({ target }) => target.matches("a") && $("answer").focus());
}

async function start() {
  choices = await (await fetch("choices.json")).json();
  $("gpus").append(...choices.gpus.map(([value, memory]) => make("option", { value }, memory)));
  $("sizes").append(make("option", { value: "" }, "another size"),
    ...choices.sizes.map(([height, width]) => make("option", { value: `${width}x${height}` }, `${width} × ${height}`)));
  offer(readRun(), false);
  const usual = readRun();
  const show = () => {
    const run = runOf(location.hash);
    const named = new Set(run.map(([name]) => name));
    const needed = run.length ? ["model", "width", "height"] : usual.map(([name]) => name);
    fillForm([...usual.filter(([name]) => needed.includes(name) && !named.has(name)), ...run]);
    answer();
  };
  addEventListener("hashchange", show);
  show();
}

start();
