// Search for all words instead of any, by prefixes of four letters or more; for any word if that finds nothing.
(() => {
  const QUERY = 2, RESULT = 3
  const SKIPPED = new Set("a an and are as at be by can do does for from how i in is it my of on or the to use what when where which why with".split(" "))
  const post = Worker.prototype.postMessage
  const pending = new WeakMap() // by worker: queries without a result, in order; for each what to search for instead

  function all(query) {
    if (/["+:^~*]/.test(query)) return query
    const words = query.split(/[\s\-_,=()[\]`/.?!]+|(?<=[a-z])(?=[A-Z])/).map(word => word.toLowerCase())
    return words.filter(word => word && !SKIPPED.has(word)).map(word => `+${word}${word.length > 3 ? "*" : ""}`).join(" ") || query
  }

  function answered(worker, found) {
    const instead = pending.get(worker).shift()
    if (instead && !found && !pending.get(worker).length) {
      pending.get(worker).push("")
      post.call(worker, { type: QUERY, data: instead })
    }
  }

  Worker.prototype.postMessage = function (message, ...more) {
    if (message?.type !== QUERY) return post.call(this, message, ...more)
    if (!pending.has(this)) {
      pending.set(this, [])
      this.addEventListener("message", ({ data }) => data?.type === RESULT && answered(this, data.data.items.length))
    }
    const query = all(message.data)
    pending.get(this).push(query === message.data ? "" : message.data)
    return post.call(this, { type: QUERY, data: query })
  }
})()
