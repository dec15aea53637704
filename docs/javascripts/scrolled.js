// Makes everything that scrolls sideways reachable by the keyboard, and names tables, drawings and the
// buttons of a block of code. The theme names none of these, and makes a block of code reachable only
// after it has been on the screen.
"use strict";
const HEADINGS = "h1, h2, h3, h4, h5, h6";
const heading = element => {
  const before = [...document.querySelectorAll(`article :is(${HEADINGS})`)]
    .filter(one => one.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_FOLLOWING);
  const last = before.pop();
  if (!last) return document.title;
  const own = [...last.childNodes].filter(part => part.className !== "headerlink");
  return own.map(part => part.textContent).join("").trim();
};
const name = () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset p:has(> img:only-child)")) {
    if (box.scrollWidth <= box.clientWidth) {
      box.removeAttribute("tabindex");
      continue;
    }
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Scrolls: ${heading(box)}`);
  }
  for (const code of document.querySelectorAll(".md-typeset pre > code")) {
    if (code.scrollWidth > code.clientWidth) code.tabIndex = 0;
  }
  for (const [i, nav] of document.querySelectorAll(".md-code__nav").entries()) {
    nav.setAttribute("aria-label", `Block of code ${i + 1}`);
  }
};
let waiting = 0;
const soon = () => {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(name);
};
addEventListener("load", soon);
addEventListener("resize", soon);
new MutationObserver(soon).observe(document.body, { childList: true, subtree: true });
