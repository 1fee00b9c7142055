// The page: one job at a time, named in the address so that a reload finds it again.

import { cancelJob, closeSession, createJob, getJob, jobUrl, openSession, pause, serverInfo } from "./api.js";
import { Branching } from "./branch.js";
import { Follower } from "./follow.js";
import { Form } from "./form.js";
import { askForKey, startKeys } from "./keys.js";
import { Player } from "./player.js";
import { refinedUrl, Sound } from "./sound.js";
import { Timeline } from "./timeline.js";

const $ = (id) => document.getElementById(id);
const PHASES = {
  queued: "Waiting in the queue",
  encode: "Reading the prompt",
  prefill: "Reading the prompt",
  denoise: "Sampling",
  commit: "Sampling",
  decode: "Decoding",
  finish: "Completing the files",
  refine: "Refining the sound",
};
const ENDINGS = { succeeded: "Done", failed: "Failed", cancelled: "Cancelled" };

const REASONS = {
  cancelled: "This clip was cancelled.",
  failed: "This clip could not be made.",
  succeeded: "There is nothing to play: no encoder worked. What was made is in the files below.",
};
const FIRST_FILES = ["final.mp4", "refined.mp4"];
const HINT = $("hint").textContent;
const timeline = new Timeline($("timeline"));
const form = new Form(submit);
const branching = new Branching(begin);
let session = null;

// One job on the page. `close` leaves nothing of it behind but what is to be seen.
class Session {
  #follower;
  #player;
  #sound;
  #plan = null;
  #numFragments = 0;
  #hasMoved = false;
  #isStreamed = false;
  #refineJobId;
  #isOwn;

