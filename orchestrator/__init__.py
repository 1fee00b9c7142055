"""The service that clients talk to: admission, jobs, phases, replay.

Holds no weights and imports neither torch nor diffusers.
"""

import os

# Before gRPC is imported, which looks then: it would write a line of its own, in no format of ours, for each byte of
# junk that strangers send.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
