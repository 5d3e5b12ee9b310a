"""How benchmarks are timed, recorded and shown."""
