// The gateway's HTTP API. Every failure is an ApiError.

import { headersOf } from "./keys.js";

// A piece of media is below 1 MiB; a call that takes longer than this hangs.
const TIMEOUT_MS = 20_000;

export class ApiError extends Error {
  // status 0: the gateway was not reached.  hadKey: whether the call carried a key.
  constructor(status, { reason = "UNREACHABLE", message = "the gateway cannot be reached", violations = [], retry_after_s } = {}, hadKey = false) {
    super(inWords(status, message, retry_after_s, hadKey));
    this.status = status;
    this.reason = reason;
    this.violations = violations;
  }

  // Whether the same call may succeed later.
  get isPassing() {
    return this.status === 0 || this.status >= 502;
  }
}

function inWords(status, message, retryAfterS, hadKey) {
  if (status === 401) return hadKey ? `The server does not take this API key: ${message}` : "This server asks for an API key.";
  if (status === 403) return `This API key does not allow that: ${message}`;
  if (status === 429) return `There is no room now: ${message}. Try again in ${Math.ceil(retryAfterS ?? 1)} s.`;
  return message;
}

// A seed has up to 64 bits, more than a number holds exactly: it is a number in JSON, and text on this page.
export const parse = (data) => JSON.parse(data.replace(/"seed":(\d+)/g, '"seed":"$1"'));
const stringify = (value) => JSON.stringify(value).replace(/"seed":"0*(\d+)"/, '"seed":$1');

export const jobUrl = (jobId) => `api/jobs/${encodeURIComponent(jobId)}`;

async function call(path, options) {
  const headers = { ...headersOf(), ...options?.headers };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (options?.signal?.aborted) throw error;
    throw new ApiError(0);
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const facts = error ?? { reason: "HTTP_ERROR", message: `HTTP status ${response.status}` };
  throw new ApiError(response.status, facts, "Authorization" in headers);
}

const json = async (path, options) => parse(await (await call(path, options)).text());

export const serverInfo = () => json("api/info");
export const getJob = (jobId) => json(jobUrl(jobId), { signal: AbortSignal.timeout(TIMEOUT_MS) });
export const openSession = (key) => call("api/session", { method: "POST", headers: headersOf(key) });
export const closeSession = () => call("api/session", { method: "DELETE" });
export const cancelJob = (jobId) => json(jobUrl(jobId), { method: "DELETE" });

export const createJob = (request) => post("api/jobs", request);
export const refineJob = (jobId, spec) => post(`${jobUrl(jobId)}/refine`, spec);

// Starts a job; its id.
async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  return (await json(path, { method: "POST", headers, body: stringify(body) })).job_id;
}

// The bytes of one event's media: tried again until they are there, the signal is given or they cannot come.
export async function mediaBytes(jobId, seq, signal) {
  for (;;) {
    try {
      const limited = AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]);
      const response = await call(`${jobUrl(jobId)}/media/${seq}.mp4`, { signal: limited });
      return await response.arrayBuffer(); // a cut in the middle rejects: the length is known
    } catch (error) {
      signal.throwIfAborted();
      if (error instanceof ApiError && !error.isPassing) throw error;
    }
    await pause(500, signal);
  }
}

export function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
