"""Scheduling backends: what decides who gets GPUs, found by entry point."""
