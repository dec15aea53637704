// The site's search where it is read from a folder. A browser starts no worker from a file:// page, so
// the script of the theme's search runs in a hidden frame in its place. Elsewhere this does nothing.
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open(); // else some browsers load an empty page here later
      inside.document.write("<!doctype html><title>search</title><body></body>");
      inside.document.close();
      // The script answers by a worker's own postMessage, which a window has for other uses.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = String(url);
      script.onload = () => {
        const sent = this.waiting;
        this.waiting = null;
        for (const data of sent) this.postMessage(data);
      };
      script.onerror = () => this.dispatchEvent(new Event("error"));
      inside.document.body.appendChild(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  }

  window.IFrameWorker = IFrameWorker; // the theme's script looks for this name in its parent
  window.Worker = IFrameWorker;
})();
