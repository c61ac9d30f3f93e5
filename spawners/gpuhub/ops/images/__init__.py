"""The images: built on one Docker daemon, and sent to the others without a registry."""
