#!/usr/bin/env bash
# Follows the tutorial as a newcomer does: newcomer.sh [URL [PAGE]]
#
# Clones URL (default: what is committed in this checkout) into a fresh temporary directory by typing
# the commands of PAGE (default: docs/tutorials/first-hit.md), which are its blocks that begin with
# "```bash newcomer". Fails if there are more than five, if one fails, if all together take longer
# than LIMIT_S seconds, or if the output has no line "second: N of 3000 tokens came from DRAM" with N
# above 0.
set -euo pipefail

COMMANDS_MAX=5
LIMIT_S=${LIMIT_S:-720}
checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
url=${1:-$checkout}
page=${2:-$checkout/docs/tutorials/first-hit.md}
if [ -d "$url" ]; then url=$(cd "$url" && pwd); fi

work=$(mktemp -d "${TMPDIR:-/tmp}/tierkv-newcomer.XXXXXX") # mode 700, as a run directory must have
run=$work/run
mkdir -m 700 "$run"
reader= # the shell that reads the commands, while it runs

clean_up() {
  local daemon
  if [ -n "$reader" ] && kill -TERM "$reader" 2>/dev/null; then wait "$reader" 2>/dev/null || true; fi
  daemon=$(sed -n 's/.*serving: socket=.* pid=\([0-9]*\)$/\1/p' "$run/daemon.log" 2>/dev/null |
    tail -1) || true # no log: no daemon was started
  if [ -n "$daemon" ] && grep -qz tierkv "/proc/$daemon/cmdline" 2>/dev/null; then
    kill -TERM "$daemon"
    timeout 30 tail --pid="$daemon" -f /dev/null || echo "daemon $daemon does not end" >&2
  fi
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT TERM

mapfile -t commands < <(awk '/^```bash newcomer$/ {on = 1; next} /^```$/ {on = 0} on' "$page")
if [ "${#commands[@]}" -eq 0 ] || [ "${#commands[@]}" -gt "$COMMANDS_MAX" ]; then
  echo "error: $page has ${#commands[@]} commands for a newcomer; it needs 1 to $COMMANDS_MAX" >&2
  exit 1
fi

# One shell reads them all, because `cd` and an activated environment must last. Each command is a
# file of its own, so that quoting and redirections are those of the page.
{
  echo 'set -e'
  for number in "${!commands[@]}"; do
    printf '%s\n' "${commands[$number]//URL/$(printf '%q' "$url")}" >"$work/$number.sh"
    echo "echo; echo '\$' \"\$(cat '$work/$number.sh')\""
    echo 'SECONDS=0'
    echo ". '$work/$number.sh'"
    # shellcheck disable=SC2016
    echo 'echo "[$SECONDS s]"'
  done
} >"$work/path.sh"

# A newcomer's shell knows nothing of the environment or the make that started us.
unset VIRTUAL_ENV PYTHONPATH MAKEFLAGS MAKELEVEL MAKEOVERRIDES MFLAGS
export TIERKV_NODE__SERVICE__SOCKET=$run/daemon.sock

cd "$work"
: >output
SECONDS=0
timeout --kill-after=10 "$LIMIT_S" bash path.sh >>output 2>&1 &
reader=$!
tail --pid="$reader" --lines=+1 --follow output # ends with the shell that types
status=0
wait "$reader" || status=$?
reader=
total=$SECONDS

echo
echo "total: $total s for ${#commands[@]} commands"
if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
  echo "error: not done after $LIMIT_S s" >&2
  exit 1
fi
if [ "$status" -ne 0 ]; then
  echo "error: the last command above failed with $status" >&2
  exit 1
fi
hits=$(sed -n 's/^second: \([0-9]*\) of 3000 tokens came from DRAM.*/\1/p' output)
if [ "${hits:-0}" -eq 0 ]; then
  echo "error: no hit: nothing came from DRAM the second time" >&2
  exit 1
fi
echo "first hit: $hits of 3000 tokens"
