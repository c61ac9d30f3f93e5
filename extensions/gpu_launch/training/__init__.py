"""Training on GPUs of different speed (`gpu_launch.balance`) and over slow networks (`--comm`).

Only what needs torch imports it, where it is called.
"""
