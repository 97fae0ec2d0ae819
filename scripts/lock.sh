#!/bin/sh
# lock.sh FILE [OPTION...]: writes the versions that tests install and the hashes of their files, those of the
# documentation site for a FILE named docs.txt, and those of uv itself for uv.txt, for any Python that Gangline runs on.
# Versions that FILE names already stay where they fit, unless OPTION is --upgrade. For npm-lock.json: the packages of
# all agent programs from npm, anew.
set -eu
cd "$(dirname "$0")/.."
file=$1
shift
case $file in
*npm-lock.json)
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    .venv/bin/python -c 'from gangline.agents.harnesses.installation import npm_requirements; print(*npm_requirements())' |
        xargs npm install --prefix "$folder" --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts \
            --no-audit --no-fund --loglevel=error --save-exact
    cp "$folder/package-lock.json" "$file"
    exit
    ;;
*docs.txt) set -- requirements/docs.in "$@" ;;
*uv.txt) set -- requirements/uv.in "$@" ;;
*) set -- pyproject.toml --extra dev "$@" ;;
esac
exec .venv/bin/uv pip compile --universal --python-version 3.11 --strip-extras --no-emit-package gangline \
    --annotation-style line --quiet --generate-hashes --custom-compile-command "make lock" --output-file "$file" "$@"