  // refineJobId: the job that refines its sound, if it is not this one.  isOwn: the form is what it was asked for with.
  constructor(jobId, refineJobId, isOwn) {
    this.jobId = jobId;
    this.#refineJobId = refineJobId;
    this.#isOwn = isOwn;
    show("working");
    this.#player = this.#newPlayer();
    this.#sound = new Sound($("video"), jobId, {
      started: (refining) => history.replaceState(null, "", addressOf(jobId, refining)),
      ended: (refining) => this.#refined(refining),
      taken: () => this.#release(),
    });
    this.#follower = new Follower(jobId, {
      event: (name, data) => {
        this[`on_${name}`]?.(data);
        if (name.startsWith("refine")) this.#sound.event(name, data);
      },
      ended: (ending) => this.#end(ending),
      connection: (isThere) => ($("connection").hidden = isThere),
      gone: (error) => this.#gone(error),
    });
  }

  close() {
    this.#follower.close();
    this.#sound.close();
    this.#release();
    for (const id of ["video", "play", "unmute", "waiting", "thumb", "connection", "cancel"]) $(id).hidden = true;
    $("video").controls = false;
    timeline.stop();
  }

  // Leaves the element to the files.
  #release() {
    this.#player?.dispose();
    this.#player = null;
  }

  play() {
    $("play").hidden = true;
    this.#player?.play();
  }

  on_accepted({ plan }) {
    this.#plan = plan;
    $("screen").style.setProperty("--aspect", plan.clip.width / plan.clip.height);
    timeline.begin(plan);
    this.#tellPrompt(plan);
    plan.warnings.forEach(notice);
    say("The job has been accepted", "");
  }

  // What the clip shows, which its events do not say.
  async #tellPrompt(plan) {
    const job = await this.#jobOrNothing(this.jobId);
    if (session !== this || !job) return;
    $("caption").textContent = job.prompt;
    if (!this.#isOwn) form.restore(plan, job.prompt);
  }

  on_phase_change({ phase, chunk_index }) {
    timeline.phase(phase, chunk_index);
    if (phase === "denoise") branching.offer(chunk_index); // of a dense clip, -1
    const chunk = chunk_index >= 0 ? ` chunk ${chunk_index + 1} of ${this.#plan.chunks.length}` : "";
    say(PHASES[phase] ?? "Working", chunk && ["denoise", "decode"].includes(phase) ? chunk : "");
  }

  on_progress({ phase, chunk_index, step, num_steps, num_frames_emitted, queue_position }) {
    if (phase === "denoise") timeline.step(chunk_index, step, num_steps);
    const parts = [];
    if (queue_position > 0) parts.push(queue_position === 1 ? "1 job is ahead" : `${queue_position} jobs are ahead`);
    if (phase === "denoise" && step > 0) parts.push(`step ${step} of ${num_steps}`);
    if (num_frames_emitted > 0) parts.push(`${seconds(num_frames_emitted)} of ${seconds(this.#plan.clip.num_frames)} made`);
    $("detail").textContent = parts.join(" · ");
  }

  on_preview({ data, media_type, chunk_index }) {
    const picture = this.#numFragments > 0 ? $("thumb") : $("still");
    picture.src = `data:${media_type};base64,${data}`;
    picture.alt = `Coarse still of ${chunk_index >= 0 ? `chunk ${chunk_index + 1}` : "the clip"}`;
    picture.hidden = false;
  }

  on_init_segment({ seq, mime_type }) {
    this.#player.start(seq, mime_type);
  }

  on_fragment({ seq, chunk_index }) {
    timeline.ready(chunk_index);
    this.#player.add(seq, this.#numFragments++ === 0);
  }

  on_stream_complete() {
    this.#isStreamed = true;
    this.#player?.finish();
    $("thumb").hidden = true;
  }

  on_refine_progress({ step, num_steps }) {
    timeline.refined(step, num_steps);
  }

  on_job_warning(warning) {
    notice(warning);
  }

  on_completed({ timings, audio_health }) {
    timeline.complete();
    const { num_frames, seed } = this.#plan.clip;
    const before = timings.num_frames_before_sampling_end;
    const pace = before > 0
      ? `${before} of ${num_frames} frames had arrived before the last chunk was sampled.`
      : `All ${num_frames} frames came once sampling was done.`;
    $("facts").textContent =
      `First pictures after ${timings.first_fragment_s.toFixed(1)} s, everything after ${timings.total_s.toFixed(1)} s. ` +
      `${pace} Seed ${seed}, loudest sample ${audio_health.peak.toFixed(2)}.`;
  }

  async #end({ state, error }) {
    say(ENDINGS[state] ?? state, "");
    $("detail").textContent = "";
    form.setBusy(false);
    if (["cancel", "stage"].includes(document.activeElement.id)) $("generate").focus({ preventScroll: true });
    $("cancel").hidden = true;
    if (state === "failed") $("problem").textContent = error?.message ?? "The job has failed.";
    if (state !== "succeeded") timeline.stop();
    const isWhole = state === "succeeded" || this.#isStreamed; // what fails after that is the sound's refinement
    const job = isWhole ? await this.#jobOrNothing(this.jobId) : null;
    if (session !== this) return;
    if (job?.source_job_id) {
      // A refinement, which shows at its clip.
      history.replaceState(null, "", addressOf(job.source_job_id, this.jobId));
      attach(job.source_job_id, this.jobId);
      return;
    }
    if (!isWhole || this.#numFragments === 0) {
      this.close();
      show("ended");
      $("still").hidden = true;
      $("hint").hidden = false;
      $("hint").textContent = REASONS[state];
      if (this.#numFragments > 0) offerPartial(this.jobId);
    }
    if (job) offerFiles(job);
    if (!isWhole || this.#numFragments === 0) return;
    this.#player?.finish(); // also where an encoder failed and the stream ended early
    const names = job?.artifacts.map(({ name }) => name) ?? [];
    const hasFinal = names.includes("final.mp4");
    const file = hasFinal ? "artifacts/final.mp4" : "stream.mp4";
    const url = hasFinal || this.#isStreamed ? `${jobUrl(this.jobId)}/${file}` : partialUrl(this.jobId);
    this.#sound.clip(url, hasFinal, names.includes("latents.safetensors"));
    if (names.includes("refined.mp4")) this.#sound.refined(refinedUrl(this.jobId));
    else if (this.#refineJobId) this.#sound.follow(this.#refineJobId);
    // From here on the element can fetch the finished file by itself.
    this.#player?.whenPlayed(() => {
      this.#release();
      $("video").controls = true;
      $("video").src = url;
    });
  }

  // A job of its own has refined the sound.
  async #refined(jobId) {
    const job = await this.#jobOrNothing(jobId);
    if (session !== this || !job) return;
    const artifacts = job.artifacts.filter(({ name }) => name.startsWith("refine"));
    offerFiles({ ...job, artifacts });
    if (artifacts.some(({ name }) => name === "refined.mp4")) this.#sound.refined(refinedUrl(jobId));
  }

  async #jobOrNothing(jobId) {
    for (let attempt = 0; attempt < 20; attempt++) {
      try {
        return await getJob(jobId);
      } catch {
        await pause(1000);
      }
    }
    return null;
  }

  #gone({ status, message }) {
    this.close();
    session = null;
    if (status === 404) history.replaceState(null, "", location.pathname + location.search);
    show("idle");
    $("progress").hidden = true;
    $("caption").textContent = "";
    form.setBusy(false);
    $("problem").textContent = status === 404 ? "The server does not know this clip any more." : message;
    if (status === 401) askForKey(message).then(followAddress);
  }

  #newPlayer() {
    return new Player($("video"), this.jobId, {
      onRefused: () => ($("play").hidden = false),
      onProblem: (error) => ($("problem").textContent = `The clip cannot be played here: ${error.message}`),
      onWaiting: () => ($("waiting").hidden = !this.#hasMoved || $("cancel").hidden || $("video").ended),
      onPlaying: () => {
        for (const id of ["waiting", "play", "still"]) $(id).hidden = true;
        if (!this.#hasMoved) show("playing");
        this.#hasMoved = true;
      },
    });
  }
}

async function submit() {
  form.clearErrors();
  form.setBusy(true);
  try {
    begin(await createJob(form.request()), true);
  } catch (error) {
    form.setBusy(false);
    form.tell(error);
    if (error.status === 401) askForKey(error.message);
  }
}

