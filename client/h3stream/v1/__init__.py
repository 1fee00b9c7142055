"""Generated protobuf and gRPC code; `make protos` writes it."""
