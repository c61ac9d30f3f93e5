"""Long-lived workers: ranks between `%%gpu_ranks` cells, the worker of `%%gpu`, and those of `gpu_launch.Executor`."""
