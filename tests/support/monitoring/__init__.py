"""Debian's Prometheus and Alertmanager, as tests run them."""
