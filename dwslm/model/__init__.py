"""The hybrid language model, one part a file; `lm.py` puts them together."""
