"""Serving a language model whose layers are divided between ranks, with OpenAI's HTTP API."""
