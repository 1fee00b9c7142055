// The phases of a job and its chunks as a row of boxes that fill up.

const LABELS = { waiting: "waiting", active: "in progress", ready: "done" };

export class Timeline {
  #list;
  #text;
  #chunks = [];
  #finish;
  #sound = null;
  #isDense = false;

  constructor(list) {
    this.#list = list;
  }

  clear() {
    this.#list.replaceChildren();
    this.#chunks = [];
  }

  begin(plan) {
    this.clear();
    this.#isDense = plan.clip.mode === "dense";
    this.#text = this.#box("phase", "Text", "Text");
    this.#chunks = plan.chunks.map((_, index) => this.#box("chunk", String(index + 1), `Chunk ${index + 1}`));
    this.#finish = this.#box("phase", "Files", "Files");
    this.#sound = plan.refine_audio && this.#box("phase", "Sound", "Refined sound");
    this.#list.classList.toggle("crowded", plan.chunks.length > 9);
  }

  phase(phase, chunkIndex) {
    if (phase === "encode" || phase === "prefill") this.#set(this.#text, "active", 0.5);
    else if (phase !== "queued") this.#set(this.#text, "ready");
    if (phase === "denoise") for (const box of this.#sampled(chunkIndex)) this.#set(box, "active", 0);
    if (phase === "finish") {
      for (const box of this.#chunks) this.#set(box, "ready");
      this.#set(this.#finish, "active", 0.5);
    }
    if (phase === "refine") {
      this.#set(this.#finish, "ready");
      this.#set(this.#sound, "active", 0);
    }
  }

  refined(step, numSteps) {
    if (this.#sound) this.#set(this.#sound, "active", (0.9 * step) / numSteps);
  }

  step(chunkIndex, step, numSteps) {
    // The last tenth is the decoding.
    for (const box of this.#sampled(chunkIndex)) this.#set(box, "active", (0.9 * step) / numSteps);
  }

  // Media of a chunk have come: it and those before it can be played.
  ready(chunkIndex) {
    for (const box of this.#chunks.slice(0, chunkIndex + 1)) this.#set(box, "ready");
  }

  complete() {
    for (const box of this.#list.children) this.#set(box, "ready");
  }

  // Nothing is in progress any more.
  stop() {
    for (const box of this.#list.children) if (box.dataset.state === "active") this.#set(box, "waiting");
  }

  #sampled(chunkIndex) {
    if (this.#isDense) return this.#chunks;
    return chunkIndex >= 0 ? [this.#chunks[chunkIndex]] : [];
  }

  #box(kind, text, name) {
    const box = document.createElement("li");
    const label = document.createElement("span");
    label.textContent = text;
    box.className = kind;
    box.dataset.name = name;
    box.append(label);
    this.#list.append(box);
    this.#set(box, "waiting");
    return box;
  }

  #set(box, state, done = 0) {
    box.dataset.state = state;
    box.style.setProperty("--done", done);
    box.title = `${box.dataset.name}: ${LABELS[state]}`;
    box.setAttribute("aria-label", box.title);
  }
}
