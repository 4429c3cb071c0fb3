"""What the machine does while it works: GPU health, compiler caches. Knows no torch."""
