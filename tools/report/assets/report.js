"use strict";
const facts = document.getElementById("facts");
let lit = [];
const show = chip => {
  facts.textContent = chip ? chip.dataset.facts : "";
  for (const other of lit) other.classList.remove("lit");
  const site = chip && chip.dataset.site;
  lit = site ? [...chip.closest("table").querySelectorAll(`[data-site="${site}"]`)] : [];
  for (const other of lit) other.classList.add("lit");
};
const chipOf = event => event.target.closest ? event.target.closest("[data-facts]") : null;
for (const kind of ["mouseover", "focusin"]) document.addEventListener(kind, event => show(chipOf(event)));
document.addEventListener("click", event => {
  const chip = chipOf(event);
  if (chip && chip.dataset.site) location.hash = `site-${chip.dataset.site}`;
});

// One tab stop for a drawing's nodes, and arrow keys from there; fused ops are links of their own.
for (const table of document.querySelectorAll("table.flow")) {
  const first = table.querySelector("span[data-facts]");
  if (first) first.tabIndex = 0;
}
const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
const neighbour = (chip, [down, right]) => {
  const cell = chip.closest("td"), chips = [...cell.querySelectorAll("[data-facts]")];
  if (right) {
    const beside = chips[chips.indexOf(chip) + right];
    const other = cell.parentElement.cells[cell.cellIndex + right];
    return beside || (other && other.querySelector("[data-facts]"));
  }
  for (let row = cell.parentElement; (row = down > 0 ? row.nextElementSibling : row.previousElementSibling);) {
    const found = row.cells[cell.cellIndex].querySelector("[data-facts]");
    if (found) return found;
  }
  return null;
};
document.addEventListener("keydown", event => {
  const chip = chipOf(event);
  if (event.key === "Escape") show(null);
  if (!chip) return;
  if (event.key === "Enter" && chip.dataset.site) location.hash = `site-${chip.dataset.site}`;
  const next = steps[event.key] && neighbour(chip, steps[event.key]);
  if (steps[event.key]) event.preventDefault();
  if (!next) return;
  for (const stop of chip.closest("table").querySelectorAll("span[tabindex]")) stop.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
});

// On paper everything is open but the sources.
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => { for (const one of closed) one.open = false; });

const openTarget = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target && target.tagName === "DETAILS") {
    target.open = true;
    target.querySelector("summary").focus();
  }
};
addEventListener("hashchange", openTarget);
openTarget();
