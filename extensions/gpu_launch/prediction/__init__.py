"""Predictions: how long a step of a training takes on some cards, and the memory that fine-tuning a model needs."""
