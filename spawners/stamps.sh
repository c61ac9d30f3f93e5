# Sourced by setup.sh and venv.sh: remembers in .venv what was installed, so that a second call is quick. Needs $here.

# $1: stamp's name, $2: what its content depends on; true when the stamp is older than that
changed() { [ "$(cat "$here/.venv/.stamp-$1" 2>/dev/null)" != "$2" ]; }
stamp() { echo "$2" >"$here/.venv/.stamp-$1"; }
