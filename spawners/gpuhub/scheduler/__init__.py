"""The builtin scheduler: which request gets which GPUs, decided without I/O and with the time passed in."""
