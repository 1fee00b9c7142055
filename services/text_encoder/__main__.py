"""`python -m services.text_encoder --model DIR --listen ADDRESS`: serves the text encoder without Ray."""

import os

from services.common.process import main
from services.common.token import TOKEN_VARIABLE
from services.text_encoder.config import TextEncoderConfig

# Taken out: no process that this one starts needs it.
main("services.text_encoder", TextEncoderConfig, os.environ.pop(TOKEN_VARIABLE, ""))
