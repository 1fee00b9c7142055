// Follows the events of a job over any number of connections: each event once, in order, until the job has ended.

import { getJob, jobUrl, parse } from "./api.js";

const NAMES = [
  "accepted", "phase_change", "progress", "preview", "init_segment", "fragment", "job_warning", "stream_complete",
  "refine_started", "refine_progress", "refined_init_segment", "refined_fragment", "refined_audio", "refine_failed",
  "completed", "event",
];
const RETRY_MS = 1000;
// A job says something every 2 seconds: a connection that is silent for so long is dead, whatever the browser thinks.
const SILENCE_MS = 10_000;

export class Follower {
  #jobId;
  #handlers;
  #source = null;
  #timer = 0;
  #watch = 0;
  #lastSeq = -1;

  // handlers: event(name, data), ended({state, error}), connection(isThere), gone(error): there is no such job,
  // or it is not this caller's to see.
  constructor(jobId, handlers) {
    this.#jobId = jobId;
    this.#handlers = handlers;
    this.#open();
  }

  close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#watch);
    this.#handlers = null;
    this.#source?.close();
    this.#source = null;
  }

  #open() {
    const resume = this.#lastSeq < 0 ? "" : `?last_event_id=${this.#lastSeq}`;
    const source = new EventSource(`${jobUrl(this.#jobId)}/events${resume}`);
    this.#source = source;
    this.#expect();
    source.onopen = () => this.#handlers?.connection(true);
    source.onerror = () => this.#reopen();
    for (const name of NAMES) source.addEventListener(name, (message) => this.#receive(name, message));
    source.addEventListener("ended", ({ data }) => {
      const handlers = this.#handlers;
      this.close();
      handlers?.ended(JSON.parse(data));
    });
  }

  // Gives the connection until the next sign of life.
  #expect() {
    clearTimeout(this.#watch);
    this.#watch = setTimeout(() => this.#reopen(), SILENCE_MS);
  }

  // By itself an EventSource gives up for good when it is answered with anything but a stream.
  #reopen() {
    if (!this.#handlers) return;
    this.#source.close();
    this.#handlers.connection(false);
    clearTimeout(this.#timer);
    clearTimeout(this.#watch);
    this.#timer = setTimeout(async () => {
      const error = await getJob(this.#jobId).then(() => null, (reason) => reason);
      if (!this.#handlers) return;
      if ([401, 403, 404].includes(error?.status)) {
        const handlers = this.#handlers;
        this.close();
        handlers.gone(error);
      } else if (error) this.#reopen();
      else this.#open();
    }, RETRY_MS);
  }

  #receive(name, message) {
    const seq = Number(message.lastEventId);
    if (!this.#handlers || seq <= this.#lastSeq) return;
    if (seq !== this.#lastSeq + 1) return this.#reopen();
    this.#lastSeq = seq;
    this.#expect();
    this.#handlers.event(name, parse(message.data));
  }
}
