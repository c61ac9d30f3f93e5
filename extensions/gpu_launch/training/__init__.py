"""Training on GPUs of different speed: `gpu_launch.balance`. Only what needs torch imports it, where it is called."""
