"""h3stream: a prompt in, video with sound out while it is being sampled."""
