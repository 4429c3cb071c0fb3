"""Text to shards, shards to batches."""
