#!/usr/bin/env bash
# System packages: installed when missing and we are root, else named. Node.js: checked.
# check_system.sh [demo|dev]: what running needs; or the demo as well; or the tests, too.
set -euo pipefail

level=${1:-}
missing=()
why=()
has() { command -v "$1" >/dev/null; }
has_library() { PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q "$1"; }
needs() { # PACKAGES… : what there is none of without them
  local packages=()
  while [ "$1" != : ]; do packages+=("$1"); shift; done
  missing+=("${packages[@]}")
  why+=("Without ${packages[*]} there is no $2.")
}
if [ "$(uname -s)" = Linux ]; then
  # lavapipe: a Vulkan device without a GPU, for the wgpu and vulkan executors.
  has_library libvulkan.so.1 || needs libvulkan1 : "wgpu and vulkan executor"
  compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null ||
    needs mesa-vulkan-drivers : "wgpu and vulkan executor on a machine without a GPU's own driver"
  if [ "$level" != "" ]; then
    has chromium || has chromium-browser || has google-chrome || needs chromium : "page in the demo and the tests"
  fi
  if [ "$level" = dev ]; then
    compgen -G '/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json' >/dev/null ||
      needs vulkan-validationlayers : "validation of Vulkan calls in the tests"
    has spirv-val || needs spirv-tools : "check of SPIR-V in the tests"
    has redis-server || needs redis-server : "test of limits that several servers count together"
    has firefox-esr || has firefox || needs firefox-esr : "test of WebAssembly in Firefox"
    if [ "$(uname -m)" = x86_64 ]; then
      has qemu-aarch64 || needs qemu-user : "test of CPU programs for aarch64"
      [ -d /usr/aarch64-linux-gnu ] || needs libc6-arm64-cross : "test of CPU programs for aarch64"
      has llvm-objdump || needs llvm : "test of the instructions of aarch64"
    fi
  fi
fi

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    "$(dirname "$0")/apt_install.sh" "${missing[@]}"
  else
    echo "These system packages are missing: ${missing[*]}" >&2
    echo "Install them (Debian, Ubuntu: sudo apt-get install ${missing[*]}), then run make again." >&2
    printf '%s\n' "${why[@]}" >&2
    echo "Going on without them." >&2
  fi
fi

if [ -f "$(dirname "$0")/../web/package.json" ]; then
  version=$(node --version 2>/dev/null || echo none)
  major=${version#v}
  major=${major%%.*}
  if ! [[ $major =~ ^[0-9]+$ ]] || [ "$major" -lt 20 ] || ! command -v npm >/dev/null; then
    echo "error: the web package needs Node.js 20 or newer with npm; found $version. See https://nodejs.org" >&2
    exit 1
  fi
fi
