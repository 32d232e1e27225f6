"""The public gRPC client: grpcio and protobuf only."""
