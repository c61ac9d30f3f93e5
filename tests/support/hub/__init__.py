"""Hubs and brokers for tests, real and fake, with their users and browsers."""
