// The sound of a clip: refined when asked for, then played as it was streamed or refined, at one place and one level.

import { cancelJob, jobUrl, refineJob } from "./api.js";
import { Follower } from "./follow.js";

const $ = (id) => document.getElementById(id);
const MODES = { exact: "computed in full", build: "computed in full, and kept", cached: "from the cache" };

export class Sound {
  #video;
  #jobId;
  #handlers;
  #follower = null;
  #refineJobId = "";
  #files = {}; // of each sound: its address
  #levels = {}; // of each sound: the RMS of what its file plays
  #healths = null;
  #gain = 1;
  #abort = new AbortController();

  // handlers: started(jobId): a job refines the sound.  ended(jobId): it has.  taken(): the element plays files now.
  constructor(video, jobId, handlers) {
    this.#video = video;
    this.#jobId = jobId;
    this.#handlers = handlers;
    const { signal } = this.#abort;
    $("refine").addEventListener("click", () => this.#refine(), { signal });
    $("cancel-refine").addEventListener("click", () => this.#cancel(), { signal });
    for (const radio of document.getElementsByName("sound"))
      radio.addEventListener("change", () => this.#choose(radio.value), { signal });
    for (const id of ["sound", "sounds", "refining"]) $(id).hidden = true;
    for (const id of ["refine-problem", "refine-facts"]) $(id).textContent = "";
  }

  close() {
    this.#abort.abort();
    this.#follower?.close();
    this.#video.volume = this.#volume();
    this.#gain = 1;
    $("sound").hidden = true;
  }

  // The clip's job has ended and the clip is a file.  canRefine: whether what refining needs is still there.
  clip(url, isNormalised, canRefine) {
    this.#files.streamed = { url, isNormalised };
    $("refining").hidden = true;
    $("refine-offer").hidden = !canRefine;
    if (canRefine) $("sound").hidden = false;
    this.#offer();
  }

  // Follows a job that refines the clip's sound.
  follow(jobId) {
    this.#refineJobId = jobId;
    this.#begin();
    this.#follower?.close();
    this.#follower = new Follower(jobId, {
      event: (name, data) => this.event(name, data),
      ended: (ending) => this.#end(ending),
      connection: (isThere) => ($("connection").hidden = isThere),
      gone: () => this.#stop("The server does not know this refinement any more."),
    });
  }

  // An event of the job that refines, whichever it is.
  event(name, data) {
    if (name === "refine_started") {
      this.#begin();
      this.#tell("Refining the sound", data.has_cache ? `Cache: ${data.backend}. ${capital(data.reason)}.` : "");
    } else if (name === "refine_progress") {
      const { step, num_steps, mode } = data;
      $("refine-bar").max = num_steps;
      $("refine-bar").value = step;
      this.#tell(`Refining the sound: step ${step} of ${num_steps}`, MODES[mode] ?? "");
    } else if (name === "refined_audio") this.#told(data);
    else if (name === "refine_failed") this.#stop(`The sound could not be refined: ${data.message}`);
  }

  // The refined clip is a file.
  refined(url) {
    this.#files.refined = { url, isNormalised: true };
    $("refining").hidden = true;
    this.#offer();
  }

  async #refine() {
    this.#refineJobId = "";
    this.#begin();
    try {
      const jobId = await refineJob(this.#jobId, { audio_denoise: Number($("depth").value) });
      if (this.#abort.signal.aborted) return;
      this.#handlers.started(jobId);
      this.follow(jobId);
    } catch (error) {
      this.#stop(error.message);
    }
  }

  async #cancel() {
    $("cancel-refine").disabled = true;
    await cancelJob(this.#refineJobId).catch((error) => ($("refine-problem").textContent = error.message));
    $("cancel-refine").disabled = false;
  }

  #begin() {
    $("sound").hidden = $("refining").hidden = false;
    $("refine-offer").hidden = true;
    $("cancel-refine").hidden = this.#refineJobId === ""; // where it is the clip's own job, that has a button already
    $("refine-problem").textContent = "";
    $("refine-bar").removeAttribute("value");
    this.#tell("Waiting for the server", "");
  }

  #end({ state, error }) {
    if (state === "succeeded") this.#handlers.ended(this.#refineJobId);
    else this.#stop(state === "cancelled" ? "Cancelled." : (error?.message ?? "The sound could not be refined."));
  }

  #stop(problem) {
    $("refining").hidden = true;
    $("sound").hidden = false;
    $("refine-offer").hidden = !this.#files.streamed;
    $("refine-problem").textContent = problem;
  }

  #told({ audio_health, audio_health_before, change, sampling_s }) {
    this.#healths = { streamed: audio_health_before, refined: audio_health };
    this.#tell("Completing the refined clip", "");
    $("refine-facts").textContent =
      `Refined in ${sampling_s.toFixed(1)} s; ${change.log_mel_db.toFixed(1)} dB from the sound before (log-mel).`;
  }

  #tell(phase, detail) {
    $("refine-phase").textContent = phase;
    $("refine-detail").textContent = detail;
  }

  // Both sounds can be chosen once both are files.
  #offer() {
    if (!this.#files.streamed || !this.#files.refined) return;
    for (const [name, { isNormalised }] of Object.entries(this.#files)) {
      const health = this.#healths?.[name];
      this.#levels[name] = health ? health.std / (isNormalised ? health.normalisation_divisor : 1) : 1;
    }
    $("sound").hidden = $("sounds").hidden = false;
    $("refine-offer").hidden = true;
    for (const radio of document.getElementsByName("sound")) radio.checked = radio.value === "streamed";
    this.#match("streamed");
  }

  // Makes a sound as loud as the quieter of the two.
  #match(name) {
    const volume = this.#volume();
    const quieter = Math.min(...Object.values(this.#levels));
    this.#gain = quieter > 0 ? quieter / this.#levels[name] : 1;
    this.#video.volume = volume * this.#gain;
  }

  // Plays the other file from where the element is.
  #choose(name) {
    const video = this.#video;
    const { currentTime, paused, playbackRate } = video;
    this.#handlers.taken();
    video.controls = true;
    video.src = this.#files[name].url;
    video.playbackRate = playbackRate;
    video.currentTime = currentTime; // where it starts once the file is there
    this.#match(name);
    if (!paused) video.play().catch(() => {}); // the browser's own button is there
  }

  // What the user has set.
  #volume() {
    return Math.min(1, this.#video.volume / this.#gain);
  }
}

export const refinedUrl = (jobId) => `${jobUrl(jobId)}/artifacts/refined.mp4`;

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
