"""Scheduling backends: what decides who gets GPUs.

A backend is a `SchedulingBackend` (`interface`) and a `BackendPlugin` (`plugin`), named by an entry point; see
docs/backends.md.
"""
