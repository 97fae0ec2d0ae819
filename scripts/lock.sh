#!/bin/sh
# lock.sh FILE [OPTION...]: writes the versions that tests install, or those of the documentation site for a FILE named docs.txt, for
# any Python that Gangline runs on. Versions that FILE names already stay where they fit, unless OPTION is --upgrade.
set -eu
cd "$(dirname "$0")/.."
file=$1
shift
case $file in
*docs.txt) set -- requirements/docs.in "$@" ;;
*) set -- pyproject.toml --extra dev "$@" ;;
esac
exec .venv/bin/uv pip compile --universal --python-version 3.11 --strip-extras --no-emit-package gangline \
    --annotation-style line --quiet --custom-compile-command "make lock" --output-file "$file" "$@"
