"""What every process needs: rpc, errors, settings, telemetry, the bus and KV transport. No torch."""
