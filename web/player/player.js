// Plays a job's stream in a video element while it grows: through Media Source Extensions where they are, otherwise
// from an HLS playlist or from one long file, which the element fetches itself.

import { jobUrl, mediaBytes } from "./api.js";

const HLS = "application/vnd.apple.mpegurl";
const Source = () => globalThis.ManagedMediaSource ?? globalThis.MediaSource;

export class Player {
  #video;
  #jobId;
  #abort = new AbortController();
  #pieces = Promise.resolve();
  #source = null;
  #buffer = null;
  #url = "";
  #onProblem;
  kind = "";

  // onRefused: the browser wants a gesture before it plays.  onProblem(error): the clip cannot be played.
  constructor(video, jobId, { onRefused, onProblem, onWaiting, onPlaying }) {
    this.#video = video;
    this.#jobId = jobId;
    this.#onProblem = onProblem;
    const { signal } = this.#abort;
    video.addEventListener("waiting", onWaiting, { signal });
    video.addEventListener("playing", onPlaying, { signal });
    video.addEventListener("error", () => onProblem(new Error(video.error?.message || "the clip cannot be played")), { signal });
    this.play = () => video.play().catch((error) => {
      if (error.name === "NotAllowedError" && !signal.aborted) onRefused();
    });
  }

  // The stream begins: `seq` is the init segment's event.
  start(seq, mimeType) {
    const source = Source();
    if (source?.isTypeSupported(mimeType)) {
      this.kind = "mse";
      this.#queue(async () => {
        await this.#open(new source(), mimeType);
        await this.#append(seq);
      });
    } else this.kind = this.#video.canPlayType(HLS) ? "hls" : "file";
  }

  // A fragment has come.
  add(seq, isFirst) {
    if (this.kind === "mse") this.#queue(() => this.#append(seq));
    else if (isFirst) this.#video.src = `${jobUrl(this.#jobId)}/${this.kind === "hls" ? "hls/index.m3u8" : "stream.mp4"}`;
    if (isFirst) this.#queue(() => this.play());
  }

  // No more fragments will come.
  finish() {
    this.#queue(() => {
      if (this.#source?.readyState === "open") this.#source.endOfStream();
    });
  }

  // Calls `then` once, when everything has been played to its end.
  whenPlayed(then) {
    this.#queue(() => {
      if (this.#video.ended) then();
      else this.#video.addEventListener("ended", then, { once: true, signal: this.#abort.signal });
    });
  }

  // Takes everything off the element again.
  dispose() {
    this.#abort.abort();
    URL.revokeObjectURL(this.#url);
    if (this.#buffer && this.#source.readyState !== "closed") {
      if (this.#source.readyState === "open") this.#buffer.abort();
      this.#source.removeSourceBuffer(this.#buffer);
    }
    this.#source = this.#buffer = null;
    this.#video.removeAttribute("src");
    this.#video.load();
  }

  #queue(work) {
    this.#pieces = this.#pieces
      .then(() => this.#abort.signal.aborted || work())
      .catch((error) => this.#abort.signal.aborted || this.#onProblem(error));
  }

  async #open(source, mimeType) {
    this.#source = source;
    this.#url = URL.createObjectURL(source);
    this.#video.disableRemotePlayback = true; // a managed source opens only then
    const opened = once(source, "sourceopen", this.#abort.signal);
    this.#video.src = this.#url;
    await opened;
    URL.revokeObjectURL(this.#url); // the element holds the source now
    this.#url = "";
    this.#buffer = source.addSourceBuffer(mimeType);
  }

  async #append(seq) {
    const data = await mediaBytes(this.#jobId, seq, this.#abort.signal);
    const { signal } = this.#abort;
    signal.throwIfAborted();
    const done = once(this.#buffer, "updateend", signal);
    this.#buffer.appendBuffer(data);
    await done;
  }
}

function once(target, name, signal) {
  return new Promise((resolve, reject) => {
    target.addEventListener(name, resolve, { once: true, signal });
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  });
}
