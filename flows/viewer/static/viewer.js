"use strict";
// Everything works without this script. It shows what is new, moves from token to token, and copies commands.
const EVERY_MS = 3000;
const said = document.getElementById("said");

function prepare() {
  for (const button of document.querySelectorAll("[data-copies]")) {
    button.hidden = false;
    button.onclick = async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).textContent);
      said.textContent = "Copied.";
    };
  }
  for (const hint of document.querySelectorAll("[data-script]")) hint.hidden = false;
  for (const text of document.querySelectorAll("[data-tokens]")) walk(text);
}

function walk(text) {
  const tokens = text.children;
  let now = -1;
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Tokens");
  text.setAttribute("aria-describedby", "token-help");
  const show = (next) => {
    if (now >= 0) tokens[now].classList.remove("now");
    now = Math.min(Math.max(next, 0), tokens.length - 1);
    tokens[now].classList.add("now");
    tokens[now].scrollIntoView({ block: "nearest" });
    document.getElementById("token-now").textContent = tokens[now].title;
  };
  text.onkeydown = (event) => {
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tokens.length - 1 }[event.key];
    if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(next);
  };
  text.onclick = (event) => {
    const place = [...tokens].indexOf(event.target);
    if (place >= 0) show(place);
  };
}

let tag = "";
async function refresh() {
  const main = document.getElementById("main");
  const busy = document.hidden || main.querySelector("input:checked") || main.querySelector("input:focus, select:focus");
  if (busy || !getSelection().isCollapsed) return;
  try {
    const answer = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status !== 200) return void (said.textContent = answer.status === 304 ? said.textContent : "This page cannot be shown any more: reload it.");
    tag = answer.headers.get("ETag");
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("main");
    if (next.innerHTML === main.dataset.before) return;
    const open = [...main.querySelectorAll("details[open]")].map((one) => one.id);
    const focus = main.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const first = main.dataset.before === undefined;
    main.dataset.before = next.innerHTML;
    if (first) return;
    main.replaceChildren(...next.childNodes);
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    if (focus) [...main.querySelectorAll("a")].find((one) => one.getAttribute("href") === focus)?.focus({ preventScroll: true });
    prepare();
    said.textContent = `Updated at ${new Date().toLocaleTimeString()}.`;
  } catch {
    said.textContent = "The viewer does not answer: is it still running?";
  }
}

prepare();
if ("live" in document.body.dataset) {
  refresh();
  setInterval(refresh, EVERY_MS);
}
