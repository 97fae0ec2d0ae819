#!/bin/sh
# under-load.sh [RUNS]: `make test` RUNS times in a row (3), while 15 processes compute without end, a third of them with
# files. For limits that are too short on a busy machine. TESTS names the tests, as for `make test`.
set -eu
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
busy=""
ends() {
    # shellcheck disable=SC2086 (a list of pids)
    kill $busy 2>/dev/null || true
    rm -rf "$folder"
}
trap ends EXIT
trap 'exit 130' INT TERM
for number in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
    if [ $((number % 3)) -eq 0 ]; then
        sh -c 'while :; do dd if=/dev/zero of="$0" bs=1M count=64 conv=fsync 2>/dev/null; done' "$folder/$number" &
    else
        sh -c 'while :; do :; done' &
    fi
    busy="$busy $!"
done
for run in $(seq "${1:-3}"); do
    echo "Run $run, with 15 busy processes:"
    make test
done
