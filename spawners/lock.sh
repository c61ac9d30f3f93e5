#!/usr/bin/env bash
# Resolves the pinned versions again, with a hash for each file: spawners/requirements.lock (both distributions),
# tests/requirements.lock and the locks of the images' layers, images/python/*.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
# jsonschema can check internationalised web addresses with rfc3987-syntax (and lark), which nothing here needs, and only
# compiling its grammar takes 0.85 s at every start of the hub and of each notebook's server. jsonschema does without when it is missing.
resolve=(uv pip compile --quiet --upgrade --python-version 3.11 --generate-hashes --only-binary :all: --no-header --no-annotate --no-emit-index-url
  --no-emit-package lark --no-emit-package rfc3987-syntax)
# What builds the distributions is locked too, without a download of its own. The JupyterLab extension has npm's lock.
"${resolve[@]}" --universal spawners/pyproject.toml extensions/pyproject.toml --extra notebook spawners/build.in -o spawners/requirements.lock
"${resolve[@]}" --universal tests/requirements.in --override images/python/overrides.txt --constraint spawners/requirements.lock -o tests/requirements.lock
# One platform, so that no line has a condition: pip would compare it with the head node's Python. Each layer's lock has
# what the layers below it lack, in their versions.
lock_layer() {
  local name=$1 below=() lower package
  shift
  for lower in "$@"; do
    below+=(--constraint "images/python/$lower.lock")
    while read -r package; do
      below+=(--no-emit-package "$package")
    done < <(sed -n 's/^\([a-z0-9._-]*\)==.*/\1/p' "images/python/$lower.lock")
  done
  "${resolve[@]}" --python-platform x86_64-manylinux_2_36 \
    --override images/python/overrides.txt "${below[@]}" "images/python/$name.in" -o "images/python/$name.lock"
}
lock_layer science
lock_layer lab science
lock_layer llm science lab
lock_layer services science
