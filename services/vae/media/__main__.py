"""`python -m services.vae.media`: which encoders really work here, as one JSON object, for `h3stream doctor`.

{"pictures": {NAME: why it does not work, or null}, "sound": why AAC does not work, or null}
"""

from __future__ import annotations

import json

from core.budget import VIDEO_BIT_RATE
from h3stream.errors import MuxError
from services.vae.media.encoders import H264_ENCODERS, AacEncoder, open_h264_encoder

TRIAL_SIZE = (256, 160)
"""Width and height of the trial pictures; hardware encoders refuse much smaller ones."""


def main() -> None:
    """Opens every encoder and encodes a few pictures with it."""
    pictures: dict[str, str | None] = dict.fromkeys(H264_ENCODERS)
    for name in H264_ENCODERS:
        try:
            open_h264_encoder(*TRIAL_SIZE, VIDEO_BIT_RATE, pinned=name)
        except MuxError as error:
            pictures[name] = str(error)
    sound = None
    try:
        AacEncoder()
    except MuxError as error:
        sound = str(error)
    print(json.dumps({"pictures": pictures, "sound": sound}))


if __name__ == "__main__":
    main()
