#!/bin/sh
# lock.sh FILE [OPTION...]: writes the versions of all that tests install, for any Python that Gangline runs on. Versions that FILE
# names already stay where they fit, unless OPTION is --upgrade.
set -eu
cd "$(dirname "$0")/.."
file=$1
shift
exec .venv/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --strip-extras \
    --no-emit-package gangline --annotation-style line --quiet --custom-compile-command "make lock" \
    --output-file "$file" "$@"
