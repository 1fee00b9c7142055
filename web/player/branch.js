// Going on from a chunk of a clip: offered as soon as there is one, and as a job of its own.

import { createJob } from "./api.js";

const $ = (id) => document.getElementById(id);

export class Branching {
  #jobId = "";
  #onMade;

  // onMade(jobId): the new job's.
  constructor(onMade) {
    this.#onMade = onMade;
    $("branch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#make();
    });
  }

  // Begins anew for a job; nothing is offered yet.
  begin(jobId) {
    this.#jobId = jobId;
    $("branching").hidden = true;
    $("branching").open = false;
    $("branch-chunk").replaceChildren();
    for (const id of ["branch-seed", "branch-prompt"]) $(id).value = "";
    $("branch-problem").textContent = "";
  }

  // Chunks up to this one, counted from 0, can be sampled anew: all before it are finished.
  offer(chunkIndex) {
    const choices = $("branch-chunk");
    for (let index = choices.length + 1; index <= chunkIndex; index++) choices.add(new Option(`${index + 1}`, index));
    $("branching").hidden = choices.length === 0;
  }

  async #make() {
    const branch = { job_id: this.#jobId, from_chunk: Number($("branch-chunk").value) };
    if ($("branch-prompt").value.trim()) branch.prompt = $("branch-prompt").value;
    if ($("branch-seed").value.trim()) branch.seed = $("branch-seed").value.trim();
    $("branch-problem").textContent = "";
    try {
      this.#onMade(await createJob({ branch }));
    } catch (error) {
      $("branch-problem").textContent = error.message;
    }
  }
}