// Shows a job that was made here.  isOwn: the form is what it was asked for with.
function begin(jobId, isOwn = false) {
  history.pushState(null, "", addressOf(jobId));
  attach(jobId, "", isOwn);
  $("stage").focus({ preventScroll: true }); // the button that had it is off, or gone
  if (matchMedia("(max-width: 52rem)").matches) $("stage").scrollIntoView({ block: "start" });
}

function attach(jobId, refineJobId = "", isOwn = false) {
  session?.close();
  for (const id of ["notices", "artifacts"]) $(id).replaceChildren();
  for (const id of ["problem", "facts", "detail"]) $(id).textContent = "";
  for (const id of ["results", "still"]) $(id).hidden = true;
  timeline.clear();
  $("video").muted = true;
  showMuted();
  $("progress").hidden = $("cancel").hidden = false;
  $("cancel").disabled = false;
  $("caption").textContent = isOwn ? $("prompt").value : "";
  branching.begin(jobId);
  form.setBusy(true);
  say("Connecting", "");
  session = new Session(jobId, refineJobId, isOwn);
}

// What the screen shows.
function show(state) {
  $("screen").dataset.state = state;
  $("hint").hidden = state !== "idle";
  $("hint").textContent = HINT;
  $("video").hidden = state === "idle" || state === "ended";
  $("unmute").hidden = state !== "playing";
  if (state === "playing") $("video").controls = true;
}

function say(phase, more) {
  const text = phase + more;
  if ($("phase").textContent === text) return;
  $("phase").textContent = text;
  $("status").textContent = text;
  document.title = `${phase} – h3stream`;
}

function notice({ message }) {
  $("notices").append(item("li", message));
}

function offerFiles({ job_id, artifacts, removed_artifacts }) {
  for (const { name, size_bytes, sha256 } of artifacts) {
    const link = item("a", name);
    link.href = `${jobUrl(job_id)}/artifacts/${encodeURIComponent(name)}`;
    link.download = name;
    link.title = `SHA-256 ${sha256}`;
    addFile(link, size(size_bytes));
  }
  for (const { name, message } of removed_artifacts) addFile(item("span", name), `removed: ${message}`);
  $("results").hidden = false;
}

function offerPartial(jobId) {
  const link = item("a", "What was made until then");
  link.href = partialUrl(jobId);
  addFile(link, "not the whole clip");
  $("results").hidden = false;
}

// What one can watch stands before all else.
function addFile(link, about) {
  const row = document.createElement("li");
  row.append(link, item("span", about, "quiet"));
  const place = FIRST_FILES.indexOf(link.download ?? "");
  row.dataset.place = place < 0 ? FIRST_FILES.length : place;
  const next = [...$("artifacts").children].find((other) => other.dataset.place > row.dataset.place);
  $("artifacts").insertBefore(row, next ?? null);
}

function item(kind, text, className = "") {
  const element = document.createElement(kind);
  element.textContent = text;
  element.className = className;
  return element;
}

// The stream as far as it goes: without asking for a part, one that is not whole breaks off.
function partialUrl(jobId) {
  return `${jobUrl(jobId)}/stream.mp4?partial=true`;
}

function size(bytes) {
  return bytes < 1e6 ? `${Math.ceil(bytes / 1e3)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;
}

function seconds(frames) {
  return `${(frames / 24).toFixed(1)} s`;
}

function showMuted() {
  $("unmute").textContent = $("video").muted ? "Unmute" : "Mute";
}

function jobsInAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  return [given.get("job"), given.get("refined") ?? ""];
}

function addressOf(jobId, refineJobId = "") {
  const refined = refineJobId && `&refined=${encodeURIComponent(refineJobId)}`;
  return `#job=${encodeURIComponent(jobId)}${refined}`;
}

async function cancel() {
  const { jobId } = session;
  $("stage").focus({ preventScroll: true });
  $("cancel").disabled = true;
  say("Cancelling", "");
  try {
    await cancelJob(jobId); // the events tell the rest
  } catch (error) {
    $("cancel").disabled = false;
    $("problem").textContent = `The job could not be cancelled: ${error.message}`;
  }
}

async function findServer() {
  for (;;) {
    try {
      const info = await serverInfo();
      form.offer(info);
      $("server").textContent = `${info.model_name} · server ${info.server_version}`;
      return;
    } catch (error) {
      $("server").textContent = error.status === 401 ? "" : `Waiting for the server: ${error.message}`;
      await (error.status === 401 ? askForKey(error.message) : pause(2000));
    }
  }
}

function followAddress() {
  const [jobId, refineJobId] = jobsInAddress();
  if (jobId && jobId !== session?.jobId) attach(jobId, refineJobId);
}

$("cancel").addEventListener("click", cancel);
$("play").addEventListener("click", () => session?.play());
$("unmute").addEventListener("click", () => ($("video").muted = !$("video").muted));
$("video").addEventListener("volumechange", showMuted);
addEventListener("hashchange", followAddress);
addEventListener("pagehide", () => session?.close());
addEventListener("pageshow", ({ persisted }) => {
  if (persisted && session) attach(...jobsInAddress(), true);
});

await startKeys(openSession, closeSession);
followAddress();
findServer();
