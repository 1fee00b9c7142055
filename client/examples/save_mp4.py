"""Saves a clip, playable from its first fragment on.

h3stream serve                # in another terminal; serves once it says "listening on"
python save_mp4.py "a red kite over the sea" kite.mp4
"""

import sys

from h3stream import Client, GenerationError


def main(prompt: str, path: str, address: str = "127.0.0.1:50051") -> None:
    """Makes a clip in a file."""
    with Client(address) as client:
        try:
            completed = client.save(prompt, path, num_frames=39, seed=7)
        except GenerationError as error:
            sys.exit(f"{error.reason}: {error.message}")
    print(f"{path} in {completed.timings.total_s:.1f} s, latents {completed.latents_sha256[:12]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
