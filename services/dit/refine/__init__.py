"""Refining the sound of a finished clip: extra denoising of the audio against the frozen video."""
