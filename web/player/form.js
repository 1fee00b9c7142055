// The form: what it offers comes from the server, what it holds becomes a request, what is wrong is told at its field.

const CANVASES = [[1376, 768], [768, 1376], [1024, 1024], [864, 480], [480, 864], [640, 640], [448, 256]];
const FRAMES_PER_SECOND = 24;
const $ = (id) => document.getElementById(id);

export class Form {
  #info = null;
  #isBusy = false;
  #awaited = null; // what is to be shown once the choices are there

  constructor(onSubmit) {
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!$("generate").disabled) onSubmit(); // the keyboard asks without the button
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
    });
    $("canvas").addEventListener("change", () => this.#showCanvas());
    $("other-seed").addEventListener("click", () => ($("seed").value = crypto.getRandomValues(new Uint32Array(1))[0]));
    for (const radio of $("form").elements.mode) radio.addEventListener("change", () => this.#showMode());
  }

  // Fills the choices with what the server offers; what has been chosen stays.
  offer(info) {
    const isFirst = this.#info === null;
    this.#info = info;
    const clip = info.default_clip;
    if (!isFirst) return;
    $("num_frames").replaceChildren(...info.valid_num_frames.map((frames) =>
      new Option(`${(frames / FRAMES_PER_SECOND).toFixed(1)} s (${frames})`, frames, false, frames === clip.num_frames)));
    const canvases = [[clip.width, clip.height], ...CANVASES.filter(([width, height]) =>
      width * height <= info.max_canvas_pixels && !(width === clip.width && height === clip.height))];
    $("canvas").replaceChildren(
      ...canvases.map(([width, height]) => new Option(`${width} × ${height}`, `${width}x${height}`)),
      new Option("Custom…", "custom"));
    $("seed").value = clip.seed;
    this.#showExamples(info.examples);
    $("adapter-list").replaceChildren(...info.adapters.filter((adapter) => !adapter.is_streaming).map(adapterRow));
    $("adapters").hidden = $("adapter-list").childElementCount === 0;
    const canStream = info.adapters.some((adapter) => adapter.is_streaming);
    const { mode } = $("form").elements;
    for (const radio of mode) radio.disabled = radio.value === "streaming" && !canStream;
    $("mode-hint").hidden = canStream;
    if (!canStream) mode.value = "dense";
    this.#showCanvas();
    this.#showMode();
    this.setBusy(this.#isBusy);
    if (this.#awaited) this.restore(...this.#awaited);
  }

  // Whether a clip is being made, so that no other can be asked for; nor can any before it is known what there is.
  setBusy(isBusy) {
    this.#isBusy = isBusy;
    $("generate").disabled = isBusy || !this.#info;
  }

  // Shows what a clip was asked for with.
  restore(plan, prompt) {
    if (!this.#info) {
      this.#awaited = [plan, prompt];
      return;
    }
    const { clip, preview, refine_audio } = plan;
    $("prompt").value = prompt;
    $("num_frames").value = clip.num_frames;
    $("canvas").value = `${clip.width}x${clip.height}`;
    if ($("canvas").value === "") $("canvas").value = "custom";
    this.#showCanvas();
    [$("width").value, $("height").value, $("seed").value] = [clip.width, clip.height, clip.seed];
    for (const radio of $("form").elements.mode) if (radio.value === clip.mode && !radio.disabled) radio.checked = true;
    this.#showMode();
    const isUsual = clip.adapters.length === 0 && String(clip.steps) === $("steps").placeholder;
    $("steps").value = isUsual ? "" : clip.steps;
    for (const [box, strength] of this.#adapters()) {
      const use = clip.adapters.find(({ name }) => name === box.value);
      box.checked = use !== undefined;
      strength.value = use && String(use.strength) !== strength.placeholder ? use.strength : "";
    }
    $("stills").checked = preview.max_side > 0;
    $("refine_audio").checked = refine_audio !== null;
    this.clearErrors();
  }

  request() {
    const { elements } = $("form");
    const request = { prompt: $("prompt").value, mode: elements.mode.value };
    // Text that is no number goes as it is: the server says what is wrong with it.
    for (const name of ["num_frames", "width", "height", "steps"])
      if ($(name).value !== "") request[name] = Number($(name).value);
    if ($("seed").value.trim() !== "") request.seed = $("seed").value.trim();
    request.adapters = this.#adapters().filter(([box]) => box.checked).map(([{ value: name }, { value }]) =>
      value === "" ? { name } : { name, strength: Number(value) });
    if ($("refine_audio").checked) request.refine_audio = {};
    if (!$("stills").checked) request.preview = { max_side: 0, every_steps: 1 };
    return request;
  }

  // Shows what is wrong and moves the focus to the first field that is.
  tell(error) {
    this.clearErrors();
    const elsewhere = [];
    let first = null;
    for (const { field, description } of error.violations ?? []) {
      const name = field.split(/[.[]/)[0];
      const place = document.querySelector(`[data-error="${CSS.escape(name)}"]`);
      if (!place) {
        elsewhere.push(description);
        continue;
      }
      place.textContent = description;
      const input = $(name);
      if (input?.matches("input, textarea, select")) {
        input.setAttribute("aria-invalid", "true");
        first ??= input;
      }
      if (place.closest("#more")) $("more").open = true;
      if (place.closest("#custom-canvas")) $("custom-canvas").hidden = false;
    }
    $("form-error").textContent = error.violations?.length ? elsewhere.join(" ") : error.message;
    first?.focus();
  }

  clearErrors() {
    for (const place of document.querySelectorAll("[data-error], #form-error")) place.textContent = "";
    for (const input of document.querySelectorAll("[aria-invalid]")) input.removeAttribute("aria-invalid");
  }

  // What this model understands is better than what the page says for any.
  #showExamples(examples) {
    if (examples.length === 0) return;
    $("prompt").placeholder = examples[0];
    $("example-list").replaceChildren(...examples.map((example) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.className = "plain chip";
      chip.textContent = example;
      chip.addEventListener("click", () => {
        $("prompt").value = example;
        this.clearErrors();
      });
      return chip;
    }));
    $("examples").hidden = false;
  }

  // The inputs of each adapter: whether it is used, and its strength.
  #adapters() {
    return [...$("adapter-list").children].map((row) => [...row.querySelectorAll("input")]);
  }

  #showCanvas() {
    const choice = $("canvas").value;
    $("custom-canvas").hidden = choice !== "custom";
    if (choice !== "custom") [$("width").value, $("height").value] = choice.split("x");
  }

  #showMode() {
    if (!this.#info) return;
    const isDense = $("form").elements.mode.value === "dense";
    $("steps").placeholder = (isDense ? this.#info.default_dense_clip : this.#info.default_clip).steps;
  }
}

function adapterRow(adapter) {
  const row = document.createElement("div");
  const label = document.createElement("label");
  const box = document.createElement("input");
  const strength = document.createElement("input");
  row.className = "choice";
  label.className = "choice";
  box.type = "checkbox";
  box.value = adapter.name;
  strength.type = "number";
  strength.step = "any";
  strength.placeholder = adapter.default_strength;
  strength.setAttribute("aria-label", `Strength of ${adapter.name}`);
  label.append(box, adapter.name);
  row.append(label, strength);
  return row;
}
