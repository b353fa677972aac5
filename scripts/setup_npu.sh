#!/usr/bin/env bash
# Makes the environment of tests/npu: setup_npu.sh MAIN_ENVIRONMENT FOLDER
#
# An environment of its own with torch-npu in it; everything else it sees in the main one, where
# torch-npu must not be: torch loads it into every process that imports torch. The stand-in for the
# Ascend runtime, without which torch-npu cannot be imported here, is built into FOLDER/standin.
set -euo pipefail
main=$(cd "$1" && pwd -P)
folder=$2

command -v g++ >/dev/null || {
  echo "error: g++ is not installed; on Debian and Ubuntu: apt-get install g++" >&2
  exit 1
}
echo "setting up $folder (about a minute the first time)"
[ -x "$folder/bin/python" ] || "$main/bin/python" -m venv --without-pip "$folder"

site_of() { "$1/bin/python" -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
link=$(site_of "$folder")/main-environment.pth
# pip must not see the main environment's packages, or it would change them.
rm -f "$link"
"$main/bin/python" -m pip --disable-pip-version-check --python "$folder/bin/python" \
  install --quiet --no-deps --requirement requirements-npu.lock || {
  echo "error: torch-npu is not installed; see above. Planted bugs and tests of the Ascend device" \
    "need it" >&2
  exit 1
}
# addsitedir, not the bare path: the main environment has .pth files of its own.
printf 'import site; site.addsitedir("%s")\n' "$(site_of "$main")" >"$link"

"$folder/bin/python" tests/npu/standin/build.py "$folder/standin"
