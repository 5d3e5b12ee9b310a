"""What tree attention does to a language model (docs/quality.md)."""
