"""Runs the courier as `python -m gpu_launch.courier`."""

from __future__ import annotations

import sys

from gpu_launch.courier.main import main

sys.exit(main())
