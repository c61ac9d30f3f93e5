"""What NVML answers on real GPUs: recorded once, replayed in tests."""
