"""Scheduling backends: what decides who gets GPUs.

A backend is a `SchedulingBackend` (`interface`) and a `BackendPlugin` (`plugin`), named by an entry point. docs/backends.md
says how to write one.
"""
