// One question to the node: its answer, or a sentence that says why there is none.

export async function ask(path) {
  try {
    const response = await fetch(path);
    const answer = await response.json();
    if (response.ok) return [answer, ""];
    return [null, [answer.error, answer.hint].filter(Boolean).join(" — ") || `The node said ${response.status}.`];
  } catch {
    return [null, "The node does not answer."];
  }
}
