"""Timing with a correctness gate, a baseline beside it and a ceiling above it; results as JSON and CSV."""
