#!/usr/bin/env bash
# System packages: installed when missing and we are root, else named. Node.js: checked.
set -euo pipefail

missing=()
has_library() { PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -q "$1"; }
if [ "$(uname -s)" = Linux ]; then
  # A browser with WebGPU, for the demo and the browser tests.
  command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
    missing+=(chromium)
  # lavapipe: a Vulkan device without a GPU, for the wgpu and vulkan executors.
  has_library libvulkan.so.1 || missing+=(libvulkan1)
  compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null || missing+=(mesa-vulkan-drivers)
  compgen -G '/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json' >/dev/null || missing+=(vulkan-validationlayers)
  # spirv-val, which the tests ask about every Vulkan kernel.
  command -v spirv-val >/dev/null || missing+=(spirv-tools)
  # A store that several servers count limits in, for their tests.
  command -v redis-server >/dev/null || missing+=(redis-server)
  # Another browser, for the tests of WebAssembly.
  command -v firefox-esr >/dev/null || command -v firefox >/dev/null || missing+=(firefox-esr)
  # Another processor, for the tests of CPU programs for aarch64, and a disassembler for them.
  if [ "$(uname -m)" = x86_64 ]; then
    command -v qemu-aarch64 >/dev/null || missing+=(qemu-user)
    [ -d /usr/aarch64-linux-gnu ] || missing+=(libc6-arm64-cross)
    command -v llvm-objdump >/dev/null || missing+=(llvm)
  fi
fi

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing ${missing[*]}"
    "$(dirname "$0")/apt_install.sh" "${missing[@]}"
  else
    echo "These system packages are missing: ${missing[*]}" >&2
    echo "Install them (Debian, Ubuntu: sudo apt-get install ${missing[*]}), then run make again." >&2
    echo "Without chromium there is no browser demo, without libvulkan1 and mesa-vulkan-drivers no wgpu and vulkan" >&2
    echo "executor on a machine that has no GPU driver, without spirv-tools no check of SPIR-V, without redis-server" >&2
    echo "none of the limits store, without firefox-esr none of Firefox, and without qemu-user, libc6-arm64-cross and llvm" >&2
    echo "none of aarch64 in the tests." >&2
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
