"""Day 0: every kernel held to its float32 reference, then timed, recorded and written to one JSON file (docs/benchmark.md)."""
