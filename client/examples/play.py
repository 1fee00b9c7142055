"""Plays a clip while it is being made; closing the player cancels the job. Needs ffplay (FFmpeg).

h3stream serve                # in another terminal; serves once it says "listening on"
python play.py "a red kite over the sea"
"""

import subprocess
import sys

from h3stream import Client

PLAYER = ["ffplay", "-loglevel", "error", "-autoexit", "-i", "-"]


def main(prompt: str, address: str = "127.0.0.1:50051") -> None:
    """Makes a clip and plays it."""
    player = subprocess.Popen(PLAYER, stdin=subprocess.PIPE, bufsize=0)  # unbuffered: a fragment plays when it comes
    assert player.stdin is not None
    with Client(address) as client, client.generate(prompt, cancel_on_disconnect=True) as events:
        try:
            for event in events:
                player.stdin.write(event.media)
        except BrokenPipeError:
            print("the player was closed; the job is cancelled")
    player.stdin.close()
    player.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
