"""Published weight files: their headers, layouts and key maps. Imports no torch, so anything may look at a file."""
