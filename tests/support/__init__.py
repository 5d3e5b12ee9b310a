"""Case lists, tensor layouts, comparison and device rules shared by the tests and the benchmarks."""
