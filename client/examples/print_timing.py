"""Prints when each piece of a clip arrives, to see that it arrives while later chunks are still being sampled.

h3stream serve                # in another terminal; serves once it says "listening on"
python print_timing.py "a red kite over the sea"
"""

import asyncio
import sys
import time

from h3stream import Accepted, AsyncClient, Completed, Fragment, PhaseChange


async def main(prompt: str, address: str = "127.0.0.1:50051") -> None:
    """Makes a clip and prints what happens when."""
    started_s = time.monotonic()
    async with AsyncClient(address) as client:
        async for event in client.generate(prompt, num_frames=73):
            match event:
                case Accepted():
                    text = f"accepted: {len(event.plan.chunks)} chunks, {event.plan.clip.num_frames} frames"
                case PhaseChange():
                    text = f"{event.phase} {event.chunk_index if event.chunk_index >= 0 else ''}"
                case Fragment():
                    text = f"    frames {event.first_frame} to {event.first_frame + event.num_frames - 1} are here"
                case Completed():
                    early = event.timings.num_frames_before_sampling_end
                    text = f"completed; {early} frames were out before sampling ended"
                case _:
                    continue
            print(f"{time.monotonic() - started_s:7.2f} s  {text}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
