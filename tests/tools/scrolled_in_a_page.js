// Runs docs/javascripts/scrolled.js on a page with a wide and a narrow table and two blocks of code,
// with as little of a browser as it needs, and prints the tabIndex of each.
// Argument: scrolled.js.
"use strict";
const fs = require("fs");
const vm = require("vm");

const box = (scrollWidth, clientWidth) => ({
  scrollWidth, clientWidth, setAttribute() {}, removeAttribute() {},
});
const boxes = {
  tables: [box(900, 300), box(300, 300)],
  code: [box(900, 300), box(300, 300)],
};
const document = {
  title: "A page",
  body: {},
  querySelectorAll(selector) {
    if (selector.includes("scrollwrap")) return boxes.tables;
    return selector.includes("pre > code") ? boxes.code : [];
  },
};
const loaded = [];
vm.runInNewContext(fs.readFileSync(process.argv[2], "utf-8"), {
  document,
  Node: {},
  MutationObserver: class { observe() {} },
  addEventListener: (event, done) => event === "load" && loaded.push(done),
  requestAnimationFrame: (done) => done(),
  cancelAnimationFrame() {},
});
for (const done of loaded) done();
const shown = Object.entries(boxes).map(([name, all]) => [name, all.map((one) => one.tabIndex ?? null)]);
console.log(JSON.stringify(Object.fromEntries(shown)));
