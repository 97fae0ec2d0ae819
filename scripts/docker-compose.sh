#!/bin/sh
# docker-compose.sh FOLDER: put the plug-in `docker compose` into FOLDER/cli-plugins, a configuration of Docker's
# (DOCKER_CONFIG), from Debian's package of a later release. Nothing is installed on this machine.
set -eu
mkdir -p "$1/lists/partial" "$1/cache/archives/partial" "$1/cli-plugins"
cd "$1"
folder=$PWD
cat >sources <<END
deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian ${COMPOSE_SUITE:-trixie} main
END
from_there() {
    apt-get -qq -o Dir::Etc::sourcelist="$folder/sources" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$folder/lists" \
        -o Dir::Cache="$folder/cache" -o APT::Sandbox::User=root "$@"
}
from_there update
from_there download docker-compose
dpkg -x docker-compose_*.deb unpacked
cp unpacked/usr/libexec/docker/cli-plugins/docker-compose cli-plugins/
rm -rf lists cache sources unpacked docker-compose_*.deb
