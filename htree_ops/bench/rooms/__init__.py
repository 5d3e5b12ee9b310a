"""The benchmarks of each room: one module per room, with ``make_benchmarks(device) -> list[Benchmark]``."""
