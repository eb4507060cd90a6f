// Search for all words instead of any, by prefixes of four letters or more, without plurals and words that say nothing;
// for any of these words if that finds nothing.
(() => {
  const QUERY = 2, RESULT = 3
  // What lunr leaves out of its index, and words of questions.
  const SKIPPED = new Set(("able about across after all almost also am among an and any are as at be because been but by " +
    "can cannot could dear did do does either else ever every for from get got had has have he her hers him his how however " +
    "i if in into is it its just least let like likely may me might most must my neither no nor not of off often on only or " +
    "other our own rather said say says she should since so some than that the their them then there these they this tis to " +
    "too twas us use wants was we were what when where which while who whom why will with would yet you your a everything exactly make run same set").split(" "))
  const post = Worker.prototype.postMessage
  const pending = new WeakMap() // by worker: queries without a result, in order; for each the query to try next

  function all(query) {
    if (/["+:^~*]/.test(query)) return query
    const words = query.split(/[\s\-_,:=()[\]`"/.?!]+|(?<=[a-z])(?=[A-Z])/).map(word => word.toLowerCase())
    const kept = words.filter(word => word && !SKIPPED.has(word)).map(stem)
    return kept.map(word => `+${word}${word.length > 3 ? "*" : ""}`).join(" ") || query
  }

  function stem(word) {
    return word.length > 4 ? word.replace(/(?<=[^su])s$/, "") : word
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
    pending.get(this).push(query === message.data ? "" : query.replace(/[+*]/g, ""))
    return post.call(this, { type: QUERY, data: query })
  }
})()
