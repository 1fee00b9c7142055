"""The VAE worker: latents to frames, samples, fragments and artifacts."""
