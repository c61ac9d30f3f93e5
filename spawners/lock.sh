#!/usr/bin/env bash
# Resolves the pinned versions again, with a hash for each file: spawners/requirements.lock (both distributions),
# tests/requirements.lock and images/python/requirements.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve=(uv pip compile --quiet --upgrade --python-version 3.11 --generate-hashes --only-binary :all: --no-header --no-annotate --no-emit-index-url)
# setuptools builds both distributions, without a download of its own.
"${resolve[@]}" --universal spawners/pyproject.toml extensions/pyproject.toml --extra notebook spawners/build.in -o spawners/requirements.lock
"${resolve[@]}" --universal tests/requirements.in --constraint spawners/requirements.lock -o tests/requirements.lock
# One platform, so that no line has a condition: pip would compare it with the head node's Python. See requirements.in for
# the packages that are left out.
"${resolve[@]}" --python-platform x86_64-manylinux_2_36 --no-emit-package lark --no-emit-package rfc3987-syntax \
  images/python/requirements.in -o images/python/requirements.lock
