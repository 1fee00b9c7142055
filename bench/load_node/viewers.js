// Viewers of one job, written against the protos alone, without h3stream's own client.
//
//     node viewers.js ADDRESS PROTO_DIRECTORY JOB_ID NUM_VIEWERS
//
// Each viewer has a connection of its own and follows the job from its first event to its end. A lost connection is
// tried again from the first event that has not come. Prints a line of JSON for each viewer: what came, and a SHA-256
// over the media in order.

import { createHash } from "node:crypto";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const RETRY_MS = 200;
const GIVE_UP_MS = 60_000;
const MAX_MESSAGE_BYTES = 1 << 20;

const [address, protoDirectory, jobId, numViewers] = process.argv.slice(2);

const definition = protoLoader.loadSync("h3stream/v1/video.proto", {
  includeDirs: [protoDirectory],
  keepCase: true,
  longs: Number,
  oneofs: true,
  defaults: true, // else event 0 has no number
});
const { VideoService } = grpc.loadPackageDefinition(definition).h3stream.v1;

/** The bytes of an event that belong to the clip's media stream. */
function mediaOf(event) {
  return event.payload === "init_segment" || event.payload === "fragment" ? event[event.payload].data : null;
}

/** Follows the job from an event on; resolves with the status that ends the call. */
function follow(client, fromSeq, onEvent) {
  return new Promise((resolve) => {
    const call = client.Attach({ job_id: jobId, from_seq: fromSeq });
    call.on("data", (response) => onEvent(response.event));
    call.on("error", () => {}); // its status follows
    call.on("status", resolve);
  });
}

async function watch() {
  const client = new VideoService(address, grpc.credentials.createInsecure(), {
    "grpc.use_local_subchannel_pool": 1, // otherwise all clients of a process would share one connection
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
  });
  const digest = createHash("sha256");
  const seen = { num_events: 0, num_lost: 0, num_doubled: 0, num_cuts: 0, error: "" };
  let lastEventMs = Date.now();
  for (;;) {
    const status = await follow(client, seen.num_events, (event) => {
      lastEventMs = Date.now();
      if (event.seq < seen.num_events) {
        seen.num_doubled += 1;
        return;
      }
      seen.num_lost += event.seq - seen.num_events;
      seen.num_events = event.seq + 1;
      const media = mediaOf(event);
      if (media !== null) digest.update(media);
    });
    if (status.code === grpc.status.OK) break;
    if (status.code !== grpc.status.UNAVAILABLE || Date.now() - lastEventMs > GIVE_UP_MS) {
      seen.error = `${grpc.status[status.code]}: ${status.details}`;
      break;
    }
    seen.num_cuts += 1;
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  client.close();
  return { ...seen, digest: digest.digest("hex") };
}

const results = await Promise.all(Array.from({ length: Number(numViewers) }, watch));
for (const result of results) console.log(JSON.stringify(result));
