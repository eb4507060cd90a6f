// Search for all words instead of any, by prefixes of four letters or more; for any word if that finds nothing.
(() => {
  const QUERY = 2, RESULT = 3
  const SKIPPED = new Set("a an and are as at be by can do does for from how i in is it my of on or the to use what when where which why with".split(" "))
  const post = Worker.prototype.postMessage
  const last = new WeakMap() // by worker: the words as they were typed

  function all(query) {
    if (/["+:^~*]/.test(query)) return query
    const words = query.split(/[\s\-_,=()[\]`/.?!]+|(?<=[a-z])(?=[A-Z])/).map(word => word.toLowerCase())
    return words.filter(word => word && !SKIPPED.has(word)).map(word => `+${word}${word.length > 3 ? "*" : ""}`).join(" ") || query
  }

  Worker.prototype.postMessage = function (message, ...more) {
    if (message?.type !== QUERY) return post.call(this, message, ...more)
    if (!last.has(this))
      this.addEventListener("message", ({ data }) => {
        const query = last.get(this)
        if (data?.type === RESULT && !data.data.items.length && query) {
          last.set(this, "")
          post.call(this, { type: QUERY, data: query })
        }
      })
    const query = all(message.data)
    last.set(this, query === message.data ? "" : message.data)
    return post.call(this, { type: QUERY, data: query })
  }
})()
