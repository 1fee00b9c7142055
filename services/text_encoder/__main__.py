"""`python -m services.text_encoder --model DIR --listen ADDRESS`: serves the text encoder without Ray."""

from services.common.process import main
from services.text_encoder.config import TextEncoderConfig

main("services.text_encoder", TextEncoderConfig)
