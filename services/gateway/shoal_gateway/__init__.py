"""The public edge: HTTP and gRPC, prompt encoding, output parsing."""
