"""Facts and decisions of the service as pure functions.

Only the standard library is imported, so that the orchestrator and the tests can plan a clip without torch, gRPC or
Ray, and so that every decision can be tested in microseconds.
"""
