// The prompts of the clips that were asked for here, which the server does not tell again. They stay in this browser.

const KEY = "h3stream-prompts";
const KEPT = 50;

export function keepPrompt(jobId, prompt) {
  const others = kept().filter(([id]) => id !== jobId);
  try {
    localStorage.setItem(KEY, JSON.stringify([[jobId, prompt], ...others].slice(0, KEPT)));
  } catch {
    // A browser may keep nothing for pages: then a reload finds the clip without its prompt.
  }
}

// Empty where the clip was asked for elsewhere, or long ago.
export function promptOf(jobId) {
  return new Map(kept()).get(jobId) ?? "";
}

function kept() {
  try {
    return JSON.parse(localStorage.getItem(KEY)) ?? [];
  } catch {
    return [];
  }
}
