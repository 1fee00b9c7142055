"""The page and the HTTP gateway in front of the gRPC service: everything here goes through the SDK."""
