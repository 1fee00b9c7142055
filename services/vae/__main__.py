"""`python -m services.vae --model DIR --listen ADDRESS`: serves the VAE worker without Ray."""

import os

from services.common.process import main
from services.common.token import TOKEN_VARIABLE
from services.vae.config import VaeConfig

# Taken out: no process that this one starts needs it.
main("services.vae", VaeConfig, os.environ.pop(TOKEN_VARIABLE, ""))
