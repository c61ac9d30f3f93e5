"""Browsers besides Chromium, and what tests run in pages."""
