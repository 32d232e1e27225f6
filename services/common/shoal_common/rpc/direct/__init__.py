"""Calls between services over plain connections: gRPC's meaning with a fraction of its work. See ADR 9."""
