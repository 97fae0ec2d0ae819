#!/bin/bash
# A newcomer on a bare Debian: nothing but Python, bubblewrap and the package index. Prints the seconds from the wheel to
# rows of an own agent, by the commands that `gangline init` prints. As root: it makes mounts.
#
#   usage: newcomer.sh WHEEL [ROOT]
#
# ROOT is made once with debootstrap (.newcomer-root); the machine's settings of the package index are used in it.
set -euo pipefail

cd "$(dirname "$0")/.."
wheel=$(realpath "$1")
root=$(realpath -m "${2:-.newcomer-root}")
suite=${NEWCOMER_SUITE:-bookworm}

[ "$(id -u)" = 0 ] || { echo "Run as root: it makes mounts." >&2; exit 1; }
if [ ! -e "$root/.ready" ]; then
    command -v debootstrap >/dev/null || { echo "Run: apt-get install -y debootstrap" >&2; exit 1; }
    rm -rf "$root"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates,bubblewrap "$suite" "$root" >&2
    chroot "$root" useradd --create-home --uid 1000 newcomer
    touch "$root/.ready"
fi

# A file system of its own rather than a chroot, in which no user could make user namespaces.
# shellcheck disable=SC2016
exec unshare --mount --pid --fork --propagation private bash -euo pipefail -c '
root=$1 wheel=$2
mount --bind "$root" "$root"
mount -t tmpfs tmpfs "$root/home/newcomer"
mkdir -p "$root/.old" "$root/home/newcomer/.config/pip"
for path in /etc/hosts /etc/resolv.conf /etc/pip.conf "${PIP_CERT:-}" "${SSL_CERT_FILE:-}"; do
    [ -f "$path" ] || continue
    mkdir -p "$(dirname "$root$path")"
    touch "$root$path"
    mount --bind "$path" "$root$path"
done
if [ -f "$HOME/.config/pip/pip.conf" ]; then
    touch "$root/home/newcomer/.config/pip/pip.conf"
    mount --bind "$HOME/.config/pip/pip.conf" "$root/home/newcomer/.config/pip/pip.conf"
fi
touch "$root/home/newcomer/$(basename "$wheel")"
mount --bind "$wheel" "$root/home/newcomer/$(basename "$wheel")"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
chown 1000:1000 "$root/home/newcomer" "$root/home/newcomer/.config"
cd "$root"
pivot_root . .old
cd /
umount --lazy /.old
exec su newcomer --shell /bin/bash --whitelist-environment=PIP_CERT,PIP_INDEX_URL,SSL_CERT_FILE --login --command "$3"
' _ "$root" "$wheel" '
set -euo pipefail
SECONDS_AT=$(date +%s.%N)
python3 -m venv gangline
gangline/bin/pip install --quiet "$(ls -d "$PWD"/*.whl)[tokenizer]"
PATH=$PWD/gangline/bin:$PATH
gangline init my-agent | tee steps.txt >&2
sed -n "/^Next steps/,/^$/p" steps.txt | sed -e 1d -e "/^$/d" -e "s/  *# .*//" -e "s/^  //" > steps.sh
while read -r step; do
    echo "+ $step" >&2
    case $step in
    "gangline up"*) (eval "$step" > up.log 2>&1 &); until [ -e .gangline/up.json ]; do sleep 0.1; done ;;
    *) eval "$step" >&2 ;;
    esac
done < steps.sh
rows=$(cat ./*-1.jsonl | wc -l)
[ "$rows" -ge 1 ]
echo "$(date +%s.%N) $SECONDS_AT $rows" | awk "{printf \"{\\\"first_rows_s\\\": %.1f, \\\"rows\\\": %d}\\n\", \$1 - \$2, \$3}"
gangline down >&2
'
