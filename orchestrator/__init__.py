"""The service that clients talk to: admission, jobs, phases, replay.

Holds no weights and imports neither torch nor diffusers.
"""
