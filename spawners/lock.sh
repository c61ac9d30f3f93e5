#!/usr/bin/env bash
# Resolves the pinned versions again: spawners/requirements.lock (both distributions) and tests/requirements.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve=(uv pip compile --quiet --universal --upgrade --python-version 3.11 --no-header --no-annotate --no-emit-index-url)
"${resolve[@]}" spawners/pyproject.toml extensions/pyproject.toml --extra notebook -o spawners/requirements.lock
"${resolve[@]}" tests/requirements.in --constraint spawners/requirements.lock -o tests/requirements.lock
