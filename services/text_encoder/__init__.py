"""The text encoder worker: prompt to hidden states."""
