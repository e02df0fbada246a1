"""Speculative decoding: guess tokens cheaply, check them all in one step of the model."""
