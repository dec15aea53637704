// Runs the theme's search script through docs/javascripts/iframe-worker.js in a page of file://, with as
// little of a browser as both need, and prints the titles that it finds.
// Arguments: iframe-worker.js, the theme's search script, a search index, a query.
"use strict";
const fs = require("fs");
const vm = require("vm");
const [shim, worker, index, query] = process.argv.slice(2);

function makeWindow(more) {
  const target = new EventTarget();
  const window = vm.createContext({
    EventTarget, Event, MessageEvent, URL, console, setTimeout,
    addEventListener: target.addEventListener.bind(target),
    removeEventListener: target.removeEventListener.bind(target),
    dispatchEvent: target.dispatchEvent.bind(target),
    ...more,
  });
  window.window = window.self = window;
  return window;
}

function makeFrame() {
  const document = {
    open() {}, write() {}, close() {},
    createElement: () => ({}),
    querySelector: () => ({ src: worker }),
    body: {
      appendChild(script) {
        // As a browser does: later, and the page is told.
        setTimeout(() => {
          vm.runInContext(fs.readFileSync(script.src, "utf-8"), frame.contentWindow);
          script.onload();
        });
      },
    },
  };
  const frame = { contentWindow: makeWindow({ document, parent: page }), remove() {} };
  return frame;
}

const page = makeWindow({
  location: { protocol: "file:" },
  document: { createElement: makeFrame, body: { appendChild() {} } },
});
vm.runInContext(fs.readFileSync(shim, "utf-8"), page);

const search = new page.Worker(worker);
search.addEventListener("message", ({ data }) => {
  if (data.type === 1) search.postMessage({ type: 2, data: query }); // it is ready
  else if (data.type === 3) {
    const titles = data.data.items.flat().map((item) => item.title.replace(/<[^>]*>/g, ""));
    console.log(JSON.stringify(titles));
  }
});
const { config, docs } = JSON.parse(fs.readFileSync(index, "utf-8"));
search.postMessage({ type: 0, data: { config, docs, options: { suggest: false } } });
