#!/bin/bash
# Run tests/apptainer with Apptainer itself: as root, as an ordinary user, and as one whose agents are root in their
# container. Apptainer comes from Debian unstable, into a root file system of its own (.apptainer-root, 600 MB, made
# once in some minutes): nothing is installed on this machine. Arguments go to pytest.
set -euo pipefail

cd "$(dirname "$0")/.."
root=$PWD/.apptainer-root
suite=${APPTAINER_SUITE:-sid}
packages=apptainer,fuse-overlayfs,squashfuse,uidmap,python3,procps,libffi8,libbz2-1.0,libreadline8t64,libssl3t64

[ "$(id -u)" = 0 ] || { echo "Run as root: it makes mounts." >&2; exit 1; }
python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
[ "$python" != /usr ] || { echo "Make .venv with a Python outside /usr: another system's /usr is used." >&2; exit 1; }

if [ ! -e "$root/.ready" ]; then
    command -v debootstrap >/dev/null || { echo "Run: apt-get install -y debootstrap" >&2; exit 1; }
    rm -rf "$root"
    debootstrap --variant=minbase --include="$packages" "$suite" "$root" >&2
    chroot "$root" useradd --create-home tester
    cp /etc/hosts /etc/resolv.conf "$root/etc/"
    find "$root/dev" -mindepth 1 -delete # an ordinary user can unpack no image with devices in it
    touch "$root/.ready"
fi
# A Python below /root must be reached by the ordinary user too; what else is there must not.
chmod 711 "$root/root"
find "$root/root" -maxdepth 1 -type f -exec chmod 600 {} +

# A file system of its own rather than a chroot, in which no user could make user namespaces.
# shellcheck disable=SC2016
exec unshare --mount --propagation private bash -euo pipefail -c '
root=$1 python=$2 repository=$3
shift 3
mount --bind "$root" "$root"
mkdir -p "$root/image" "$root/.old"
mount --bind "$root" "$root/image"
for folder in /proc /dev /sys "$python" "$repository"; do
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
mount -t tmpfs tmpfs "$root/run"
mknod -m 666 "$root/run/fuse" c 10 229
mount --bind "$root/run/fuse" "$root/dev/fuse"
cd "$root"
pivot_root . .old
cd /
umount --lazy /.old

export PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME=/root PYTHONDONTWRITEBYTECODE=1
export GANGLINE_TEST_IMAGE=/var/lib/gangline-test.sif
[ -e "$GANGLINE_TEST_IMAGE" ] || apptainer --silent build "$GANGLINE_TEST_IMAGE" /image
cd "$repository"
tests="$(printf "%q " .venv/bin/python -m pytest -p no:cacheprovider tests/apptainer "$@")"
bash -c "$tests --basetemp=/tmp/of-root"
su tester --shell /bin/bash --command "$tests --basetemp=/tmp/of-user"
su tester --shell /bin/bash --command "GANGLINE_APPTAINER_FAKEROOT=1 $tests --basetemp=/tmp/of-fakeroot"
rm -rf /tmp/of-root /tmp/of-user /tmp/of-fakeroot
' _ "$root" "$python" "$PWD" "$@"
