#!/bin/sh
# need-package.sh COMMAND PACKAGE: make sure that COMMAND is there, installing the Debian or Ubuntu PACKAGE where that is
# allowed (root, or sudo without a password). Else prints the one line to run, and ends with 1.
set -u
command=$1
package=$2
found() { sh -c "$command" >/dev/null 2>&1; }
found && exit 0
if command -v apt-get >/dev/null 2>&1; then
    if [ "$(id -u)" = 0 ]; then as_root=""; elif sudo -n true 2>/dev/null; then as_root="sudo -n"; else as_root="no"; fi
    if [ "$as_root" != no ]; then
        echo "Installing $package ..." >&2
        { $as_root apt-get install -y -qq "$package" || { $as_root apt-get update -qq && $as_root apt-get install -y -qq "$package"; }; } >/dev/null 2>&1
        found && exit 0
    fi
fi
echo "" >&2
echo "  $package is missing. Install it:   sudo apt-get install -y $package" >&2
echo "" >&2
exit 1
