"""`python -m services.vae --model DIR --listen ADDRESS`: serves the VAE worker without Ray."""

from services.common.process import main
from services.vae.config import VaeConfig

main("services.vae", VaeConfig)
