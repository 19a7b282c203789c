#!/usr/bin/env bash
# apt_install.sh PACKAGE...: installs Debian packages. Another apt may be at work (unattended upgrades, a second setup):
# this one waits for it, APT_WAIT seconds at most (600).
set -euo pipefail

wait_s=${APT_WAIT:-600}
export DEBIAN_FRONTEND=noninteractive

# DPkg::Lock::Timeout makes `install` wait; `update` takes another lock (of the lists), and fails at once where it is held.
update() {
  local deadline=$((SECONDS + wait_s)) told=
  while ! output=$(LC_ALL=C apt-get update -qq 2>&1); do
    [[ $output == *"Could not get lock"* ]] || { printf '%s\n' "$output" >&2; return 1; }
    if [ "$SECONDS" -ge "$deadline" ]; then
      printf '%s\n' "$output" "error: another apt still holds its lock after $wait_s s. Let it finish, or end it, and run make again." >&2
      return 1
    fi
    [ -n "$told" ] || echo "another apt is at work: waiting for it, $wait_s s at most" >&2
    told=yes
    sleep 1
  done
}

update
apt-get -o "DPkg::Lock::Timeout=$wait_s" install -y -qq --no-install-recommends "$@"
