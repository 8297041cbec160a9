// A browser starts no Worker for a page that it reads from a file. The search's worker then runs in a hidden frame.
// Material for MkDocs gives it messages by postMessage and takes its answers from "message" events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          const script = (source) =>
            new Promise((loaded, failed) => {
              const tag = inside.document.createElement("script")
              tag.src = source
              tag.onload = loaded
              tag.onerror = failed
              inside.document.body.append(tag)
            })
          inside.importScripts = (...sources) => Promise.all(sources.map(script))
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          script(url).then(() => resolve(inside))
        }
      })
      document.body.append(frame)
    }
    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
