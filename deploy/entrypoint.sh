#!/bin/sh
# A key belongs in a file, not in a container's environment, where `docker inspect` shows it. nearfar reads the upstream
# servers' key from its own process's environment, so it is put there at the last moment.
set -eu
if [ -n "${NEARFAR_UPSTREAM_KEY_FILE:-}" ]; then
  NEARFAR_UPSTREAM_KEY="$(cat "$NEARFAR_UPSTREAM_KEY_FILE")"
  export NEARFAR_UPSTREAM_KEY
fi
exec nearfar "$@"
