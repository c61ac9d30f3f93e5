"""`python -m gpu_launch.courier`: the same as `gpu-launch-courier`."""

from __future__ import annotations

import sys

from gpu_launch.courier.command import main

sys.exit(main())
