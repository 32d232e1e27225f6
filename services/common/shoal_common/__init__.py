"""What every Shoal process needs: errors, settings, logs, telemetry, gRPC, the bus, identities. No torch."""
