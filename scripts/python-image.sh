#!/bin/sh
# python-image.sh FOLDER HARNESS...
# Makes a root file system of Debian 13 with Python 3.13, git and tmux, and in it the Python programs of the harnesses
# named, for machines that have no such Python. Use the folder as `runtime.image`. Needs apt, Debian's keys, bwrap; not root.
set -eu
folder=$1
shift
python=${PYTHON:-$(dirname "$0")/../.venv/bin/python}
# Of each harness a line: the name of its program, and what pip is to install.
wanted=$("$python" -c "import sys
from gangline.agents.harnesses.installation import find_program
for program in map(find_program, sys.argv[1:]):
    print(program.command, *program.requirements())" "$@")
[ "$(cat "$folder/.complete" 2>/dev/null)" != "$wanted" ] || exit 0
for needed in apt-get dpkg bwrap; do
    command -v $needed >/dev/null || { echo "$needed is missing: this needs a Debian with bubblewrap." >&2; exit 1; }
done
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -e $keys ] || { echo "Debian's keys are missing: apt-get install debian-archive-keyring" >&2; exit 1; }

rm -rf "$folder"
apt=$(mktemp -d)
trap 'rm -rf "$apt"' EXIT
mkdir -p "$folder" "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/parts"
: > "$apt/status"
# The archive that this machine's apt uses, a mirror for example; Debian's own where it uses none of Debian.
targets() { apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "$@" 2>/dev/null; }
archive=$( { targets 'Label: Debian'; targets | grep '/debian/$'; echo http://deb.debian.org/debian/; } | head -n 1)
echo "deb [signed-by=$keys] $archive trixie main" > "$apt/sources.list"
cat > "$apt/apt.conf" << END
Dir::State "$apt";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::sourcelist "$apt/sources.list";
Dir::Etc::sourceparts "$apt/parts";
Dir::Etc::preferencesparts "$apt/parts";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Debug::NoLocking "true";
END
export APT_CONFIG="$apt/apt.conf"
echo "Fetching Debian 13 ..."
apt-get -qq update
apt-get -qq install --yes --download-only base-files base-passwd bash ca-certificates coreutils dash diffutils findutils \
    gawk git grep gzip hostname libc-bin ncurses-base ncurses-bin procps python3.13 python3.13-venv sed tar tmux util-linux
# First what makes /bin and /lib links.
dpkg -x "$apt"/cache/archives/base-files_*.deb "$folder"
for package in "$apt"/cache/archives/*.deb; do
    dpkg -x "$package" "$folder"
done
cp "$folder/usr/share/base-passwd/passwd.master" "$folder/etc/passwd"
cp "$folder/usr/share/base-passwd/group.master" "$folder/etc/group"
ln -sf gawk "$folder/usr/bin/awk"
ln -sf python3.13 "$folder/usr/bin/python3"
cat "$folder"/usr/share/ca-certificates/mozilla/*.crt > "$folder/etc/ssl/certs/ca-certificates.crt"
touch "$folder/etc/resolv.conf"
mkdir -p "$folder/usr/local/bin"

inside() {
    bwrap --bind "$folder" / --proc /proc --dev /dev --tmpfs /tmp --ro-bind /etc/resolv.conf /etc/resolv.conf \
        --ro-bind /etc/ssl/certs /etc/ssl/certs --setenv HOME /tmp --chdir / -- "$@"
}
echo "$wanted" | while read -r command requirements; do
    echo "Installing $requirements ..."
    inside python3 -m venv "/opt/$command" < /dev/null
    # shellcheck disable=SC2086
    inside "/opt/$command/bin/pip" install --quiet --no-cache-dir --disable-pip-version-check $requirements < /dev/null
    printf '#!/bin/sh\nexec /opt/%s/bin/python "$@"\n' "$command" > "$folder/usr/local/bin/$command-python"
    chmod 755 "$folder/usr/local/bin/$command-python"
done
echo "$wanted" > "$folder/.complete"
