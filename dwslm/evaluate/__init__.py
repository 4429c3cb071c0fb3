"""Bits per byte of a model on text: by slice, by position in long documents, and of a user's own file."""
